"""Curves of trainings on growing subsets: figures, fits, what ten times the data would bring."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specdraft.eval.page.colours import method_colours
from specdraft.eval.page.plots import curves, write_png
from specdraft.recipes.terminal import Screen
from specdraft.train.curves.saturation import fit_saturation, predict
from specdraft.train.curves.sizes import METHODS, Size

BACK_TEST = 3  # the first sizes, which predict the largest


def make_curves(sizes: Sequence[tuple[str, Size]]) -> dict:
    """Return the points of every training, and a curve for every kind and regime of steps."""
    points = [{"steps_are": regime} | _point(size) for regime, size in sizes]
    names = dict.fromkeys((point["kind"], point["steps_are"]) for point in points)
    return {
        "schema": 1,
        "environment": json.loads(sizes[0][1].job.path.read_text())["environment"],
        "points": points,
        "curves": [
            {"kind": kind, "steps_are": regime} | _curve(_by_rows(points, kind, regime))
            for kind, regime in names
        ],
    }


def _point(size: Size) -> dict:
    report = size.job.report()
    run = next(run for run in report["runs"] if run["method"] == METHODS[size.kind])
    log = size.job.folder / "log.jsonl"  # a table, which is counted, keeps none
    last = json.loads(log.read_text().splitlines()[-1]) if log.is_file() else {}
    return {
        "kind": size.kind,
        "rows": size.rows,
        "steps": size.steps,
        "seed": size.seed,
        "minutes": last.get("minutes"),
        "prompts": run["outputs"],
        "identical": run["identical"],
        "tokens_per_step": run["tokens_per_step"],
        "speedup": run["speedup"],
    }


def _by_rows(points: Sequence[dict], kind: str, regime: str) -> dict[int, list[float]]:
    by_rows: dict[int, list[float]] = {}
    for point in points:
        if (point["kind"], point["steps_are"]) == (kind, regime):
            by_rows.setdefault(point["rows"], []).append(point["tokens_per_step"])
    return by_rows


def _curve(by_rows: dict[int, list[float]]) -> dict:
    """The fit, what ten times the largest size would bring, and how far the first sizes' fit missed
    the largest (None with no more of them)."""
    sizes = [*by_rows]
    pairs = [(size, value) for size, values in by_rows.items() for value in values]
    fitted = fit_saturation(*zip(*pairs, strict=True))
    more, interval = predict(by_rows, 10 * sizes[-1])
    first, missed = dict(list(by_rows.items())[:BACK_TEST]), None
    if len(sizes) > BACK_TEST:
        said, _ = predict(first, sizes[-1])
        missed = said / fmean(by_rows[sizes[-1]]) - 1
    return {
        "ceiling": fitted.ceiling,
        "gap": fitted.gap,
        "slope": fitted.slope,
        "rows": sizes,
        "means": [fmean(values) for values in by_rows.values()],
        "ten_times": {"rows": 10 * sizes[-1], "tokens_per_step": more, "interval": interval},
        "back_test_error": missed,
    }


def print_curves(report: dict, console: Screen | None = None) -> None:
    """Show tokens per step by rows, a line per kind and regime, and what ten times would bring."""
    console, sizes = console or Screen(), report["curves"][0]["rows"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("kind, steps", no_wrap=True)
    for heading in (*(f"{size:,}" for size in sizes), f"{10 * sizes[-1]:,}?", "90%", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for curve in report["curves"]:
        ten = curve["ten_times"]
        interval = "-" if ten["interval"] is None else "{:.2f}-{:.2f}".format(*ten["interval"])
        missed = curve["back_test_error"]
        table.add_row(
            f"{curve['kind']}, {curve['steps_are']}",
            *(f"{mean:.2f}" for mean in curve["means"]),
            f"{ten['tokens_per_step']:.2f}",
            interval,
            "-" if missed is None else f"{missed:+.1%}",
        )
    console.print(table)
    for curve in report["curves"]:
        console.print(Text(sentence(curve)))


def sentence(curve: dict) -> str:
    """Say what ten times the data would bring, as the fit has it."""
    ten, now = curve["ten_times"], curve["means"][-1]
    gain = ten["tokens_per_step"] / now - 1
    sure = ""
    if ten["interval"]:
        sure = " ({:.2f} to {:.2f})".format(*ten["interval"])
    return (
        f"{curve['kind']}, {curve['steps_are']} steps: {ten['rows']:,} rows would bring "
        f"{ten['tokens_per_step']:.2f} tokens per step{sure}, {gain:+.0%} over "
        f"{curve['rows'][-1]:,}"
    )


def draw_curves(report: dict, folder: Path) -> None:
    """Write a PNG per regime: tokens per step by rows, and what is foretold for ten times as many.

    Without matplotlib, nothing.
    """
    if not importlib.util.find_spec("matplotlib"):
        return
    by_method = method_colours(METHODS.values())
    colours = {kind: by_method[method] for kind, method in METHODS.items()}
    for regime in dict.fromkeys(curve["steps_are"] for curve in report["curves"]):
        chosen = [curve for curve in report["curves"] if curve["steps_are"] == regime]
        series = {}
        for curve in chosen:
            points = dict(zip(curve["rows"], curve["means"], strict=True))
            ten = curve["ten_times"]
            series[curve["kind"]] = points | {ten["rows"]: ten["tokens_per_step"]}
        title = f"tokens per step by rows of training, {regime} steps (the last foretold)"
        write_png(curves(f"curve-{regime}", title, series, colours, "rows"), folder)
