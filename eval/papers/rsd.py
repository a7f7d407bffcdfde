"""RSD's Tables 2 and 3 (arXiv 2402.14160): drawn drafts of equal length, and of equal budget.

A budget is the number of drafted tokens that the target reads per step. At a length L, four paths
are drafted: K = 4 chains, branching factors whose product is 4, beams of width 4. At a budget,
every shape whose nodes add up to it stands for its method. A cell is the best shape that a method
has there, by tokens per step. SD is one chain, accepted token-wise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from specdraft.data.prompts import load_prompts
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import Measurement, measure
from specdraft.eval.measure.metrics import ratio_variance
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.methods.registry import load_trained
from specdraft.eval.papers.students import OverStudents
from specdraft.eval.papers.table import Found, Plan, Row, Table
from specdraft.models.target import Target
from specdraft.recipes.fields import Interval
from specdraft.recipes.schema import DraftingSection, Recipe

PATHS = 4  # drafted at a fixed length
APART = 1000  # seeds of a comparison; prompts number theirs from there
METHODS = {
    "SD": "ssd",
    "SpecTr": "spectr",
    "SpecInfer": "specinfer",
    "RSD-C": "rsd_c",
    "RSD-S": "rsd_s",
}
Size = Annotated[int, Interval(2, 256)]


@dataclass(frozen=True)
class Shape:
    """What one method drafts."""

    method: str
    branching: tuple[int, ...] = ()
    width: int = 1  # beams or chains
    length: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, self.branching)) or f"{self.width} x {self.length}"

    def section(self, drafting: DraftingSection) -> DraftingSection:
        """A recipe's drafting section that makes it; no chain ends early."""
        size = {"gamma": self.length, "chains": self.width, "beam_width": self.width}
        branching = self.branching or drafting.branching
        return replace(drafting, theta_prob=0.0, branching=branching, **size)


@dataclass(frozen=True, kw_only=True)
class BudgetTable(Table):
    """Tokens per step with the student of the recipe's run. Every prompt is decoded with every
    seed; errors are standard errors over all of these, of a ratio of sums."""

    lengths: tuple[Size, ...] = (2, 3, 4, 5)
    budgets: tuple[Size, ...] = (6, 10, 14, 21, 30)

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """The best shapes; all that were measured are among the runs."""
        recipe = self.loaded(plan)
        target = Target.of_recipe(recipe.target)
        shapes = {f"length {n}": at_length(n) for n in self.lengths}
        shapes |= {f"budget {n}": at_budget(n) for n in self.budgets}
        with cpu_threads(recipe.eval.threads):
            runs = [*compare(recipe, target, shapes, seeds)]
            return Found(best_of(runs), environment(target), runs)


@dataclass(frozen=True, kw_only=True)
class SeededBudgetTable(OverStudents, BudgetTable):
    """The budgets with a student of every seed, which is the seed of what is drawn, too."""


def at_length(length: int) -> list[Shape]:
    """Four paths of a length by each method, and one by SD."""
    factors = [(a, *[b] * (length > 1), *[1] * (length - 2)) for a, b in ((4, 1), (2, 2))]
    return _shapes([(PATHS, length)], factors, length)


def at_budget(nodes: int) -> list[Shape]:
    """All shapes of as many nodes: chains and beams of two paths or more, all branching factors."""
    sizes = [(nodes // length, length) for length in range(2, nodes) if nodes % length == 0]
    return _shapes([size for size in sizes if size[0] > 1], factorings(nodes), nodes)


def _shapes(
    sizes: list[tuple[int, int]], factors: list[tuple[int, ...]], alone: int
) -> list[Shape]:
    def beams(method: str) -> list[Shape]:
        return [Shape(method, width=width, length=length) for width, length in sizes]

    def trees(method: str) -> list[Shape]:
        return [Shape(method, branching) for branching in factors]

    drawn = [*beams("spectr"), *trees("specinfer"), *trees("rsd_c"), *beams("rsd_s")]
    return [Shape("ssd", length=alone), *drawn]


def factorings(nodes: int, level: int = 1) -> list[tuple[int, ...]]:
    """All branching factors, none larger than the one before, that make a number of nodes below
    `level` nodes. A chain and a single level are left out.

    >>> factorings(6)
    [(3, 1), (2, 2), (2, 1, 1)]
    """
    found = []
    for first in range(nodes // level, 0, -1):
        rest = nodes - level * first
        tails = [()] if rest == 0 else factorings(rest, level * first)
        found += [(first, *tail) for tail in tails if not tail or tail[0] <= first]
    return [branching for branching in found if level > 1 or 1 < branching[0] < nodes]


def compare(
    recipe: Recipe, target: Target, shapes: dict[str, list[Shape]], seeds: Sequence[int]
) -> Iterator[dict]:
    """Decode the recipe's prompts by every shape of every comparison; one run each."""
    prompts = load_prompts(recipe, target.tokenizer)
    trained = load_trained(recipe, target, ["ssd"])
    every = [prompt for _ in seeds for prompt in prompts]
    # SD as the papers have it: with noise shared between drafter and target it would accept more.
    recipe = recipe.with_eval(acceptance="recursive")
    for name, some in shapes.items():
        for shape in some:
            own = replace(recipe, drafting=shape.section(recipe.drafting))
            outcomes = {shape.method: []}
            for seed in seeds:
                seeded = own.with_eval(seed=APART * seed)
                done = measure(seeded, target, trained, prompts, [*outcomes])
                outcomes[shape.method] += done.outcomes[shape.method]
            requests = make_requests(own.eval, every)
            (row,) = Measurement(own, target, trained, every, requests, outcomes).rows()
            error = standard_error(outcomes[shape.method])
            yield {"comparison": name, "shape": str(shape), "standard_error": error} | row


def best_of(runs: Sequence[dict]) -> dict[str, Row]:
    """Return a row per method with, in every comparison, its shape of the most tokens per step."""
    cells: dict[str, dict[str, dict]] = {method: {} for method in METHODS.values()}
    for run in runs:
        own, column, mean = cells[run["method"]], run["comparison"], run["tokens_per_step"]
        if column not in own or mean > own[column]["mean"]:
            own[column] = {"mean": mean} | {key: run[key] for key in ("standard_error", "shape")}
    return {name: Row(cells[method]) for name, method in METHODS.items()}


def standard_error(outcomes: Sequence[Outcome]) -> float | None:
    """The standard error of tokens per step, over prompts; None for a single one."""
    done = [one for outcome in outcomes for one in outcome.completions]
    pairs = [(len(one.tokens), len(one.steps)) for one in done]
    return ratio_variance(pairs) ** 0.5 if len(pairs) > 1 else None
