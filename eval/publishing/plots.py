"""Figures: acceptance by position (CS Drafting, arXiv 2312.11462, Figures 1 and 3), and EWIF.

They need matplotlib, which is an extra: pip install 'specdraft[plots]'.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from specdraft.eval.measure.ewif import Proposer, ewif, of_assignment
from specdraft.eval.page.colours import method_colours
from specdraft.recipes.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (9.0, 3.6)  # inches


def figure() -> Figure:
    """An empty figure that needs no display; DataError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(
            "plots need matplotlib, which is not installed; pip install 'specdraft[plots]'"
        ) from error
    return Figure(figsize=SIZE, layout="constrained")


def acceptance_by_position(runs: Sequence[dict]) -> Figure:
    """Draw `acceptance_by_depth` and `accepted_by_depth` of a report's runs: given the position
    before, and of all drafts. runs: some of which draft."""
    drafting = [run for run in runs if run.get("acceptance_by_depth")]
    drawn = figure()
    given, reached = drawn.subplots(1, 2, sharey=True)
    colours = method_colours(run["method"] for run in drafting)
    strokes = {method: cycle(("-", "--", ":", "-.")) for method in colours}  # of its settings
    for run in drafting:
        method = run["method"]
        style = {"color": colours[method], "linestyle": next(strokes[method])}
        style |= {"marker": "o", "markersize": 3}
        label = {"label": _label(run, drafting)}
        for axes, key, more in ((given, "acceptance", label), (reached, "accepted", {})):
            rates = run.get(f"{key}_by_depth", [])  # earlier reports lack the second
            axes.plot(range(1, len(rates) + 1), rates, **style, **more)
    given.set(title="accepted, where the token before was", ylabel="probability", ylim=(0, 1.02))
    reached.set(title="accepted, and all before it")
    for axes in (given, reached):
        axes.set(xlabel="position in the draft")
        _grid(axes)
    drawn.legend(loc="outside right center", fontsize="small")
    return drawn


def _label(run: dict, runs: Sequence[dict]) -> str:
    """A run's method, and what else tells it from the others."""
    parts = [run["method"]]
    for key, sign in (("batch_size", "batch "), ("temperature", "T = ")):
        if len({other[key] for other in runs}) > 1:
            parts.append(f"{sign}{run[key]}")
    return ", ".join(parts)


def _grid(axes: Axes) -> None:
    """Lines to read values by, and whole numbers of tokens."""
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def of_one_drafter(alpha: float, costs: Sequence[float], most: int) -> Figure:
    """Draw EWIF over k for several costs of a drafted token, with the best k of each marked."""
    drawn, axes = _ewif(f"one drafter, alpha = {alpha:g}", "k: tokens drafted")
    for cost in costs:
        values = [ewif([alpha] * k, k * cost) for k in range(most + 1)]
        best = values.index(max(values))
        axes.plot(values, "o-", markevery=[best], label=f"c = {cost:g}")
    axes.legend()
    return drawn


def of_horizontal_cascade(large: Proposer, small: Proposer, most: int) -> Figure:
    """Draw EWIF over k for a larger drafter alone, and with tails of a smaller one behind it."""
    first, second = (f"alpha {one.alpha:g}, c {one.cost:g}" for one in (large, small))
    drawn, axes = _ewif(f"{first}; behind it {second}", "tokens of the larger drafter")
    for tail in (0, 1, 2, 4, 8):
        values = [of_assignment([large] * k + [small] * tail) for k in range(most + 1)]
        axes.plot(values, label=f"{tail} behind" if tail else "alone")
    axes.legend(title="tokens of the smaller")
    return drawn


def _ewif(title: str, what: str) -> tuple[Figure, Axes]:
    """A figure of EWIF over a number of tokens, without lines."""
    drawn = figure()
    axes = drawn.subplots()
    axes.set(title=title, xlabel=what, ylabel="EWIF")
    _grid(axes)
    return drawn, axes
