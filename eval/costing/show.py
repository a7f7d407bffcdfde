"""Costs and trees on a terminal: what was measured, beside what the curve and the search say."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specdraft.eval.costing.ledger import at_of
from specdraft.eval.costing.settings import PricedSetting
from specdraft.eval.measure.table import print_whole
from specdraft.eval.measure.tuning import overrides, recipe_part
from specdraft.eval.pricing.cost import CostModel, Curve
from specdraft.recipes.fitted_tree import Fit, Trial
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import Screen


def print_costs(points: Sequence[dict], costs: CostModel, console: Screen) -> None:
    """Show verifying by nodes and by rows, drafting by passes and levels, and the loop.

    points: as costs.json has them. A cell has the milliseconds measured and, in brackets, the
    curve's.
    """
    verify = [point for point in points if point["what"] == "verify"]
    least = min(point["rows"] for point in verify)
    print_whole(_by_nodes(verify, least, costs), console)
    if max(point["rows"] for point in verify) > least:
        print_whole(_by_rows(verify, costs), console)
    if costs.draft:
        print_whole(_of_drafts(points, costs), console)
    for name, curve in (("verify", costs.verify), ("draft", costs.draft), ("loop", costs.loop)):
        if curve:
            console.print(f"{name}: {error_of(curve)}")


def error_of(curve: Curve) -> str:
    """How far a curve is from what was measured, in words."""
    held_out = f"held-out points by {curve.median_held_out:.1%} (median)"
    return f"{curve.points} points; the curve is {off_by(curve)}, {held_out}"


def off_by(curve: Curve) -> str:
    """The errors of a curve at the points that it was fitted to."""
    return f"off by {curve.median_error:.1%} (median), {curve.worst_error:.1%} (worst)"


def _by_nodes(verify: Sequence[dict], rows: int, costs: CostModel) -> Table:
    lengths = sorted({point["cached"] for point in verify})
    headings = [f"{length}\ncached" for length in lengths]
    table = _table(f"ms to verify, measured (fitted): batch of {rows}", "nodes", headings)
    own = [point for point in verify if point["rows"] == rows]
    for nodes in sorted({point["nodes"] for point in own}):
        cells = (_verified(own, costs, rows, nodes, cached) for cached in lengths)
        table.add_row(str(nodes), *cells)
    return table


def _by_rows(verify: Sequence[dict], costs: CostModel) -> Table:
    cached = min(point["cached"] for point in verify)
    rows = sorted({point["rows"] for point in verify})
    many = {point["nodes"] for point in verify if point["rows"] == rows[-1]}
    headings = [f"{nodes}\nnode{'s' * (nodes > 1)}" for nodes in sorted(many)]
    table = _table(f"ms to verify after {cached} cached tokens", "rows", headings)
    for count in rows:
        cells = (_verified(verify, costs, count, nodes, cached) for nodes in sorted(many))
        table.add_row(str(count), *cells)
    return table


def _verified(verify: Sequence[dict], costs: CostModel, rows: int, nodes: int, cached: int) -> str:
    place = {"rows": rows, "nodes": nodes, "cached": cached}
    found = (point["ms"] for point in verify if place.items() <= point.items())
    return _pair(next(found, None), costs.verify_ms(rows, nodes, cached))


def _of_drafts(points: Sequence[dict], costs: CostModel) -> Table:
    table = _table("ms to draft, one row", "paths of each pass; nodes of each level", ["draft"])
    own = [point for point in points if point["what"] == "draft" and point["rows"] == 1]
    for point in sorted(own, key=lambda p: (len(p["paths"]), len(p["levels"]), p["levels"])):
        name = f"{_joined(point['paths'])}; {_joined(point['levels'])}"
        name += "; best first" * ("best_first" in point)
        table.add_row(name, _pair(point["ms"], costs.draft_ms(**at_of(point))))
    return table


def print_fit(file: Path, fit: Fit) -> None:
    """Show what was expected of every tree that was tried beside what was measured."""
    _print_tried("tree", fit.tried())
    own, rows = fit.tried()[0], f"{fit.rows} row{'s' * (fit.rows > 1)}"
    Screen(soft_wrap=True).print(f"wrote {file}: {own}, for {rows}")
    _print_if_slower(fit.tried(), f"{rows} on {fit.place}")


def _print_if_slower(tried: Sequence[Trial | PricedSetting], where: str) -> None:
    """Say what to do where no draft gains time; the first need not be the fastest in the race."""
    if (best := max(one.measured for one in tried)) <= 1:
        Screen(soft_wrap=True).print(
            f"no draft tried beats plain decoding with {where}: the best runs at {best:.2f} x; use "
            "method plain there, train longer, or let *_dynamic size the draft of each step"
        )


def print_settings(recipe: Recipe, file: Path, found: Sequence[PricedSetting]) -> None:
    """Show what was expected of every setting that was tried beside what was measured."""
    _print_tried("setting", found)
    part = overrides(recipe_part(recipe, found[0].setting))
    Screen(soft_wrap=True).print(f"wrote {file}: {' '.join(map(repr, part))}")
    _print_if_slower(found, "these rows on this machine")


def _print_tried(name: str, tried: Sequence[Trial | PricedSetting]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, no_wrap=True)
    for heading in ("tokens/step\nexpected", "x plain\nexpected", "x plain\nmeasured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, one in enumerate(tried):
        figures = (f"{figure:.2f}" for figure in (one.tokens, one.expected, one.measured))
        table.add_row(str(one), *figures, style=None if number else "bold")
    print_whole(table, Screen(soft_wrap=True))


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (first, *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _pair(measured: float | None, fitted: float) -> str:
    return f"{'-' if measured is None else _digits(measured)} ({_digits(fitted)})"


def _digits(ms: float) -> str:
    """Three digits, however small or large."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def summary(costs: CostModel) -> Iterator[str]:
    """The figures that a choice between trees begins with."""
    one = costs.verify_ms(1, 1, 64)
    several = ", ".join(
        f"{nodes} nodes {costs.verify_ms(1, nodes, 64) / one:.2f} x" for nodes in (4, 16, 64)
    )
    yield f"a forward of one node after 64 cached tokens takes {_digits(one)} ms; {several}"
    yield f"the decoder itself adds {_digits(costs.loop_ms(1))} ms to a plain step"
