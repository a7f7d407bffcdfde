"""Data curves drawn: what was measured, the forecast between and beyond, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specdraft.eval.page.colours import method_colours
from specdraft.eval.page.png import save_png
from specdraft.eval.publishing.plots import figure
from specdraft.train.curves.forecast import Forecast
from specdraft.train.curves.sizes import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 60  # of a line


def draw_curves(report: dict, folder: Path) -> None:
    """Write curve-REGIME.png for every regime of steps; DataError without matplotlib."""
    for regime in dict.fromkeys(run["steps_are"] for run in report["runs"]):
        drawn = figure()
        axes = drawn.add_subplot()
        runs = [run for run in report["runs"] if run["steps_are"] == regime]
        for kind in dict.fromkeys(run["kind"] for run in runs):
            _draw_kind(axes, kind, [run for run in runs if run["kind"] == kind])
        axes.set_xscale("log")
        axes.set_ylim(bottom=1.0)
        axes.set(xlabel="rows of training", ylabel="tokens per step")
        axes.set_title(f"{regime} steps; lines and 90% bands of all curves that fit", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper left")
        save_png(drawn, folder / f"curve-{regime}.png")


def _draw_kind(axes: Axes, kind: str, runs: Sequence[dict]) -> None:
    """Every run a point; the median forecast from the smallest size to ten times the largest."""
    colour = method_colours(METHODS.values())[METHODS[kind]]
    forecast, sizes = Forecast(runs), [run["rows"] for run in runs]
    line = np.geomspace(min(sizes), 10 * max(sizes), POINTS)
    low, high = zip(*map(forecast.interval, line), strict=True)
    axes.fill_between(line, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(line, [forecast(rows) for rows in line], color=colour, linewidth=1.2)
    axes.plot(
        sizes, [run["tokens_per_step"] for run in runs], "o", color=colour, markersize=4, label=kind
    )
