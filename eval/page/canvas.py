"""A canvas of boxes, lines, dots and labels, drawn as SVG for the page and as PNG for papers.

It is 360 units wide, so that its text can be read on a phone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from specdraft.eval.page.png import save_png

WIDTH = 360
FONT, LETTER = 11, 6.2  # size of text, and the width of an average letter of it
INK, FAINT, GRID, MARK = "#1f2933", "#66727f", "#d9dee3", "#b0b9c1"  # on paper
ON_THE_PAGE = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--rule)", MARK: "var(--mark)"}


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    tip: str = ""


@dataclass(frozen=True)
class Line:
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    colour: str
    tip: str = ""


@dataclass(frozen=True)
class Label:
    x: float
    y: float  # of the baseline
    text: str
    anchor: str = "start"  # start, middle, end
    colour: str = INK
    size: float = FONT


Shape = Box | Line | Dot | Label


@dataclass
class Plot:
    """A titled canvas. `name` is that of its PNG file."""

    name: str
    title: str
    height: float = 0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes


def to_svg(plot: Plot) -> str:
    """Return a plot as an SVG element; every text in it is escaped."""
    shapes = "\n".join(_svg(shape) for shape in plot.shapes)
    return (
        f'<svg viewBox="0 0 {WIDTH} {plot.height:.0f}" role="img" data-plot="{escape(plot.name)}" '
        f'aria-label="{escape(plot.title)}">\n{shapes}\n</svg>'
    )


def _svg(shape: Shape) -> str:
    paint = ON_THE_PAGE.get(shape.colour, shape.colour)
    match shape:
        case Box(x, y, width, height, _, tip):
            place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            return f'<rect {place} fill="{paint}">{_tip(tip)}</rect>'
        case Line(points, _, width):
            at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'fill="none" stroke="{paint}" stroke-width="{width:.1f}"'
            return f'<polyline points="{at}" {style} stroke-linejoin="round"/>'
        case Dot(x, y, radius, _, tip):
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
            return f'<circle {place} fill="{paint}">{_tip(tip)}</circle>'
        case Label(x, y, text, anchor, _, size):
            style = f'text-anchor="{anchor}" fill="{paint}" font-size="{size}"'
            return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def write_png(plot: Plot, folder: Path) -> Path:
    """Draw a plot with matplotlib, three pixels per unit, into folder/NAME.png.

    Raises: ImportError without matplotlib (the extra `plots`), CacheError on a full disk.
    """
    from matplotlib.figure import Figure

    figure = Figure((WIDTH / 72, (plot.height + 22) / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(plot.height, -22))
    axes.axis("off")
    for shape in (Label(8, -7, plot.title, size=12), *plot.shapes):
        _paint(axes, shape)
    return save_png(figure, folder / f"{plot.name}.png", dpi=216)


def _paint(axes, shape: Shape) -> None:
    from matplotlib.patches import Circle, Rectangle

    match shape:
        case Box(x, y, width, height, colour):
            axes.add_patch(Rectangle((x, y), width, height, color=colour, linewidth=0))
        case Line(points, colour, width):
            at = zip(*points, strict=True)
            axes.plot(*at, color=colour, linewidth=width, solid_capstyle="butt")
        case Dot(x, y, radius, colour):
            axes.add_patch(Circle((x, y), radius, color=colour, linewidth=0, zorder=3))
        case Label(x, y, text, anchor, colour, size):
            side = {"start": "left", "middle": "center", "end": "right"}[anchor]
            # A text of ours is no formula, whatever dollar signs it holds.
            axes.text(x, y, text, ha=side, color=colour, fontsize=size, parse_math=False)
