"""Find the best setting of a drafter: successive halving over a grid, on prompts of its own.

CS Drafting (arXiv 2312.11462) tunes its cascades by a halving grid search. Every candidate is
measured on a few prompts, the better half on twice as many, until one is left. What is tuned of a
method stands in its row (eval/methods/registry.py). K's entries are addressed by their place: the
paper's k11, k12 and k21, the entries of a row from its diagonal on, are k.0.0, k.0.1 and k.1.1 of a
K for one student; more students have more of them.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import getitem
from typing import Any, TypeVar

from specdraft.data.prompts import Prompt
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.measurement import REFERENCE, measure, measured_cost
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.methods.registry import space_of
from specdraft.eval.methods.spaces import Space
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.load import from_dict
from specdraft.recipes.schema import Recipe

Setting = dict[str, Any]  # recipe paths (section.key, section.key.row.column) and their values
T = TypeVar("T")
FIRST = 2  # prompts of the first rung


def sample_settings(recipe: Recipe, method: str, limit: int, seed: int = 0) -> list[Setting]:
    """Return up to `limit` different settings of a method: the recipe's own, then a sample of all.

    Raises RecipeError for a method that has no space.
    """
    space = space_of(recipe, method)
    own = {path: look_up(recipe, path) for path in space}
    count = prod(map(len, space.values()))
    sample = random.Random(seed).sample(range(count), min(limit, count))
    others = [other for place in sample if (other := _at(space, place)) != own]
    return [own, *others[: limit - 1]]


def _at(space: Space, place: int) -> Setting:
    """Return one point of a space, all of which are numbered."""
    setting = {}
    for path, values in space.items():
        place, which = divmod(place, len(values))
        setting[path] = values[which]
    return setting


def look_up(recipe: Recipe, path: str) -> Any:
    """Return the value at a path of a recipe."""
    return reduce(getitem, _keys(path), recipe.to_dict())


def apply_setting(recipe: Recipe, setting: Setting) -> Recipe:
    """Return the recipe with a setting in it; InvalidRecipeError where that is none."""
    tree = recipe.to_dict()
    for path, value in setting.items():
        *above, last = _keys(path)
        reduce(getitem, above, tree)[last] = value
    return from_dict(tree)


def _keys(path: str) -> list[str | int]:
    return [int(key) if key.isdigit() else key for key in path.split(".")]


def successive_halving(
    candidates: Sequence[T], measure: Callable[[T, int], float], first: int, most: int
) -> Iterator[tuple[int, list[tuple[float, T]]]]:
    """Yield (budget, scores and candidates, the best first) of every rung until one is left.

    measure(candidate, budget): higher is better. The budget starts at `first`, doubles when the
    field is halved, and is `most` in the last rung, in which two or three meet.
    """
    field, budget = list(candidates), first
    while True:
        budget = most if len(field) <= 3 else min(budget, most)
        scored = [(measure(candidate, budget), candidate) for candidate in field]
        scored.sort(key=lambda item: item[0], reverse=True)
        yield budget, scored
        if len(field) <= 3:
            return
        field = [candidate for _, candidate in scored[: len(field) // 2]]
        budget *= 2


def recipe_part(recipe: Recipe, setting: Setting) -> dict[str, dict]:
    """Return a setting as part of a recipe: sections with whole values, ready for YAML."""
    tree, part = apply_setting(recipe, setting).to_dict(), {}
    for path in setting:
        section, key, *_ = path.split(".")
        part.setdefault(section, {})[key] = tree[section][key]
    return part


def overrides(part: dict[str, dict]) -> list[str]:
    """Return a part of a recipe as `section.key=value` arguments."""
    return [
        f"{section}.{key}={json.dumps(value)}"  # which YAML reads as it is
        for section, values in part.items()
        for key, value in values.items()
    ]


@dataclass
class Scorer:
    """Speed of settings on tuning prompts: each is decoded in turns with plain decoding, so that a
    machine that slows down slows both. One drafter is alive at a time."""

    recipe: Recipe
    method: str
    target: Target
    trained: Trained
    prompts: Sequence[Prompt]
    by: str  # "wall" or "swi"

    def __call__(self, setting: Setting, budget: int) -> float:
        """Over the first `budget` prompts: tokens/s over plain's, or SWI with measured costs."""
        recipe, prompts = apply_setting(self.recipe, setting), self.prompts[:budget]
        pair = [REFERENCE, self.method]
        with cpu_threads(recipe.eval.threads):
            done = measure(recipe, self.target, self.trained, prompts, pair)
        plain, ours = (done.outcomes[name] for name in pair)
        if self.by == "wall":
            return sum(part.seconds for part in plain) / sum(part.seconds for part in ours)
        return counts(ours, Costs(0.0, measured_cost(ours, plain)))["swi_measured"]
