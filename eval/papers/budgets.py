"""Compare trees of draws as the RSD paper does: at a fixed draft length, and at a fixed budget.

    python eval/papers/budgets.py recipes/tiny_distill.yaml eval.temperature=1
        [section.key=value ..] [--lengths 2,3,4,5] [--budgets 6,10,14,21,30] [--seeds 0,1,2]
        [--out FILE.json]

A budget is the number of drafted tokens that the target reads per step (arXiv 2402.14160, Tables
2 and 3). At a length L, four paths are drafted: K = 4 chains, branching factors whose product is 4,
beams of width 4. At a budget, every shape whose nodes add up to it stands for its method, and the
best of them, by tokens per step, is shown; all are written. SD is one chain, accepted token-wise.

Every prompt is decoded with every seed. Errors are standard errors over all of these, of a ratio
of sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specdraft.data.prompts import Prompt, load_prompts
from specdraft.eval.drafters.registry import problems
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.measurement import Measurement, measure
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.report import write_json
from specdraft.models.student import finished_student
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole_numbers
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import DraftingSection, Recipe

PATHS = 4  # drafted at a fixed length
APART = 1000  # seeds of a comparison; prompts number theirs from there
SHOWN = ("tokens_per_step", "standard_error", "mbsu", "tokens_per_second")


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
    shapes = [Shape("ssd", length=alone)]
    shapes += [Shape("spectr", width=width, length=length) for width, length in sizes]
    shapes += [Shape("specinfer", branching) for branching in factors]
    shapes += [Shape("rsd_c", branching) for branching in factors]
    return shapes + [Shape("rsd_s", width=width, length=length) for width, length in sizes]


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


@entry
def main() -> None:
    """Parse, decode by every shape, write and show."""
    parser = recipe_parser(__doc__, "tiny_distill")
    parser.add_argument("--lengths", default="2,3,4,5", help="comma-separated")
    parser.add_argument("--budgets", default="6,10,14,21,30", help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--out", type=Path, help="default: budgets.json of output.dir")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    shapes = {
        f"length {n}": at_length(n) for n in whole_numbers("--lengths", options.lengths, 2, 256)
    }
    shapes |= {
        f"budget {n}": at_budget(n) for n in whole_numbers("--budgets", options.budgets, 2, 256)
    }
    seeds = whole_numbers("--seeds", options.seeds)
    rows = compare(recipe, shapes, seeds)
    out = options.out or Path(recipe.output.dir) / "budgets.json"
    write_json({"recipe": recipe.to_dict(), "seeds": seeds, "rows": rows}, out)
    show(rows, recipe)
    print(f"wrote {out}")  # noqa: T201


def compare(
    recipe: Recipe, shapes: dict[str, list[Shape]], seeds: Sequence[int] = (0,)
) -> list[dict]:
    """Decode the recipe's prompts by every shape of every comparison; one row each."""
    target = Target.of_recipe(recipe.target)
    prompts = load_prompts(recipe, target.tokenizer)
    student = finished_student(recipe.student, Path(recipe.output.dir) / "student", target)
    with cpu_threads(recipe.eval.threads):
        return [
            {"comparison": name} | measure_shape(recipe, target, student, prompts, shape, seeds)
            for name, some in shapes.items()
            for shape in some
        ]


def measure_shape(
    recipe: Recipe,
    target: Target,
    student: Target,
    prompts: Sequence[Prompt],
    shape: Shape,
    seeds: Sequence[int],
) -> dict:
    """The figures of one shape, over all prompts and seeds."""
    # SD as the papers have it: with noise shared between drafter and target it would accept more.
    settings = replace(recipe.eval, methods=[shape.method], acceptance="recursive")
    recipe = replace(recipe, eval=settings, drafting=shape.section(recipe.drafting))
    trained, outcomes = Trained(student=student), []
    for seed in seeds:
        seeded = replace(recipe, eval=replace(settings, seed=APART * seed))
        done = measure(seeded, target, trained, prompts, [shape.method], progress=False)
        outcomes += done.outcomes[shape.method]
    every = [prompt for _ in seeds for prompt in prompts]
    (row,) = Measurement(recipe, target, trained, every, {shape.method: outcomes}).rows()
    return {"shape": str(shape), "standard_error": standard_error(outcomes)} | row


def standard_error(outcomes: Sequence[Outcome]) -> float | None:
    """Of tokens per step, over prompts: that of a ratio of sums, by linearisation."""
    done = [one for outcome in outcomes for one in outcome.completions]
    pairs = [(len(one.tokens), len(one.steps)) for one in done]
    tokens, steps = (sum(column) for column in zip(*pairs, strict=True))
    count, ratio = len(pairs), tokens / steps
    if count < 2:
        return None
    squares = sum((t - ratio * s) ** 2 for t, s in pairs)
    return (squares * count / (count - 1)) ** 0.5 / steps


def show(rows: list[dict], recipe: Recipe) -> None:
    """The best shape of every method in every comparison."""
    title = f"{rows[0]['outputs']} prompts of {recipe.eval.prompts}, temperature "
    table = Table(title=f"{title}{recipe.eval.temperature:g}", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "method", "shape", "tokens/step", "+-", "MBSU", "tokens/s"):
        table.add_column(name, justify="left" if name in ("", "method", "shape") else "right")
    for (name, method), some in groupby(rows, lambda row: (row["comparison"], row["method"])):
        best = max(some, key=lambda row: row["tokens_per_step"])
        figures = ("-" if best[key] is None else f"{best[key]:.2f}" for key in SHOWN)
        table.add_row(name, method, best["shape"], *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
