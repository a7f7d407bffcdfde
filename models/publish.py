"""From a run's folder to the Hub: weights, config, recipe and model card of its drafter.

What is pushed is a list of known files, whose paths are cut to names (models/portable.py).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from specdraft.models.cards.card import PICTURE, model_card
from specdraft.models.cards.curve import curve
from specdraft.models.cards.lines import Card, generate_file
from specdraft.models.cards.log import log_in
from specdraft.models.hub import PAGE, push
from specdraft.models.portable import portable, portable_json
from specdraft.models.published import kind_there
from specdraft.models.saved import CONFIG
from specdraft.models.target_files import read_chat_template
from specdraft.models.weights.checksums import SUMS, check_sums, sums
from specdraft.recipes.errors import HeadError, HubError, in_a_line
from specdraft.recipes.find import (
    KINDS,
    TEMPLATE,
    drafter_folder,
    drafter_of,
    is_own_template,
    kind_of,
    kinds_of,
    read_config,
)
from specdraft.recipes.fitted_tree import FIT, read_fit
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import (
    AUTO,
    TREE,
    known_trees,
    load_tree_paths,
    tree_block_size,
    tree_place,
)
from specdraft.recipes.terminal import say
from specdraft.recipes.yaml_file import dump_yaml, read_mapping

# All that a drafter's folder gives a push: settings, in which paths become names, and the rest.
SETTINGS = ("config.json", "generation_config.json")
WHOLE = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
REPORT = "report.json"  # of a run, or in the folder of its drafter
BENCH = "bench"  # in a run's folder: a folder for every setting that eval/bench.py has measured
REQUIREMENTS = "specdraft>=0.1.0\n"  # of custom_generate/generate.py


def publish(recipe: Recipe, card: Card) -> str | None:
    """Push the drafter of `output.dir` to `hub.repo_id`; return the commit's address.

    What goes there is told first. None where the recipe names no repository. Raises HeadError when
    there is no drafter, HubError when the Hub does not take it; the repository then holds what it
    held before.
    """
    hub, run = recipe.hub, Path(recipe.output.dir)
    if hub.repo_id is None:
        return None
    files = contents(recipe, card)
    say(manifest(files, recipe, card))
    try:
        message = f"{card.noun}, {recipe.name}"
        return push(files, hub.repo_id, hub.private, hub.revision, message)
    except HubError as error:
        whole = run if len(kinds_of(run)) == 1 else drafter_folder(run, card.kind)
        raise HubError(
            f"{error}; {whole} is whole, go on with: python models/push.py {whole} {hub.repo_id}"
        ) from error


def contents(recipe: Recipe, card: Card) -> dict[str, Path | bytes]:
    """Return what goes into the repository, by its place there; nothing that names a place of this
    machine. Raises HeadError where the drafter is not whole, or a link to one."""
    folder = Path(drafter_of(recipe, card.kind))
    if not (folder / CONFIG).is_file() or not any(folder.glob("*.safetensors")):
        noun = card.noun.partition(" ")[2]
        raise HeadError(f"no trained {noun} at {folder}; train one first")
    check_sums(folder)
    files: dict[str, Path | bytes] = {path.name: path for path in _known(folder)}
    files |= {name: portable_json(folder / name) for name in SETTINGS if name in files}
    files[SUMS] = sums(files).encode()
    if (own := _own_tree(recipe, card)) is not None:
        files[TREE] = _tree(own)
    if is_own_template(recipe.target.chat_template):
        files[TEMPLATE] = read_chat_template(recipe.target.chat_template).encode()
    files |= pages(recipe, card)
    files["custom_generate/generate.py"] = generate_file(recipe, card).encode()
    files["custom_generate/requirements.txt"] = REQUIREMENTS.encode()
    named = with_names(recipe, next(iter(measured(Path(recipe.output.dir), folder)), None))
    files["recipe.yaml"] = dump_yaml(pushed_recipe(named)).encode()
    return files


def pages(recipe: Recipe, card: Card) -> dict[str, bytes]:
    """Return the card of the drafter of `output.dir`, and the picture in it."""
    run = Path(recipe.output.dir)
    folder, own = Path(drafter_of(recipe, card.kind)), _own_tree(recipe, card)
    log = log_in(folder, run)  # which nothing but the loop writes
    picture = None if card.kind == "table" else curve(log)
    reports = measured(run, folder)
    text = model_card(
        with_names(recipe, reports[0] if reports else None),
        card,
        config=portable(json.loads((folder / CONFIG).read_text())),
        reports=reports,
        picture=picture is not None,
        fit=own and read_fit(own),
    )
    return {PAGE: text.encode()} | ({PICTURE: picture} if picture else {})


def _report(path: Path) -> dict:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise HeadError(
            f"{path} is damaged ({in_a_line(error)}); delete it, or measure again"
        ) from error


def measured(run: Path, folder: Path) -> list[dict]:
    """Return the reports of a drafter, that of its training first, then those of benchmarks of the
    same weights; paths are names in all of them."""
    own = next((p for p in (folder / REPORT, run / REPORT) if p.is_file()), None)
    if own is None:
        return []
    first, *others = (
        portable(_report(path)) for path in (own, *sorted(run.glob(f"{BENCH}/*/{REPORT}")))
    )
    weights = set(first.get("drafter", ()))
    return [first, *(one for one in others if weights and weights <= set(one.get("drafter", ())))]


def _own_tree(recipe: Recipe, card: Card) -> Path | None:
    """Return the tree file that goes along with a drafter: the one beside its weights, or the one
    that the recipe names. None for drafters without trees."""
    if not card.drafts_trees:
        return None
    if recipe.eval.tree != AUTO:
        return tree_place(recipe.eval.tree)
    own = Path(drafter_of(recipe, card.kind)) / TREE
    if not own.is_file():
        raise HeadError(f"eval.tree = {AUTO}: no {own.name} in {own.parent}; {FIT}")
    return own


def _known(folder: Path) -> list[Path]:
    """The files of a drafter in its folder. Raises HeadError for one that is a link."""
    found = [path for path in sorted(folder.iterdir()) if _is_known(path.name)]
    for path in [folder, *found]:
        if path.is_symlink():
            raise HeadError(f"{path} is a link, and a push follows none; put a copy in its place")
    return [path for path in found if path.is_file()]


def _is_known(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*SETTINGS, *WHOLE))


def _tree(file: Path) -> bytes:
    """Return a tree file with the keys that are read of it, and nothing else that is in it."""
    paths, fit = load_tree_paths(str(file)), read_mapping(file).get("fit")
    tree = {"block_size": tree_block_size(str(file)), "paths": list(map(list, paths)), "fit": fit}
    return dump_yaml({key: part for key, part in tree.items() if part}).encode()


def manifest(files: Mapping[str, Path | bytes], recipe: Recipe, card: Card) -> str:
    """Say what a push publishes, file by file, and what it leaves in the drafter's folder."""
    hub, folder = recipe.hub, Path(drafter_of(recipe, card.kind))
    lines = [f"to {hub.repo_id} ({'private' if hub.private else 'PUBLIC'}):"]
    for name, content in files.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        lines.append(f"  {name:32}{size:>14,} bytes")
    # The library's own page of a head makes room for ours.
    left = {path.name for path in folder.iterdir()} - files.keys()
    if left:
        lines.append(f"not pushed, for they are no part of a drafter: {', '.join(sorted(left))}")
    return "\n".join(lines)


