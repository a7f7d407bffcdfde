"""Where things lie that are named in one of the ways people name them: a recipe, a run's drafter.

A run's folder, `output.dir`, has a folder for every kind of drafter that was trained in it:

    runs/mine/  falcon/  eagle/  eagle3/  medusa/  student/  table/

In each lie the drafter, its tree, the recipe that made it and what it was measured to gain. Beside
them lies what the last training left: checkpoints, log, report.
"""

import os
from pathlib import Path

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import nearest, shortened

BUNDLED = Path(__file__).parent
RECIPE = "recipe.yaml"  # in the folder of a run, and of a drafter in it
HEADS = ("falcon", "eagle", "eagle3")
KINDS = (*HEADS, "medusa", "student", "table")
OLD_HEAD = "head"  # the folder of any kind of head, in runs from before heads had kinds


def find_recipe(name: str | Path) -> tuple[Path, dict]:
    """The file of a recipe: itself, a bundled one's name, or what lies in the folder of a run or of
    a drafter in it; and the sections in which the folder that was named stands for the recipe's.

    Raises RecipeError, with what there is, where nothing of these is found, or where a run has
    drafters of several kinds.
    """
    path = Path(name)
    # Of os.path, for these answer also where no such name can be.
    if os.path.isfile(path):
        return path, {}
    if os.path.isdir(path):
        path = path if path.name else path.resolve()  # of "."
        recipe, run = _of_drafter(path) or _of_run(path)
        return recipe, {"output": {"dir": str(run)}}
    if str(name) == path.name and os.path.isfile(bundled := BUNDLED / f"{name}.yaml"):
        return bundled, {}
    raise RecipeError(f"no recipe at {shortened(str(path), 200)}; {_neighbours(path)}")


def kinds_of(run: Path) -> list[str]:
    """The kinds of drafters in a run's folder, those that are not yet trained included."""
    files = ("config.json", RECIPE)
    kinds = (*KINDS, OLD_HEAD)
    return [kind for kind in kinds if any(os.path.isfile(run / kind / file) for file in files)]


def drafter_folder(run: Path, kind: str) -> Path:
    """The folder of a run's drafter of a kind; where it has one head, of any kind, that one's."""
    heads = [name for name in kinds_of(run) if name in (*HEADS, OLD_HEAD)]
    return run / (heads[0] if kind in HEADS and len(heads) == 1 else kind)


def _of_drafter(folder: Path) -> tuple[Path, Path] | None:
    """The recipe and the run of a drafter's folder in it; None of another folder."""
    run = folder.parent
    if folder.name not in kinds_of(run) or kinds_of(folder):  # runs may be called so, too
        return None
    return next(((p / RECIPE, run) for p in (folder, run) if (p / RECIPE).is_file()), None)


def _of_run(folder: Path) -> tuple[Path, Path]:
    """The recipe that a run has kept, and the run."""
    kinds = kinds_of(folder)
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
    """Name the recipes that do lie where one was looked for, or the bundled ones."""
    there = os.path.isdir(path.parent) and any(path.parent.glob("*.yaml"))
    folder = path.parent if there else BUNDLED
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    guess = nearest(path.stem, names)
    nearest_one = folder / f"{guess}.yaml" if there else guess
    return f"nearest is {nearest_one} (there are {', '.join(names)})"
