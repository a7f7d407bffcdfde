"""Where a recipe lies that is named in one of the ways people name it."""

import os
from pathlib import Path

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import nearest, shortened

BUNDLED = Path(__file__).parent
RECIPE = "recipe.yaml"  # in the folder of a run


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: itself, a bundled one's name, or the folder of a run or of the head
    (or other drafter) in it.

    Raises RecipeError, with what there is, where nothing of these is found.
    """
    path = Path(name)
    # Of os.path, for these answer also where no such name can be.
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        return _of_run(path)
    if str(name) == path.name and os.path.isfile(bundled := BUNDLED / f"{name}.yaml"):
        return bundled
    raise RecipeError(f"no recipe at {shortened(str(path), 200)}; {_neighbours(path)}")


def _of_run(folder: Path) -> Path:
    """The recipe that a run has kept, given its folder or one in it."""
    for place in (folder, folder.resolve().parent):
        if (place / RECIPE).is_file():
            return place / RECIPE
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
