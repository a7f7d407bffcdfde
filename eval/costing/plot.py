"""A picture of the costs: verifying by nodes, by rows, drafts; dots measured, lines the curve.

It needs matplotlib, which is an extra: pip install 'specdraft[plots]'.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from specdraft.eval.costing.ledger import at_of, tries_of
from specdraft.eval.costing.show import off_by
from specdraft.eval.page.colours import SERIES
from specdraft.eval.page.png import save_png
from specdraft.eval.pricing.cost import CostModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 5.0, 4.0  # inches, of one part


def write_plot(points: Sequence[dict], costs: CostModel, title: str, path: Path) -> None:
    """Draw the points of costs.json and the curves through them, as a PNG.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    verify = [point for point in points if point["what"] == "verify"]
    draft = [point for point in points if point["what"] == "draft"]
    parts = 3 if draft else 2
    figure = Figure((WIDTH * parts, HEIGHT), layout="constrained")
    axes = figure.subplots(1, parts)
    _by_nodes(axes[0], verify, costs)
    _by_rows(axes[1], verify, costs)
    if draft:
        _of_drafts(axes[2], draft, costs)
    figure.suptitle(title, parse_math=False)
    save_png(figure, path, dpi=120)


def _by_nodes(axes: Axes, verify: Sequence[dict], costs: CostModel) -> None:
    least = min(point["rows"] for point in verify)
    own = [point for point in verify if point["rows"] == least]
    most = max(point["nodes"] for point in own)
    lengths = sorted({point["cached"] for point in own})
    for cached, colour in zip(lengths, SERIES, strict=False):
        there = [point for point in own if point["cached"] == cached]
        _dots(axes, [point["nodes"] for point in there], there, colour)
        line = [costs.verify_ms(least, nodes, cached) for nodes in range(1, most + 1)]
        axes.plot(range(1, most + 1), line, color=colour, label=f"{cached} cached")
    title = f"verifying, {least} row{'s' * (least > 1)}\n{off_by(costs.verify)}"
    axes.set(title=title, xlabel="nodes")
    _finish(axes)


def _by_rows(axes: Axes, verify: Sequence[dict], costs: CostModel) -> None:
    cached = min(point["cached"] for point in verify)
    own = [point for point in verify if point["cached"] == cached]
    most = max(point["rows"] for point in own)
    counts = sorted({point["nodes"] for point in own if point["rows"] == most})
    for nodes, colour in zip(counts, SERIES, strict=False):
        there = [point for point in own if point["nodes"] == nodes]
        _dots(axes, [point["rows"] for point in there], there, colour)
        line = [costs.verify_ms(rows, nodes, cached) for rows in range(1, most + 1)]
        axes.plot(
            range(1, most + 1), line, color=colour, label=f"{nodes} node{'s' * (nodes > 1)} each"
        )
    axes.set(title=f"verifying, {cached} cached", xlabel="rows")
    _finish(axes)


def _of_drafts(axes: Axes, draft: Sequence[dict], costs: CostModel) -> None:
    """Measured against fitted: on the line, they are one."""
    ordered = sorted(draft, key=lambda point: point["rows"])
    for (rows, part), colour in zip(groupby(ordered, lambda p: p["rows"]), SERIES, strict=False):
        there = list(part)
        said = [costs.draft_ms(**at_of(point)) for point in there]
        _dots(axes, said, there, colour, f"{rows} row{'s' * (rows > 1)}")
    ends = [f(point["ms"] for point in draft) for f in (min, max)]
    axes.plot(ends, ends, color="#66727f", linewidth=1)
    axes.set(title=f"drafts\n{off_by(costs.draft)}", xlabel="ms of the curve")
    _finish(axes)


def _dots(
    axes: Axes, at: Sequence[float], points: Sequence[dict], colour: str, label: str | None = None
) -> None:
    """What was measured, with the least and the most of its tries."""
    ms = [point["ms"] for point in points]
    shares = [[own.ms / own.pace for own in tries_of(point)] for point in points]
    spread = [
        [own * (1 - min(some) / median(some)) for own, some in zip(ms, shares, strict=True)],
        [own * (max(some) / median(some) - 1) for own, some in zip(ms, shares, strict=True)],
    ]
    style = {"fmt": "o", "markersize": 4, "linewidth": 1, "alpha": 0.8}
    axes.errorbar(at, ms, yerr=spread, color=colour, label=label, **style)


def _finish(axes: Axes) -> None:
    """Both axes by factors: costs are compared so."""
    axes.set(xscale="log", yscale="log", ylabel="ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(_some)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")


def _some(value: float, place: int) -> str:
    """Labels between powers of ten: those that do not run into each other."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
