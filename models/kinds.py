"""One recipe, any kind of drafter: `specdraft train mine.yaml --kind medusa`.

What makes a kind is a part of a recipe, recipes/kinds/KIND.yaml, which comes before the user's own
overrides. The rest, the target, the data and the training, is the recipe's.
"""

from collections.abc import Sequence

from specdraft.models.shapes import target_shape
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import nearest
from specdraft.recipes.find import BUNDLED, KINDS
from specdraft.recipes.load import load_recipe


def overrides_of(kind: str, recipe: str, given: Sequence[str]) -> list[str]:
    """Return the overrides by which a recipe, named as `find_recipe` takes it, trains a kind.

    given: the user's overrides. Those that may name another target count here: its depth says which
    layers EAGLE-3 reads and a student keeps. Raises RecipeError for an unknown kind.
    """
    if kind not in KINDS:
        guess = nearest(kind[:100], KINDS)
        raise RecipeError(
            f"--kind {kind:.100}: no such kind; nearest is {guess} (there are {', '.join(KINDS)})"
        )
    part = str(BUNDLED / "kinds" / f"{kind}.yaml")
    if kind not in ("eagle3", "student"):
        return [part]
    of_target = [one for one in given if one.startswith("target") or one.endswith(".yaml")]
    base = load_recipe(recipe, of_target)
    count = target_shape(base)[0].layers
    if kind == "student":
        return [part, f"student.keep_layers={sorted({0, count - 1})}"]
    return [part, f"data.feature_layers={list(low_middle_high(count))}"]


def low_middle_high(count: int) -> tuple[int, ...]:
    """The layers, counted from 1, that EAGLE-3 reads of a target with `count`: 2, the middle one
    and the third from the end (arXiv 2503.01840; of its published heads); of fewer than eight, as
    far apart as they are."""
    low, high = (2, count - 3) if count >= 8 else (1, max(count - 2, 1))
    return tuple(sorted({low, max(count // 2, 1), high}))
