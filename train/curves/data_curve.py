"""Curves of trainings on growing subsets: figures, fits, what ten times the data would bring."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.text import Text

from specdraft.data.store.tokens import TokenCache
from specdraft.eval.papers.table import Row, over_seeds, written
from specdraft.eval.publishing.result import show
from specdraft.recipes.terminal import Screen
from specdraft.train.curves.forecast import Forecast
from specdraft.train.curves.saturation import reached_by_depth
from specdraft.train.curves.sizes import BACK_TEST, METHODS, Size


def make_curves(sizes: Sequence[tuple[str, Size]], learnt: Mapping[int, int]) -> dict:
    """Return a table of all trainings, a row for every size, and the curve of every kind and regime
    of steps.

    learnt: tokens of a size that are learnt from, on average over the seeds; none of one whose
    caches are gone. The table is one of eval/papers: it has tokens per step and minutes of
    training, what ten times the data would bring, and what the first sizes foretell of the largest
    over what it has brought. `runs` are the trainings.
    """
    points = [{"steps_are": regime} | _point(size) for regime, size in sizes]
    for point in points:
        point["tokens"] = learnt.get(point["rows"])
    regimes = {point["steps_are"] for point in points}
    columns: dict[str, list[dict]] = {}
    for point in points:
        named = point["kind"] + f", {point['steps_are']} steps" * (len(regimes) > 1)
        columns.setdefault(named, []).append(point)
    found = {name: _curve(some) for name, some in columns.items()}
    rows = {
        f"{rows:,} rows" + (f", {tokens:,} tokens" if tokens else ""): _size(rows, columns)
        for rows, tokens in dict.fromkeys((point["rows"], point["tokens"]) for point in points)
    }
    rows |= _foretold(found)
    return {
        "environment": sizes[0][1].job.report()["environment"],
        **written(rows, {}),
        "curves": found,
        "runs": points,
    }


def learnt_tokens(cache: Path, sizes: Sequence[tuple[str, Size]]) -> dict[int, int]:
    """Return the tokens that are learnt from of every size in a curve's own cache, on average over
    its subsets. Caches of other trainings, which the folder may hold too, do not count."""
    trained = [size.job.report()["recipe"]["data"] for _, size in sizes]
    found: dict[int, list[int]] = {}
    for one in map(TokenCache.open, sorted(cache.glob("tokens-*"))):
        made = one.meta["settings"]
        keys = made.keys() & trained[0].keys() - {"sources"}  # which are hashed there
        if any(all(made[key] == data[key] for key in keys) for data in trained):
            found.setdefault(made["limit"], []).append(one.stats["supervised"])
    return {rows: round(fmean(tokens)) for rows, tokens in found.items()}


def _point(size: Size) -> dict:
    report = size.job.report()
    run = next(run for run in report["runs"] if run["method"] == METHODS[size.kind])
    return {
        "kind": size.kind,
        "rows": size.rows,
        "steps": size.steps,
        "read": size.read,
        "seed": size.seed,
        "minutes": size.minutes,
        "outputs": run["outputs"],
        "identical": run["identical"],
        "near_ties": run["near_ties"],
        "tokens_per_step": run["tokens_per_step"],
        "reached_by_depth": reached_by_depth(run),
    }


def _curve(points: Sequence[dict]) -> dict:
    """The fit, what ten times the largest size would bring, and how far the first sizes' fit missed
    the largest (None with no more of them)."""
    means: dict[int, float] = {}
    for rows in sorted({point["rows"] for point in points}):
        reached = [sum(point["reached_by_depth"]) for point in points if point["rows"] == rows]
        means[rows] = 1 + fmean(reached)
    sizes = [*means]
    forecast, more = Forecast(points), 10 * sizes[-1]
    missed = None
    if len(sizes) > BACK_TEST:
        first = Forecast([point for point in points if point["rows"] in sizes[:BACK_TEST]])
        missed = first(sizes[-1]) / means[sizes[-1]] - 1
    fitted = forecast.fitted
    return {
        "kind": points[0]["kind"],
        "steps_are": points[0]["steps_are"],
        "likeliest_errors": {"first": fitted.first.likeliest, "later": fitted.later.likeliest},
        "rows": sizes,
        "means": [*means.values()],
        "ten_times": {
            "rows": more,
            "tokens_per_step": forecast(more),
            "interval": forecast.interval(more),
        },
        "back_test_error": missed,
    }


def _size(rows: int, columns: Mapping[str, Sequence[dict]]) -> Row:
    """Tokens per step and minutes with so many rows, over the seeds."""
    cells, runs = {}, []
    for name, points in columns.items():
        own = [point for point in points if point["rows"] == rows]
        cells[name] = over_seeds([point["tokens_per_step"] for point in own])
        if None not in (minutes := [point["minutes"] for point in own]):
            cells[f"{name}: minutes"] = over_seeds(minutes)
        runs += own
    return Row(cells, runs)


def _foretold(found: Mapping[str, dict]) -> dict[str, Row]:
    """What ten times the largest size would bring, and how well the first sizes foretold it."""
    more, tested = {}, {}
    for name, curve in found.items():
        ten = curve["ten_times"]
        sure = "{:.2f} to {:.2f}".format(*ten["interval"])
        more[name] = {"mean": ten["tokens_per_step"], "shape": sure}
        if curve["back_test_error"] is not None:
            tested[name] = {"mean": 1 + curve["back_test_error"]}
    rows = {f"{ten['rows']:,} rows, foretold (90%)": Row(more)}
    if tested:
        rows[f"forecast of the first {BACK_TEST} sizes over the last"] = Row(tested)
    return rows


def print_curves(report: dict) -> None:
    """Show the table, then what ten times the data would bring."""
    show(report)
    for curve in report["curves"].values():
        Screen().print(Text(sentence(curve)))


def sentence(curve: dict) -> str:
    """Say what ten times the data would bring, as the fit has it."""
    ten, now = curve["ten_times"], curve["means"][-1]
    gain = ten["tokens_per_step"] / now - 1
    sure = "{:.2f} to {:.2f}".format(*ten["interval"])
    return (
        f"{curve['kind']}, {curve['steps_are']} steps: {ten['rows']:,} rows would bring "
        f"{ten['tokens_per_step']:.2f} tokens per step ({sure}), {gain:+.0%} over "
        f"{curve['rows'][-1]:,}"
    )
