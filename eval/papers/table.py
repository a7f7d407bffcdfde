"""A table of a paper, made again here: what is run for it, what is read of it, what the paper has.

A table has rows and columns; a cell is one figure with its error, beside the paper's where that is
known. The runs of a seed come in stages: first what trains, then what measures it. Tables share
folders, so that two tables with the same run make it once. tables.yaml describes each; what a user
may change are the fields that its kind adds: `table.taus=[0,1]`.
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from specdraft.eval.methods.registry import problems
from specdraft.eval.papers.jobs import TABLE, Job, run_all
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import InvalidRecipeError, Section
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.yaml_file import explain, read_mapping, read_value

COUNTS = ("identical", "near_ties", "outputs")


@cache
def described() -> dict[str, dict]:
    """What tables.yaml says of every table, by name."""
    return read_mapping(Path(__file__).with_name("tables.yaml"))


@dataclass(frozen=True)
class Plan:
    """What a command line asks for: where runs lie, and what it overrides of them."""

    runs: Path
    overrides: tuple[str, ...] = ()
    recipe: str | None = None  # instead of the table's own
    settings: tuple[str, ...] = ()  # of the table: table.key=value


@dataclass(frozen=True)
class Row:
    """One row: figures or cells by column, the runs of reports they are of, how it was tuned."""

    figures: Mapping[str, float | dict | None]
    runs: Sequence[dict] = ()
    setting: str = ""


@dataclass(frozen=True)
class Found:
    """The rows of a table with a cell for every figure, and what was measured for them."""

    rows: Mapping[str, Row]
    environment: dict | None = None  # of what was measured; None: of the first run
    runs: Sequence[dict] = ()  # measured in this process


@dataclass(frozen=True, kw_only=True)
class Table(Section):
    """What tables.yaml says of a table. The fields that a kind of table adds are the user's."""

    reads_recipe = True  # else nothing is trained or measured by one
    name: str
    source: str  # where the paper has it
    recipe: str = "recipes/tiny.yaml"  # what is trained or measured
    inner: str = ""  # the table that is made with the drafters of every seed
    seeds: tuple[int, ...] = (0, 1, 2)  # unless others are asked for; none: not drawn
    overrides: tuple[str, ...] = ()  # of every run, before the user's
    columns: dict[str, str] = field(default_factory=dict)  # titles, and the figures of a run
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)  # what rows differ in
    paper: dict[str, dict[str, float]] = field(default_factory=dict)  # by row and column

    @property
    def prefix(self) -> str:
        return TABLE

    def settings(self) -> dict[str, Any]:
        """What a user may set of it."""
        own = [item.name for item in fields(self) if item not in fields(Table)]
        return {name: getattr(self, name) for name in own}

    def job(self, plan: Plan, script: str, folder: str, *overrides: str) -> Job:
        """A run of the table's recipe."""
        given = (*self.overrides, *plan.overrides, *overrides)
        return Job(script, plan.recipe or self.recipe, given, plan.runs / folder)

    def row(self, run: dict) -> Row:
        """The columns' figures of a run."""
        return Row({title: run[key] for title, key in self.columns.items()}, [run])

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The runs of a seed; those of a stage need the stages before, and not each other."""
        return []

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """All rows, when the runs of all seeds are done."""
        raise NotImplementedError

    def pictures(self, made: dict) -> dict[str, Any]:
        """matplotlib figures of the made table by the names of their files."""
        return {}

    def loaded(self, plan: Plan, *overrides: str) -> Recipe:
        """The recipe that is measured in this process."""
        given = [*self.overrides, *plan.overrides, *overrides]
        return load_recipe(plan.recipe or self.recipe, given, check=problems)

    def make(self, plan: Plan, seeds: Sequence[int], at_once: int) -> dict:
        """Run what is missing and return the table as it is written.

        Raises: RecipeError for a run that fails, or that a folder has with other settings.
        """
        stages = [*zip(*(self.stages(plan, seed) for seed in seeds), strict=True)]
        done: dict[Path, Job] = {}
        for number, stage in enumerate(stages, start=1):
            jobs = {job.folder: job for some in stage for job in some}
            run_all([*jobs.values()], at_once, f"stage {number} of {len(stages)}")
            done |= jobs
        found = self.find(plan, seeds)
        first = next(iter(done.values()), None)
        overrides = [*plan.settings, *plan.overrides]
        words = ["python", "eval/paper.py", self.name, *overrides]
        words += ["--recipe", plan.recipe] if plan.recipe else []
        words += ["--seeds", ",".join(map(str, seeds))] if tuple(seeds) != self.seeds else []
        return {
            "source": self.source,
            "command": shlex.join(words),
            "recipe": plan.recipe or self.recipe,
            "overrides": overrides,
            "seeds": list(seeds),
            "environment": found.environment or (first and first.report()["environment"]),
            **written(found.rows, self.paper),
            "runs": [compact(run) for run in found.runs],
        }


@dataclass(frozen=True, kw_only=True)
class SeededTable(Table):
    """A table whose cells are means over seeds, each of which trains or draws by itself."""

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The rows of one seed, with a plain number or nothing for every figure."""
        raise NotImplementedError

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Means and standard errors. A figure that a seed lacks is left out."""
        by_seed = [self.rows(plan, seed) for seed in seeds]
        return Found({name: _over([rows[name] for rows in by_seed]) for name in by_seed[0]})


def _over(rows: Sequence[Row]) -> Row:
    values = {column: [row.figures.get(column) for row in rows] for column in rows[0].figures}
    cells = {column: over_seeds(some) for column, some in values.items() if None not in some}
    return Row(cells, [run for row in rows for run in row.runs])


def over_seeds(values: Sequence[float]) -> dict:
    """Return a cell: the values with their mean and, of two or more, its standard error."""
    return {"values": list(values), **mean_of(values)}


def mean_of(values: Sequence[float]) -> dict:
    """Return a cell: the mean of values and, of two or more, its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error}


def written(rows: Mapping[str, Row], paper: Mapping[str, dict]) -> dict:
    """The columns, and the rows as they stand in a file."""
    columns = dict.fromkeys(column for row in rows.values() for column in row.figures)
    made = []
    for name, row in rows.items():
        entry = {"row": name, "ours": dict(row.figures), "paper": dict(paper.get(name, {}))}
        runs = [run for run in row.runs if run.get("identical") is not None]
        counts = {key: sum(run[key] for run in runs) for key in COUNTS} if runs else {}
        made.append(entry | counts | ({"setting": row.setting} if row.setting else {}))
    return {"columns": list(columns), "rows": made}


def compact(run: dict) -> dict:
    """A run of a report without what is empty, replays, nodes and categories."""
    left_out = ("acceptance_by_node", "categories", "differences", "failures", "setting")
    return {key: v for key, v in run.items() if v not in (None, [], {}) and key not in left_out}


def with_settings(table: Table, settings: Sequence[str]) -> Table:
    """Return a table with `table.key=value` applied; RecipeError for a key or value it lacks."""
    changed = {}
    for setting in settings:
        key, _, text = setting.removeprefix(TABLE).partition("=")
        if key not in (known := table.settings()):
            has = f"it has {', '.join(known) or 'none'}"
            raise RecipeError(f"{TABLE}{key}: no setting of the table {table.name}; {has}")
        try:
            changed[key] = read_value(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"{setting}: {explain(error)}") from None
    try:
        return replace(table, **changed)
    except InvalidRecipeError as error:
        raise InvalidRecipeError(error.problems, table.name) from None
