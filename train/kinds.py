"""One recipe, any kind of drafter: `specdraft train mine.yaml --kind medusa`.

What makes a kind is a part of a recipe, recipes/kinds/KIND.yaml, which comes before the user's own
overrides. The rest, the target, the data and the training, is the recipe's.
"""

from argparse import ArgumentParser
from collections.abc import Sequence

from specdraft.eval.drafters.registry import find, problems
from specdraft.models.shapes import target_shape
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import nearest
from specdraft.recipes.find import BUNDLED, KINDS
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import tell


def part_of(kind: str) -> str:
    """The file that makes a kind of a recipe. Raises RecipeError for an unknown kind."""
    if kind not in KINDS:
        guess = nearest(kind[:100], KINDS)
        raise RecipeError(
            f"--kind {kind:.100}: no such kind; nearest is {guess} (there are {', '.join(KINDS)})"
        )
    return str(BUNDLED / "kinds" / f"{kind}.yaml")


def overrides_of(kind: str, recipe: str, given: Sequence[str]) -> list[str]:
    """What makes a kind of a recipe, which is named as `find_recipe` takes it.

    given: the user's overrides, of which those of the target count: the layers that EAGLE-3 reads
    and a student keeps are of its depth.
    """
    part = part_of(kind)
    if kind not in ("eagle3", "student"):
        return [part]
    base = load_recipe(recipe, [one for one in given if one.startswith("target")])
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


def with_kind(arguments: list[str]) -> list[str]:
    """The arguments of `train` with what `--kind KIND` stands for behind the recipe. RecipeError
    for a kind that there is not."""
    parser = ArgumentParser(prog="specdraft train", add_help=False, allow_abbrev=False)
    parser.add_argument("--kind")
    parsed, rest = parser.parse_known_args(arguments)
    if {"-h", "--help"} & {*rest}:
        tell(f"--kind KIND trains another kind of drafter by the same recipe: {', '.join(KINDS)}\n")
    given = named(rest)
    if parsed.kind is None or not given:
        return rest
    behind = rest.index(given[0]) + 1
    return [*rest[:behind], *overrides_of(parsed.kind, given[0], given[1:]), *rest[behind:]]


def named(arguments: list[str]) -> list[str]:
    """The recipe, and what it is overridden by: what is no option."""
    recipe, *others = [one for one in arguments if not one.startswith("-")] or [""]
    overrides = [one for one in others if "=" in one or one.endswith(".yaml")]
    return [recipe, *overrides] if recipe else []


def trainers(arguments: list[str]) -> list[str]:
    """The scripts that train what a recipe's methods draft with, in their order."""
    given = named(arguments)
    if not given:
        return ["train.falcon"]  # which says what is missing
    recipe = load_recipe(given[0], given[1:], check=problems)
    scripts = [find(name)[0].trainer for name in recipe.eval.methods]
    found = list(dict.fromkeys(script for script in scripts if script))
    if not found:
        raise RecipeError(f"{recipe.name}: none of eval.methods drafts with anything trained")
    return [script.removesuffix(".py").replace("/", ".") for script in found]
