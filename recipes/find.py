"""Finding a recipe, or a drafter, by any of the names that people give them.

A run's folder, `output.dir`, has a folder for every kind of drafter that was trained in it:

    runs/mine/  falcon/  eagle/  eagle3/  medusa/  student/  table/

In each lie the drafter, its tree, the recipe that made it and what it was measured to gain. Beside
them lies what the last training left: checkpoints, log, report.
"""

import json
import os
import re
from pathlib import Path

from huggingface_hub import hf_hub_download

from specdraft.recipes.download_bar import DownloadBar
from specdraft.recipes.errors import RecipeError, in_a_line
from specdraft.recipes.fields import nearest, shortened
from specdraft.recipes.hub_name import split_revision
from specdraft.recipes.schema import Recipe

BUNDLED = Path(__file__).parent
TEMPLATES = BUNDLED / "templates"  # of chats
RECIPE = "recipe.yaml"  # in the folder of a run, and of a drafter in it
CONFIG = "config.json"  # of a drafter
TEMPLATE = "target_template.jinja"  # beside a pushed recipe whose chat template is the user's own
FILES = (".yaml", ".yml", ".json", ".py")  # a name with such an ending is a file, no repository
HEADS = ("falcon", "eagle", "eagle3")
KINDS = (*HEADS, "medusa", "student", "table")
OLD_HEAD = "head"  # the folder of any kind of head, in runs from before heads had kinds
OF_A_RUN = (*KINDS, OLD_HEAD)
# Settings that a recipe from the Hub loses: a stranger must not decide whose code runs, nor where
# files are written. The command line may set them again.
NEVER_OF_THE_HUB = {
    "target": {"trust_remote_code": False},
    "output": {"dir": None},
    "data": {"cache_dir": "cache", "server": None, "server_model": None},
    "hub": {"repo_id": None},
}


def find_recipe(name: str | Path) -> tuple[Path, dict]:
    """Return the file of a recipe, and settings {section: {key: value}} that follow from where it
    was found, which replace those in the file: a run's recipe goes on in that run's folder.

    name: its file, a bundled one's name, the folder of a run, of a drafter in it, or of a drafter
    that was copied or pushed with its recipe, or the Hub id of one, with @revision or without.
    Raises RecipeError, with what there is, where nothing of these is found, or where a run has
    drafters of several kinds.
    """
    path = Path(name)
    # By os.path: pathlib raises for a name that no file can have, e.g. one that is too long.
    if os.path.isfile(path):
        return path, {}
    if os.path.isdir(path):
        path = path if path.name else path.resolve()  # of "."
        if (path / RECIPE).is_file() and (path / CONFIG).is_file() and path.name not in OF_A_RUN:
            return path / RECIPE, _drafting_with(path, path) | {"target": _asking_with(path)}
        recipe, run = _of_drafter(path) or _of_run(path)
        return recipe, {"output": {"dir": str(run)}}
    if str(name) == path.name and os.path.isfile(bundled := BUNDLED / f"{name}.yaml"):
        return bundled, {}
    if _can_be_of_the_hub(str(name)):
        folder = _fetched(str(name))
        told = _drafting_with(str(name), folder) | NEVER_OF_THE_HUB
        told["target"] = told["target"] | _asking_with(folder)
        return folder / RECIPE, told
    raise RecipeError(f"no recipe at {shortened(str(path), 200)}; {_neighbours(path)}")


def kind_of(config: dict) -> str:
    """Return the kind of a drafter, one of KINDS, by its config.json. A model of transformers is a
    student."""
    if "architectures" in config:
        return "student"
    if config.get("architecture") == "eagle3":
        return "eagle3"
    if "block_size" in config:
        alone = config["block_size"] == 1 and config.get("fusion") in ("linear", "biased")
        return "eagle" if alone else "falcon"
    return "medusa" if "heads" in config else "table"


def _drafting_with(source: str | Path, folder: Path) -> dict:
    """Return settings by which a recipe drafts with the drafter in a folder, and not with one that
    is trained into its run; source: the folder or Hub id that the recipe is to name."""
    kind, source = kind_of(read_config(folder)), str(source)
    if kind == "student":
        own = dict.fromkeys(("keep_layers", "layers", "hidden", "heads", "kv_heads"))
        own |= {"intermediate": None, "embeddings": "copied", "training": "none"}
        model, revision = (source, None) if os.path.isdir(source) else split_revision(source)
        return {"student": own | {"model": model, "revision": revision}}
    section, key = {"medusa": ("medusa", "model"), "table": ("maxgram", "table")}.get(
        kind, ("head", "model")
    )
    return {section: {key: source}}


def _asking_with(folder: Path) -> dict:
    """Return settings by which the target uses a chat template that lies beside its recipe."""
    template = folder / TEMPLATE
    return {"chat_template": str(template)} if template.is_file() else {}


