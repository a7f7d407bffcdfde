"""The runs of a report side by side, on a terminal."""

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specdraft.eval.measure.show import print_sample
from specdraft.eval.page.cells import (
    failure_counts,
    failure_reasons,
    figure,
    identical_outputs,
)
from specdraft.recipes.terminal import Screen

WIDEST = 400  # columns of a printed table
# What a narrow terminal goes without, in turn: report.html has it.
SPARED = (
    {"draft_ms_per_step", "verify_ms_per_step", "overhead_ms_per_step"},
    {"drafted_per_step"},
    {"speedup_over_generate"},
    {"acceptance_rate"},
)
COLUMNS = {  # heading: key of a run, digits
    "tokens\n/step": ("tokens_per_step", 2),
    "accept\nrate": ("acceptance_rate", 2),
    "nodes\n/step": ("drafted_per_step", 1),
    "tokens\n/s": ("tokens_per_second", 0),
    "x\nplain": ("speedup", 2),
    "x gen-\nerate": ("speedup_over_generate", 2),
    "draft\nms": ("draft_ms_per_step", 2),
    "verify\nms": ("verify_ms_per_step", 2),
    "rest\nms": ("overhead_ms_per_step", 2),
}


def print_report(report: dict, console: Screen | None = None) -> None:
    """Show the runs of a report side by side, and its sample answers."""
    runs, console = report["runs"], console or Screen()
    troubled = [run for run in runs if run["failures"]]
    console.print(_title(runs[0], other_target(report)), highlight=False)
    for count in range(len(SPARED) + 1):
        table = _table(runs, set().union(*SPARED[:count]), bool(troubled))
        if width_of(table, console) <= console.width:
            break
    print_whole(table, console)
    for run in runs:
        if tree := run.get("tree"):
            console.print(f"{run['method']}: {tree}")
    if protocol := runs[0].get("protocol"):
        departures = dict.fromkeys(one for run in runs for one in run["departures"])
        console.print(f"published figures are of {protocol}")
        console.print(Text(f"these depart: {'; '.join(departures) or 'nowhere'}", "yellow"))
    for run in troubled:
        console.print(Text(f"{run['method']}: {failure_reasons(run)}", "red"))
    for answer in report["samples"]:
        print_sample(answer, console)


def width_of(table: Table, console: Screen) -> int:
    """How many columns of a terminal a table takes at most."""
    return console.measure(table, options=console.options.update_width(WIDEST)).maximum


def print_whole(table: Table, console: Screen) -> None:
    """Print a table with all of its columns. One that does not fit would be left out: lines of a
    narrow terminal wrap instead."""
    console.width = max(console.width, width_of(table, console))
    console.print(table)


def _table(runs: Sequence[dict], spared: Collection[str], troubled: bool) -> Table:
    """A row per run, without some columns; the last one says what went wrong, if anything did."""
    columns = {name: column for name, column in COLUMNS.items() if column[0] not in spared}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in (*columns, "iden-\ntical", *["trouble"] * troubled):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        cells = (_figure(run, key, digits) for key, digits in columns.values())
        trouble = [failure_counts(run)] * troubled
        table.add_row(run["method"], *cells, identical_outputs(run), *trouble)
    return table


def other_target(report: dict) -> str | None:
    """The name of the target, where it is not the recipe's own."""
    own = report.get("recipe", {}).get("target", {}).get("model")
    return name if (name := report.get("target", own)) != own else None


def _title(run: dict, target: str | None) -> str:
    return (
        f"{run['prompt_set']}: {run['outputs'] + run['failed']} outputs of up to "
        f"{run['max_new_tokens']} new tokens, temperature {run['temperature']}, batch "
        f"{run['batch_size']}, {run['dtype']}{f', {target}' if target else ''}"
    )


def print_curves(runs: Sequence[dict]) -> None:
    """Show tokens/s over plain decoding of the same rows, by batch size (EMS-SD, Table 2)."""
    sizes = sorted({run["batch_size"] for run in runs})
    if len(sizes) < 2:
        return
    settings: dict[str, dict[str, dict[int, dict]]] = {}
    for run in runs:
        setting = f"{run['prompt_set']}, temperature {run['temperature']}"
        methods = settings.setdefault(setting, {})
        methods.setdefault(run["method"], {})[run["batch_size"]] = run
    console = Screen()
    for setting, methods in settings.items():
        console.print(f"x plain decoding, by batch size: {setting}")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for size in sizes:
            table.add_column(str(size), justify="right")
        for name, by_size in methods.items():
            table.add_row(name, *(figure(by_size.get(size, {}).get("speedup")) for size in sizes))
        print_whole(table, console)


def _figure(run: dict, key: str, digits: int) -> str:
    """A figure of a run; of speed with repeats, the slowest and the fastest of them, too."""
    repeats = run.get("tokens_per_second_repeats") if key == "tokens_per_second" else None
    return figure(run.get(key), digits) + (
        f" ({min(repeats):.0f}-{max(repeats):.0f})" if repeats else ""
    )
