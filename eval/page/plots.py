"""The plots of a report: every figure stands beside its mark as text, rounded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from specdraft.eval.engine.tree import Topology
from specdraft.eval.page.canvas import (
    FAINT,
    GRID,
    INK,
    LETTER,
    MARK,
    WIDTH,
    Box,
    Dot,
    Label,
    Line,
    Plot,
)
from specdraft.eval.page.colours import mixed

PHASES = {"draft": "#d0a23c", "verify": "#5d7f9e", "rest": "#a3aeb8"}
RARE = 0.1  # share of drafts that a node is in, to be shown
SELDOM = "#93a1af"  # a node of a tree that is hardly ever accepted
MOST_TICKS = 10  # with a number, of an axis


def bars(
    name: str,
    title: str,
    values: Mapping[str, float],
    spreads: Mapping[str, tuple[float, float]],
    colours: Mapping[str, str],
) -> Plot:
    """One bar per method, with its figure, and a whisker where repeats give it a spread; a line
    through all of them at 1, which is plain decoding."""
    plot, left = Plot(name, title), _label_width(values)
    ends = [*values.values(), *(high for _, high in spreads.values())]
    scale = (WIDTH - left - _figure_width(values.values())) / max(ends)
    plain = left + scale
    plot.add(Line([(plain, 0), (plain, 24 * len(values))], MARK))
    for number, (method, value) in enumerate(values.items()):
        y, end = 24 * number, left + value * scale
        plot.add(Label(left - 6, y + 16, fitting(method, left - 6), "end"))
        plot.add(Box(left, y + 5, value * scale, 15, colours[method], f"{method}: {value}"))
        if method in spreads:
            low, high = (left + limit * scale for limit in spreads[method])
            plot.add(Line([(low, y + 12.5), (high, y + 12.5)], INK, 1.2))
            plot.add(*(Line([(x, y + 8), (x, y + 17)], INK, 1.2) for x in (low, high)))
            end = max(end, high)
        plot.add(Label(end + 5, y + 16, f"{value:.2f}"))
    plot.height = 24 * len(values) + 4
    return plot


def stacks(name: str, title: str, parts: Mapping[str, Mapping[str, float]]) -> Plot:
    """One bar per method, cut into phases, with its sum."""
    plot, left = Plot(name, title), _label_width(parts)
    sums = [sum(phases.values()) for phases in parts.values()]
    scale = (WIDTH - left - _figure_width(sums)) / max(sums)
    for number, (method, phases) in enumerate(parts.items()):
        y, x = 24 * number, left
        plot.add(Label(left - 6, y + 16, fitting(method, left - 6), "end"))
        for phase, value in phases.items():
            tip = f"{method}, {phase}: {value} ms"
            plot.add(Box(x, y + 5, max(value, 0) * scale, 15, PHASES[phase], tip))
            x += max(value, 0) * scale
        plot.add(Label(x + 5, y + 16, f"{sum(phases.values()):.2f}"))
    _legend(plot, PHASES, 24 * len(parts) + 8)
    return plot


def curves(
    name: str,
    title: str,
    series: Mapping[str, Mapping[int, float]],
    colours: Mapping[str, str],
    axis: str,
    highest: float | None = None,
    spreads: Mapping[tuple[str, int], Sequence[float]] = MappingProxyType({}),
) -> Plot:
    """One line per method over whole numbers, which stand at equal distances.

    spreads: repeats of a point, (method, number), which give it a whisker.
    """
    plot = Plot(name, title)
    ticks = sorted({x for points in series.values() for x in points})
    values = [value for points in series.values() for value in points.values()]
    unit, most = _grid(max(values + [max(some) for some in spreads.values() if some]), highest)
    left, bottom, wide, high = 34, 182, WIDTH - 50, 170
    place = {x: left + wide * (n + 0.5) / len(ticks) for n, x in enumerate(ticks)}
    for n in range(round(most / unit) + 1):
        y = bottom - high * n * unit / most
        plot.add(Line([(left, y), (left + wide, y)], GRID))
        plot.add(Label(left - 5, y + 4, f"{unit * n:g}", "end", FAINT, 10))
    numbered = ticks[:: -(-len(ticks) // MOST_TICKS)]
    plot.add(*(Label(place[x], bottom + 15, str(x), "middle", FAINT, 10) for x in numbered))
    radius = 3.5 if len(ticks) == len(numbered) else 1.8
    plot.add(Label(left + wide / 2, bottom + 30, axis, "middle", FAINT, 10))
    for method, points in series.items():
        at = [(place[x], bottom - high * y / most) for x, y in sorted(points.items())]
        plot.add(Line(at, colours[method], 2))
        for (x, y), (value, share) in zip(at, sorted(points.items()), strict=True):
            if repeats := spreads.get((method, value)):
                ends = [(x, bottom - high * limit / most) for limit in (min(repeats), max(repeats))]
                plot.add(Line(ends, colours[method], 1.2))
            plot.add(Dot(x, y, radius, colours[method], f"{method}, {axis} {value}: {share}"))
    _legend(plot, {method: colours[method] for method in series}, bottom + 40)
    return plot


def _grid(value: float, highest: float | None) -> tuple[float, float]:
    """Distance of the grid lines, a round number, and the topmost of at most six above zero."""
    most = highest or value or 1.0  # of zeros alone
    units = (digit * 10.0**power for power in range(-3, 300) for digit in (1, 2, 2.5, 5))
    unit = next(unit for unit in units if most / unit <= 6)
    return unit, unit * math.ceil(most / unit - 1e-9)


def node_tree(name: str, title: str, nodes: Sequence[Mapping], colour: str) -> Plot:
    """A decoding tree from left to right: the more colour, and the wider, the more often a node is
    accepted.

    nodes: {"path", "drafted", "accepted"} with parents first, as `acceptance_by_node` has them; of
    trees that change, those that are no rarity.
    """
    most = max(node["drafted"] for node in nodes)
    nodes = [node for node in nodes if node["drafted"] >= RARE * most]
    plot, paths = Plot(name, title), [tuple(node["path"]) for node in nodes]
    index = {(): 0} | {path: n for n, path in enumerate(paths, start=1)}
    tree = Topology([-1, *(index[path[:-1]] for path in paths)])
    step, row, rows = (WIDTH - 36) / tree.depth, 26, _rows(tree)
    at = [(10 + depth * step, 24 + row * y) for depth, y in zip(tree.depths, rows, strict=True)]
    for number, (path, node) in reversed(list(enumerate(zip(paths, nodes, strict=True), start=1))):
        share = node["accepted"] / node["drafted"]
        heat = mixed(SELDOM, colour, share**0.5)
        (x, y), (from_x, from_y) = at[number], at[tree.parents[number]]
        middle = from_x + 0.35 * step
        line = [(from_x, from_y), (middle, y), (x, y)] if y != from_y else [(from_x, y), (x, y)]
        plot.add(Line(line, heat, 0.8 + 7 * share))
        ranks = ".".join(map(str, path))
        tip = f"ranks {ranks}: accepted {node['accepted']} of {node['drafted']}"
        plot.add(Dot(x, y, 2.5 + 3 * share, heat, tip))
        plot.add(Label(x, y - 8, _percent(share), "middle", size=9.5))
    plot.add(Dot(*at[0], 4, INK, "the last committed token"))
    plot.height = 24 + row * max(rows) + 12
    return plot


def _rows(tree: Topology) -> list[int]:
    """A row for every leaf; a parent stands in the row of its first child."""
    rows, leaves = [0] * len(tree), 0
    for node in depth_first(tree):
        rows[node] = leaves
        leaves += not tree.children[node]
    return rows


def depth_first(tree: Topology) -> list[int]:
    """The nodes of a tree, each before its descendants, and these before its later siblings."""
    return sorted(range(len(tree)), key=tree.rank_paths.__getitem__)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 or not share else "<1%"


def _label_width(names: Sequence[str] | Mapping) -> float:
    return min(LETTER * max(map(len, names)) + 10, WIDTH / 2)


def _figure_width(values: Iterable[float]) -> float:
    """Room behind the longest bar for its figure."""
    return max(42, LETTER * max(len(f"{value:.2f}") for value in values) + 12)


def fitting(name: str, width: float) -> str:
    """A name that has so much room: its end, which tells a run from others of its folder."""
    most = int(width / LETTER)
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _legend(plot: Plot, colours: Mapping[str, str], top: float) -> None:
    x, y = 10.0, top
    for name, colour in colours.items():
        if x + 24 + LETTER * len(name) > WIDTH:
            x, y = 10.0, y + 17
        plot.add(Box(x, y, 10, 10, colour), Label(x + 14, y + 9, name))
        x += 28 + LETTER * len(name)
    plot.height = y + 18
