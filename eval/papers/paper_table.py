"""A table of a paper, made again here: what is run for it, what is read of it, what the paper has.

A table has rows and columns; a cell is one figure, of every seed. The runs of a seed come in
stages: first what trains, then what measures it. Tables share folders, so that two tables with the
same run make it once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specdraft.eval.papers.seeded import Job, over_seeds, run_all, told

WIDTH = 200  # enough for many columns: a figure that is cut off is none
COUNTS = ("identical", "near_ties", "outputs")
Paper = Mapping[str, Mapping[str, float]]  # figures by row and column; only what is at hand


@dataclass(frozen=True)
class Plan:
    """What a command line asks for: where runs lie, and what it overrides of them."""

    runs: Path
    overrides: tuple[str, ...] = ()
    recipe: str | None = None  # trained instead of the table's own


@dataclass(frozen=True)
class Row:
    """One row of one seed: its figures by column, and the runs of reports that they are of."""

    figures: Mapping[str, float | None]
    runs: Sequence[dict] = ()


class PaperTable(Protocol):
    """What a table says of itself; eval/papers/paper_tables.py has them all."""

    source: str  # where the paper has it
    recipe: str  # what is trained
    columns: Collection[str]
    paper: Paper

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The runs of a seed; those of a stage need the stages before, and not each other."""

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The rows of a seed by name, when its runs are done."""


def make(table: PaperTable, plan: Plan, seeds: Sequence[int], at_once: int) -> dict:
    """Run what is missing and return the table as it is written: means and standard errors.

    Raises: RecipeError for a run that fails, or that a folder has with other settings.
    """
    by_seed = [table.stages(plan, seed) for seed in seeds]
    for number, stage in enumerate(zip(*by_seed, strict=True), start=1):
        jobs = {job.folder: job for some in stage for job in some}
        run_all([*jobs.values()], at_once, f"stage {number} of {len(by_seed[0])}")
    found = [table.rows(plan, seed) for seed in seeds]
    return {
        "source": table.source,
        "recipe": plan.recipe or table.recipe,
        "overrides": list(plan.overrides),
        "seeds": list(seeds),
        "environment": by_seed[0][0][0].report()["environment"],
        "columns": list(table.columns),
        "rows": [
            {"row": name} | _over([rows[name] for rows in found], table.paper.get(name, {}))
            for name in found[0]
        ],
    }


def _over(rows: Sequence[Row], paper: Mapping[str, float]) -> dict:
    """One row over its seeds. A figure that a seed lacks is left out."""
    values = {column: [row.figures[column] for row in rows] for column in rows[0].figures}
    ours = {column: over_seeds(some) for column, some in values.items() if None not in some}
    runs = [run for row in rows for run in row.runs if run["identical"] is not None]
    counts = {key: sum(run[key] for run in runs) for key in COUNTS} if runs else {}
    return {"ours": ours, "paper": dict(paper)} | counts


def show(made: dict) -> None:
    """Print the rows: ours, and behind a bar the paper's where its column has any."""
    title = f"{made['source']}: ours | the paper's, {len(made['seeds'])} seeds"
    grid = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("", no_wrap=True)
    compared = {column for row in made["rows"] for column in row["paper"]}
    for column in made["columns"]:
        grid.add_column(column, justify="right")
    grid.add_column("identical", justify="right")
    for row in made["rows"]:
        cells = (_cell(row, column, column in compared) for column in made["columns"])
        same = f"{row['identical']}/{row['outputs']}" if "outputs" in row else "-"
        grid.add_row(row["row"], *cells, same)
    Console(width=WIDTH, soft_wrap=True).print(grid)


def _cell(row: dict, column: str, compared: bool) -> str:
    ours = told(row["ours"][column]) if column in row["ours"] else "-"
    if not compared:
        return ours
    paper = row["paper"].get(column)
    return f"{ours} | " + ("-" if paper is None else f"{paper:.2f}")
