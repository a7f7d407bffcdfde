"""A benchmark's report as a table, and acceptance by position (CS Drafting, Figures 1 and 3).

Nothing is run: `table.report` names the report.json of eval/bench.py or of a training run. Several
batch sizes or temperatures become columns, of tokens/s over plain decoding of the same rows.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from specdraft.eval.papers.jobs import PLACES, ROOT
from specdraft.eval.papers.plots import acceptance_by_position
from specdraft.eval.papers.table import Plan, Row, Table, compact, written
from specdraft.recipes.compare import differences
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.yaml_file import read_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "tokens/step": "tokens_per_step",
    "acceptance": "acceptance_rate",
    "nodes/step": "drafted_per_step",
    "x plain": "speedup",
    "x generate": "speedup_over_generate",
    "draft ms": "draft_ms_per_step",
    "verify ms": "verify_ms_per_step",
    "rest ms": "overhead_ms_per_step",
}
VARIED = {"prompt_set": "{}", "temperature": "T = {:g}", "batch_size": "batch {}"}


@dataclass(frozen=True, kw_only=True)
class ReportTable(Table):
    """Methods as rows."""

    name, source = "report", "a benchmark's report, with acceptance by position"
    seeds: ClassVar[tuple[int, ...]] = ()
    report: str = "runs/tiny/report.json"
    methods: tuple[str, ...] = ()  # none: all

    def make(self, plan: Plan, seeds: Sequence[int], at_once: int) -> dict:
        """Read the report. Raises: DataError for a file that is none, or a method it lacks."""
        report = read_report(Path(self.report))
        return keep(report | {"runs": chosen(report["runs"], self.methods)})

    def pictures(self, made: dict) -> "dict[str, Figure]":
        """Acceptance by position, where anything was drafted."""
        drafted = any(run.get("acceptance_by_depth") for run in made["runs"])
        return {"acceptance.png": acceptance_by_position(made["runs"])} if drafted else {}


def read_report(path: Path) -> dict:
    """Return a report; DataError for a file that is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report["runs"], list) or not isinstance(report["recipe"], dict):
            raise TypeError
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a report.json") from None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path}: no report; eval/bench.py writes report.json") from None
    return report


def chosen(runs: list[dict], methods: Sequence[str]) -> list[dict]:
    """Return the runs of the named methods; DataError for a method that is not there."""
    known = list(dict.fromkeys(run["method"] for run in runs))
    for name in methods:
        if name not in known:
            raise DataError(f"table.methods: no run of {name!r}; there are {', '.join(known)}")
    return [run for run in runs if not methods or run["method"] in methods]


def keep(report: dict) -> dict:
    """A report as it is kept: overrides instead of the resolved recipe, no replays, no nodes."""
    runs, name = report["runs"], report["recipe"].get("name")
    path, overrides = f"recipes/{name}.yaml", []
    if (ROOT / path).is_file():
        here = json.loads(json.dumps(load_recipe(ROOT / path).to_dict()))
        changed = differences(report["recipe"], here, PLACES).items()
        overrides = [f"{key}={yaml_text(value)}" for key, (value, _) in changed]
    sizes = list(dict.fromkeys(str(run["batch_size"]) for run in runs))
    words = ["python", "eval/bench.py", path, *overrides]
    words += ["--batch-sizes", ",".join(sizes)] if len(sizes) > 1 else []
    return {
        "source": f"{name}: {runs[0]['prompt_set']}, {runs[0]['outputs']} prompts",
        "command": shlex.join(words),
        "recipe": path,
        "overrides": overrides,
        "seeds": [],
        "environment": report.get("environment"),
        **written(rows_of(runs), {}),
        "runs": [compact(run) for run in runs],
    }


def yaml_text(value: object) -> str:
    """A value as one would write it on a command line, without quotes where YAML needs none."""
    exact = json.dumps(value)
    bare = exact.replace('"', "").replace(", ", ",")
    return bare if read_value(bare) == value else exact


def rows_of(runs: Sequence[dict]) -> dict[str, Row]:
    """By method: the figures of its run, or its speedup by what the runs differ in."""
    varied = [key for key in VARIED if len({run.get(key) for run in runs}) > 1]
    figures: dict[str, dict] = {}
    measured: dict[str, list[dict]] = {}
    for run in runs:
        column = ", ".join(VARIED[key].format(run[key]) for key in varied)
        wanted = {column: "speedup"} if varied else COLUMNS
        some = {title: run[key] for title, key in wanted.items() if run.get(key) is not None}
        cells = {title: {"mean": value} for title, value in some.items()}
        figures.setdefault(run["method"], {}).update(cells)
        measured.setdefault(run["method"], []).append(run)
    return {method: Row(cells, measured[method]) for method, cells in figures.items()}