def is_own_template(name: str | None) -> bool:
    """Whether `target.chat_template` names a file of the user's: not null (the tokenizer's own
    template), nor a bundled one."""
    return name is not None and not (TEMPLATES / f"{name}.jinja").is_file()


def read_config(folder: Path) -> dict:
    """Read a drafter's config.json. Raises RecipeError where it is missing or no JSON object."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise RecipeError(f"{folder / CONFIG} is no JSON object; take a copy that is whole")
    return config


def _can_be_of_the_hub(name: str) -> bool:
    """Whether a name can be owner/name of the Hub: its owner is no folder here."""
    name, _ = split_revision(name)
    named = re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) and not name.startswith(".")
    return bool(named) and not name.endswith(FILES) and not os.path.isdir(Path(name).parent)


def _fetched(name: str) -> Path:
    """Download a repository's config, recipe and chat template; return their folder."""
    repo_id, revision = split_revision(name)
    options = {"revision": revision, "tqdm_class": DownloadBar}
    try:
        for file in (CONFIG, RECIPE):
            path = hf_hub_download(repo_id, file, **options)
        if TEMPLATE in Path(path).read_text(encoding="utf-8", errors="replace"):
            hf_hub_download(repo_id, file := TEMPLATE, **options)
    except Exception as error:
        raise RecipeError(
            f"{name} is no recipe or folder here, and the Hub did not give its {file} "
            f"({in_a_line(error)}); {_neighbours(Path(name))}"
        ) from error
    return Path(path).parent


def kinds_of(run: Path) -> list[str]:
    """List the kinds of drafters in a run's folder. A kind counts from its recipe on, which is
    there before it is trained."""
    files = (CONFIG, RECIPE)
    return [kind for kind in OF_A_RUN if any(os.path.isfile(run / kind / file) for file in files)]


def drafters_of(run: Path) -> list[str]:
    """List the kinds of drafters that a run is asked for: a table beside others is counted for
    what they draft together, and asked for by its own folder."""
    kinds = kinds_of(run)
    return [kind for kind in kinds if kind != "table"] or kinds


def drafter_folder(run: Path, kind: str) -> Path:
    """Return the folder of a run's drafter of a kind. Of heads, a run's only one stands for every
    kind."""
    heads = [name for name in kinds_of(run) if name in (*HEADS, OLD_HEAD)]
    return run / (heads[0] if kind in HEADS and len(heads) == 1 else kind)


def drafter_of(recipe: Recipe, kind: str, run: Path | None = None) -> str | Path:
    """Where a recipe's drafter of a kind is: where its section says, which may be a Hub id, else in
    a run (None: the recipe's own). kind: one of KINDS, or "head", of whichever kind that is."""
    named = {"medusa": recipe.medusa.model, "table": recipe.maxgram.table}
    named["student"] = recipe.student.model if recipe.student.training == "none" else None
    own = recipe.head.kind if kind == "head" else kind
    folder = drafter_folder(run or Path(recipe.output.dir), own)
    return named.get(kind, recipe.head.model) or folder


def _of_drafter(folder: Path) -> tuple[Path, Path] | None:
    """Return the recipe and the run of a folder in which that run keeps a drafter, else None."""
    run = folder.parent
    if folder.name not in kinds_of(run) or kinds_of(folder):  # runs may be called so, too
        return None
    return next(((p / RECIPE, run) for p in (folder, run) if (p / RECIPE).is_file()), None)


def _of_run(folder: Path) -> tuple[Path, Path]:
    """Return the recipe that a run has kept, and the run. Raises RecipeError."""
    kinds = drafters_of(folder)
    if len(kinds) > 1:
        raise RecipeError(
            f"{shortened(str(folder), 200)} has drafters of several kinds, {', '.join(kinds)}; "
            f"name the folder of one, e.g. {folder / kinds[0]}"
        )
    for place in (*(folder / kind for kind in kinds), folder):
        if (place / RECIPE).is_file():
            return place / RECIPE, folder
    there = sorted(one.name for one in folder.iterdir())[:8]
    raise RecipeError(
        f"{shortened(str(folder), 200)} is not the folder of a run, nor of a drafter in one: no "
        f"{RECIPE} in it or above it, but {', '.join(there) or 'nothing'}; name a recipe, or a "
        "folder that training has written, e.g. runs/tiny"
    )


def _neighbours(path: Path) -> str:
    """Say which recipes there are in the folder where one was looked for, else the bundled ones."""
    there = os.path.isdir(path.parent) and any(path.parent.glob("*.yaml"))
    folder = path.parent if there else BUNDLED
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    guess = nearest(path.stem, names)
    nearest_one = folder / f"{guess}.yaml" if there else guess
    return f"nearest is {nearest_one} (there are {', '.join(names)})"