def pushed_recipe(recipe: Recipe) -> dict:
    """Return a recipe without the paths of one machine, and without the server that answered."""
    sections = portable(recipe.to_dict())
    if recipe.eval.tree not in known_trees():
        sections["eval"]["tree"] = AUTO  # that which goes along
    if is_own_template(recipe.target.chat_template):
        sections["target"]["chat_template"] = TEMPLATE
    del sections["output"], sections["hub"], sections["data"]["cache_dir"]
    del sections["data"]["server"], sections["data"]["server_model"]
    return sections


def with_names(recipe: Recipe, report: dict | None) -> Recipe:
    """Return a recipe whose target and data are names instead of paths, for a card.

    report: of its training, on the machine with these paths, which could tell them from names.
    """
    there = report["recipe"] if report else {}
    model = there.get("target", {}).get("model", recipe.target.model)
    sources = there.get("data", {}).get("sources", recipe.data.sources)
    template = portable(recipe.target.chat_template)
    target = replace(recipe.target, model=portable(model), chat_template=template)
    return replace(
        recipe,
        target=target,
        data=replace(recipe.data, sources=tuple(map(portable, sources))),
    )


def kind_named(name: str, recipe: Recipe) -> str:
    """Return the kind of drafter that is pushed by a name: of a drafter's folder its own, else that
    of the one drafter in the recipe's run."""
    if not (Path(name) / CONFIG).is_file():
        return kind_there(Path(recipe.output.dir))
    return Path(name).name if Path(name).name in KINDS else kind_of(read_config(Path(name)))
