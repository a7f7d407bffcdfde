"""Costs are measured: of a target and what drafts for it, in turns, into a ledger."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdraft.data.lock import building_lock
from specdraft.data.ranks import ALONE
from specdraft.eval.costing.bench import Cell, TargetBench, turns, visit
from specdraft.eval.costing.drafts import DraftBench
from specdraft.eval.costing.grid import Grid
from specdraft.eval.costing.ledger import BUSY, Ledger, unrest
from specdraft.eval.costing.room import most_rows, row_bytes
from specdraft.eval.drafters.pass_options import PassOptions
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.methods.setup import drafter_form
from specdraft.eval.methods.trained import Trained
from specdraft.eval.pricing.cost import costs_file
from specdraft.models.shapes import TargetShape
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import MOST
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import say


def measure_costs(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    grid: Grid,
    out: Path | None = None,
    quiet: bool = False,
) -> Ledger:
    """Return a ledger in which all of a grid that has room is measured, and curves are fitted.

    out: default output.dir/costs.json, or what an enlarged target has in its place. What it holds
    of this machine, target and drafter stands, what it lacks is measured; what it holds of others
    is named, and measured again. quiet: where nothing is lacking, nothing is said and nothing
    written. Raises DataError where it holds no costs.
    """
    out = out or costs_file(recipe, target)
    options, grid = PassOptions.of(recipe.eval, target), _with_room(grid, recipe, target)
    with building_lock(out, ALONE):  # of two commands at once the second takes the first's costs
        ledger = Ledger(out, recipe.name, subject(target, trained, options))
        forwards, drafts = _benches(target, trained, grid, options)
        cells = turns([*forwards.cells(), *drafts.cells()], grid.repeats)
        left = [cell for turn, cell in cells if len(ledger.tries(cell)) <= turn]
        if not left and quiet:
            return ledger
        _measure(ledger, left, forwards.pace())
        ledger.fit()
        ledger.write()
    if (apart := unrest([*ledger.points.values()])) > BUSY:
        say(f"the machine's pace changed by {apart:.0%}: it did something else, too")
    return ledger


def cover_rows(recipe: Recipe, target: Target, trained: Trained, most: int) -> None:
    """Measure what the costs of a run lack for drafts of up to so many rows: from those of a single
    row nobody knows what a row more costs. Raises as `measure_costs` does."""
    with cpu_threads(recipe.eval.threads):
        measure_costs(recipe, target, trained, Grid.for_rows(most), quiet=True)


def subject(target: Target, trained: Trained, options: PassOptions) -> Mapping[str, Any]:
    """What the figures depend on, as costs.json has it."""
    sizes = {
        "dtype": str(target.dtype).removeprefix("torch."),
        "parameters": sum(weight.numel() for weight in target.model.parameters()),
        # Read by the decoder beside the last feature: part of what a forward costs.
        "feature_layers": trained.head.config.feature_layers if trained.head else (),
    }
    unusual = {}  # ways to run it
    if target.device.type == "cpu" and target.prepacked.most != MOST:
        unusual["prepacked_bytes"] = target.prepacked.most
    if target.device.type == "cuda" and not target.cuda_graphs:
        unusual["cuda_graphs"] = False
    form = drafter_form(trained, options)
    return {
        "environment": environment(target),
        "target": target.identity() | sizes | unusual,
        "drafter": form and form | {"weights": trained.weights()},
    }


def _with_room(grid: Grid, recipe: Recipe, target: Target) -> Grid:
    """The part of a grid that the target's context and the memory hold."""
    grid = grid.within(target.context)
    shape = TargetShape.of(target.config.get_text_config())
    row = row_bytes(shape, grid.capacity, recipe.target.dtype)
    most = max(most_rows(row, target.device), min(grid.rows))
    if most < max(grid.rows):
        say(f"a row's cache takes {row / 1e9:.2f} GB: at most {most} rows are measured")
    return grid.with_rows(most)


def _benches(
    target: Target, trained: Trained, grid: Grid, options: PassOptions
) -> tuple[TargetBench, DraftBench]:
    """What is timed of a target and of a drafter, each between runs of the other."""
    layers = trained.head.config.feature_layers if trained.head else ()
    forwards = TargetBench(target, grid, layers)
    drafts = DraftBench(target, trained, grid, options)
    forwards.between, drafts.between = cache(drafts.draft), cache(forwards.forward)
    return forwards, drafts


def _measure(ledger: Ledger, left: Sequence[Cell], pace: Callable[[], float]) -> None:
    """Time what is left."""
    if ledger.note:
        say(ledger.note)
    if not left:
        count = len(ledger.points)
        say(f"all {count} points are measured already; to measure again, delete {ledger.path}")
    try:
        ledger.write()
        for cell in tqdm(left, desc="measuring", unit="visit", leave=False):
            ledger.add(cell, visit(cell, pace))
    finally:
        ledger.write()
