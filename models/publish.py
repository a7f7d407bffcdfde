"""From a run's folder to the Hub: weights, config, recipe and model card of its drafter.

What is pushed is a list of known files, and names stand in them for places of this machine: nobody
else can use a path, and it tells whose machine it was.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from specdraft.models.card import PICTURE, Card, generate_file, model_card, tree_name
from specdraft.models.curve import curve
from specdraft.models.hub import SUMS, push
from specdraft.models.saved import CONFIG, check_sums, sums
from specdraft.recipes.errors import HeadError, HubError
from specdraft.recipes.find import KINDS, OLD_HEAD, drafter_folder, kinds_of
from specdraft.recipes.fitted_tree import FIT, read_fit
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import AUTO, TREE, load_tree_paths, tree_block_size
from specdraft.recipes.terminal import say
from specdraft.recipes.yaml_file import read_mapping

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
FILES = (".json", ".jsonl", ".txt", ".csv", ".yaml", ".jinja", ".arrow", ".parquet", ".gz", ".zip")
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
        raise HubError(
            f"{error}; {run} is whole, go on with: python models/push.py {run} {hub.repo_id}"
        ) from error


def contents(recipe: Recipe, card: Card) -> dict[str, Path | bytes]:
    """Return what goes into the repository, by its place there; nothing that names a place of this
    machine. Raises HeadError where the drafter is not whole, or a link to one."""
    run = Path(recipe.output.dir)
    folder = drafter_folder(run, card.kind)
    if not (folder / CONFIG).is_file() or not any(folder.glob("*.safetensors")):
        noun = card.noun.partition(" ")[2]
        raise HeadError(f"no trained {noun} at {folder}; train one first")
    check_sums(folder)
    files: dict[str, Path | bytes] = {path.name: path for path in _known(folder)}
    files |= {name: _portable_json(folder / name) for name in SETTINGS if name in files}
    files[SUMS] = sums(files).encode()
    fit = None
    if card.drafts_trees and tree_name(recipe) == AUTO:
        own = folder / TREE if recipe.eval.tree == AUTO else Path(recipe.eval.tree)
        if not own.is_file():
            raise HeadError(f"eval.tree = {AUTO}: no {TREE} in {folder}; {FIT}")
        fit, files[TREE] = read_fit(own), _tree(own)
    report, picture = run / "report.json", curve(run / "log.jsonl")
    if picture:
        files[PICTURE] = picture
    text = model_card(
        without_places(recipe),
        card,
        config=json.loads(files["config.json"]),
        report=portable(json.loads(report.read_text())) if report.is_file() else None,
        picture=picture is not None,
        fit=fit,
    )
    files["README.md"] = text.encode()
    files["custom_generate/generate.py"] = generate_file(recipe, card).encode()
    files["custom_generate/requirements.txt"] = REQUIREMENTS.encode()
    files["recipe.yaml"] = yaml.safe_dump(pushed_recipe(recipe), sort_keys=False).encode()
    return files


def _known(folder: Path) -> list[Path]:
    """The files of a drafter in its folder. Raises HeadError for one that is a link."""
    found = [path for path in sorted(folder.iterdir()) if _is_known(path.name)]
    for path in [folder, *found]:
        if path.is_symlink():
            raise HeadError(f"{path} is a link, and a push follows none; put a copy in its place")
    return [path for path in found if path.is_file()]


def _is_known(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*SETTINGS, *WHOLE))


def _portable_json(path: Path) -> bytes:
    return (json.dumps(portable(json.loads(path.read_text())), indent=2) + "\n").encode()


def _tree(file: Path) -> bytes:
    """A tree of the user's own: what is read of its file, and nothing else in it."""
    paths, fit = load_tree_paths(str(file)), read_mapping(file).get("fit")
    tree = {"block_size": tree_block_size(str(file)), "paths": list(map(list, paths)), "fit": fit}
    return yaml.safe_dump({key: part for key, part in tree.items() if part}).encode()


def manifest(files: Mapping[str, Path | bytes], recipe: Recipe, card: Card) -> str:
    """Say what a push publishes, file by file, and what it leaves in the drafter's folder."""
    hub, folder = recipe.hub, drafter_folder(Path(recipe.output.dir), card.kind)
    lines = [f"to {hub.repo_id} ({'private' if hub.private else 'PUBLIC'}):"]
    for name, content in files.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        lines.append(f"  {name:32}{size:>14,} bytes")
    # The library's own page of a head makes room for ours.
    left = {path.name for path in folder.iterdir()} - files.keys()
    if left:
        lines.append(f"left here, for no drafter has them: {', '.join(sorted(left))}")
    return "\n".join(lines)


# -- names in place of places ----------------------------------------------------------------------


def pushed_recipe(recipe: Recipe) -> dict:
    """Return a recipe without the places of one machine, and without the server that answered."""
    sections = portable(recipe.to_dict())
    sections["eval"]["tree"] = tree_name(recipe)
    del sections["output"], sections["hub"], sections["data"]["cache_dir"]
    del sections["data"]["server"], sections["data"]["server_model"]
    return sections


def without_places(recipe: Recipe) -> Recipe:
    """Return a recipe whose target and data go by their names, for a card."""
    target = replace(recipe.target, model=portable(recipe.target.model))
    data = replace(recipe.data, sources=tuple(map(portable, recipe.data.sources)))
    return replace(recipe, target=target, data=data)


def portable(value: Any) -> Any:
    """Return a value of JSON in which every path, at any depth, is cut to its name."""
    if isinstance(value, dict):
        return {portable(key): portable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [portable(part) for part in value]
    if not isinstance(value, str):
        return value
    prefix, _, path = value.rpartition(":")  # of prompts: NAME:FILE
    if len(prefix) > 1 and not re.search(r"[/\\]", prefix) and _is_path(path):
        return f"{prefix}:{portable(path)}"
    return _name(value) if _is_path(value) else value


def _is_path(text: str) -> bool:
    """Whether a text is a place on this machine, and no name of the Hub."""
    if "\n" in text or len(text) > 4096 or not re.search(r"[/\\]", text):
        return False
    if "://" in text or text.startswith("//"):
        return text.startswith("file:")
    if text.startswith(("/", "~", "./", "../")) or re.match(r"[A-Za-z]:\\", text):
        return True
    return os.path.exists(text) or text.endswith(FILES)


def _name(path: str) -> str:
    """A path's last part; of the Hub's cache, the repository's name."""
    if cached := re.search(r"(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/", path):
        return "/".join(cached.groups())
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "local"


def kind_there(run: Path) -> str:
    """Return the kind of the one drafter that a run has. Raises HeadError for none, or several."""
    found = kinds_of(run)
    if len(found) != 1:
        what = f"several drafters in {run}, {', '.join(found)}; name one: {run}/{found[0]}"
        raise HeadError(what if found else f"no drafter in {run} ({', '.join(KINDS)}); train one")
    if found != [OLD_HEAD]:
        return found[0]
    config = json.loads((run / OLD_HEAD / CONFIG).read_text())
    if config.get("architecture") == "eagle3":
        return "eagle3"
    eagle = config["block_size"] == 1 and config["fusion"] in ("linear", "biased")
    return "eagle" if eagle else "falcon"
