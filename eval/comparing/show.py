"""A comparison on a terminal of 80 columns, and its frontier: training's cost against speed."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specdraft.eval.measure.table import other_target, width_of
from specdraft.eval.page.canvas import FAINT, GRID, INK, LETTER, WIDTH, Dot, Label, Line, Plot
from specdraft.eval.page.cells import NOTHING, failure_reasons, figure, identical_outputs
from specdraft.eval.page.colours import method_colours
from specdraft.eval.page.plots import fitting
from specdraft.recipes.terminal import Screen

HEADINGS = (
    *("tokens\n/step", "x\nplain", "tokens\n/s", "iden-\ntical"),
    *("train\nmin", "para-\nmeters", "MB", "drafts\n/s"),
)
NAME = 12  # columns of a drafter's name, at least


def print_comparison(report: dict, console: Screen | None = None) -> None:
    """Show the drafters side by side, those left out, and the advice."""
    console = console or Screen()
    table = Table(title=other_target(report), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("drafter", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    facts = {one["name"]: one for one in report["contestants"]}
    for run in report["runs"]:
        one = facts.get(run["method"], {})
        table.add_row(
            run["method"],
            figure(run.get("tokens_per_step")),
            figure(run.get("speedup")),
            figure(run.get("tokens_per_second"), 0),
            identical_outputs(run),
            figure(one.get("training_minutes"), 1),
            _short(one.get("parameters")),
            figure(one["bytes"] / 1e6 if one else None, 1),
            _short(one.get("drafted_per_second")),
        )
    # Names fold, figures do not: on a narrow terminal lines wrap instead.
    longest = max(len(run["method"]) for run in report["runs"])
    least = width_of(table, console) - longest + min(longest, NAME)
    console.width = max(console.width, least)
    console.print(table)
    for run in report["runs"]:
        if tree := run.get("tree"):
            console.print(f"{run['method']}: {tree}")
        if run["failures"]:
            console.print(Text(f"{run['method']}: {failure_reasons(run)}", "red"))
    for name, why in report["left_out"].items():
        console.print(Text(f"left out: {name}: {why}", "yellow"))
    console.print(Text(report["advice"], "bold"))


def frontier(report: dict) -> Plot | None:
    """Draw speed over minutes of training; the line joins those that no cheaper one outruns.

    None where no two of them have both.
    """
    speed = {run["method"]: run.get("speedup") for run in report["runs"]}
    points = {
        one["name"]: (one["training_minutes"], speed[one["name"]])
        for one in report["contestants"]
        if one["training_minutes"] is not None and speed[one["name"]]
    }
    if len(points) < 2:
        return None
    plot = Plot("frontier", "x plain decoding, by minutes of training", height=222)
    left, bottom, wide, high = 34, 182, WIDTH - 150, 160
    widest = max(minutes for minutes, _ in points.values()) or 1.0
    most = max(1.0, *(gain for _, gain in points.values()))
    place = {
        n: (left + wide * x / widest, bottom - high * y / most) for n, (x, y) in points.items()
    }
    for share in (0, 0.5, 1):
        y = bottom - high * share
        plot.add(Line([(left, y), (left + wide, y)], GRID))
        plot.add(Label(left - 5, y + 4, f"{most * share:.1f}", "end", FAINT, 10))
        plot.add(
            Label(left + wide * share, bottom + 15, _minutes(widest * share), "middle", FAINT, 10)
        )
    plot.add(Label(left + wide / 2, bottom + 30, "minutes of training", "middle", FAINT, 10))
    plot.add(Line([place[name] for name in outrun_by_none(points)], FAINT, 1.5))
    colours = method_colours(run["method"] for run in report["runs"])
    line = 0.0  # of the last label: those of near points stand below each other
    for name, (x, y) in sorted(place.items(), key=lambda one: one[1][1]):
        minutes, gain = points[name]
        line = max(y + 4, line + LETTER * 2)
        plot.add(Dot(x, y, 4.5, colours[name], f"{name}: {gain:.2f} x after {minutes:.1f} minutes"))
        plot.add(Label(x + 8, line, fitting(name, WIDTH - x - 8), "start", INK))
    return plot


def outrun_by_none(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names, by cost, that are faster than every cheaper one. points: cost and speed."""
    found: list[str] = []
    for name in sorted(points, key=lambda one: (points[one][0], -points[one][1])):
        if not found or points[name][1] > points[found[-1]][1]:
            found.append(name)
    return found


def _minutes(value: float) -> str:
    """Minutes as an axis has them."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _short(count: float | None) -> str:
    """A large number in four characters: 950, 12k, 3.1M."""
    if count is None:
        return NOTHING
    units = {1e9: "G", 1e6: "M", 1e3: "k", 1: ""}
    unit = next((unit for unit in units if count >= unit), 1)
    return f"{count / unit:.{1 if unit > 1e3 and count < 10 * unit else 0}f}{units[unit]}"
