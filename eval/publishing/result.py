"""A made table in a file, a row per line, and on the console."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specdraft.data.atomic import write_atomic
from specdraft.eval.page.cells import NOTHING
from specdraft.recipes.terminal import Screen

WIDTH = 200  # enough for many columns: a figure that is cut off is none
DIGITS = 6  # significant ones of a kept figure


def write_result(made: dict, path: Path) -> None:
    """Write a made table, whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, one_row_per_line(made).encode())


def one_row_per_line(made: dict) -> str:
    """JSON in which every row and every run is one line."""
    lines = []
    for key, value in rounded(made).items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = ",\n  ".join(map(json.dumps, value)).join(("[\n  ", "\n ]"))
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def rounded(value: Any) -> Any:
    """Return JSON with fewer digits, and without what is null in its mappings."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def read_result(path: Path) -> dict:
    """Return a table that `write_result` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def cell_text(cell: dict, digits: int = 2) -> str:
    """Mean +- standard error, as it is printed."""
    error, text = cell.get("standard_error"), f"{cell['mean']:.{digits}f}"
    text += "" if error is None else f" +- {error:.{digits}f}"
    return text + (f" ({cell['shape']})" if "shape" in cell else "")


def grid_of(made: dict, columns: Sequence[str] = (), rows: Sequence[str] = ()) -> list[list[str]]:
    """The headings, then the rows: ours, and the paper's behind a column that it has."""
    columns = columns or made["columns"]
    chosen = [row_of(made, name) for name in rows] if rows else made["rows"]
    compared = {column for row in chosen for column in row["paper"]}
    agree = any("outputs" in row for row in chosen)
    titles = [part for c in columns for part in (c, *["the paper's"] * (c in compared))]
    grid = [["", *titles, *["identical"] * agree]]
    for row in chosen:
        line = [row["row"]]
        for column in columns:
            ours = row["ours"].get(column)
            line.append(cell_text(ours) if ours else NOTHING)
            line += [f"{row['paper'].get(column, NOTHING)}"] * (column in compared)
        same = f"{row['identical']}/{row['outputs']}" if "outputs" in row else NOTHING
        grid.append([*line, *[same] * agree])
    return grid


def row_of(made: dict, name: str) -> dict:
    """The row of a name; KeyError where there is none."""
    return {row["row"]: row for row in made["rows"]}[name]


def show(made: dict) -> None:
    """Print the table, then how its rows were tuned."""
    seeds = f", seeds {', '.join(map(str, made['seeds']))}" if made["seeds"] else ""
    titles, *lines = grid_of(made)
    table = Table(title=f"{made['source']}{seeds}", box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title else "left", no_wrap=not title)
    for line in lines:
        table.add_row(*line)
    console = Screen(width=WIDTH, soft_wrap=True)
    console.print(table)
    for row in made["rows"]:
        if "setting" in row:
            console.print(f"{row['row']}: {row['setting']}")
