"""From a run's folder to the Hub: weights, config, recipe and model card of its drafter."""

import json
from collections.abc import Collection
from pathlib import Path

import yaml

from specdraft.models.card import PICTURE, TREE, Card, model_card, tree_name
from specdraft.models.curve import curve
from specdraft.models.hub import push
from specdraft.recipes.errors import HeadError, HubError
from specdraft.recipes.schema import Recipe


def publish(recipe: Recipe, card: Card) -> str | None:
    """Push the drafter of `output.dir` to `hub.repo_id`; return the commit's address.

    None where the recipe names no repository. Raises HeadError when there is no drafter, HubError
    when the Hub does not take it; the repository then holds what it held before.
    """
    hub, run = recipe.hub, Path(recipe.output.dir)
    if hub.repo_id is None:
        return None
    files = contents(recipe, card)
    try:
        message = f"{card.noun} of {recipe.name}"
        return push(files, hub.repo_id, hub.private, hub.revision, message)
    except HubError as error:
        raise HubError(
            f"{error}; {run} is whole, go on with: python models/push.py {run} {hub.repo_id}"
        ) from error


def contents(recipe: Recipe, card: Card) -> dict[str, Path | bytes]:
    """Return what goes into the repository, by its place there. Raises HeadError."""
    run = Path(recipe.output.dir)
    folder = run / card.folder
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise HeadError(f"no trained {card.noun} at {folder}; train one first")
    files: dict[str, Path | bytes] = {
        path.name: path for path in sorted(folder.iterdir()) if path.is_file()
    }
    if "{tree}" in card.call and tree_name(recipe) == TREE:
        files[TREE] = Path(recipe.eval.tree)
    report, picture = run / "report.json", curve(run / "log.jsonl")
    if picture:
        files[PICTURE] = picture
    text = model_card(
        recipe,
        card,
        config=json.loads((folder / "config.json").read_text()),
        report=json.loads(report.read_text()) if report.is_file() else None,
        picture=picture is not None,
    )
    files["README.md"] = text.encode()
    files["recipe.yaml"] = yaml.safe_dump(portable(recipe), sort_keys=False).encode()
    return files


def portable(recipe: Recipe) -> dict:
    """Return a recipe without the places of one machine."""
    sections = recipe.to_dict()
    sections["eval"]["tree"] = tree_name(recipe)
    del sections["output"], sections["hub"], sections["data"]["cache_dir"]
    return sections


def only_kind(run: Path, kinds: Collection[str]) -> str:
    """Return the one of some kinds that a run has. Raises HeadError for none, or several."""
    found = [kind for kind in kinds if (run / kind).is_dir()]
    if len(found) != 1:
        what = "several drafters" if found else "no drafter"
        raise HeadError(f"{what} in {run} ({', '.join(found) or 'none'} of {', '.join(kinds)})")
    return found[0]
