"""A benchmark's report as a table, and acceptance by position (CS Drafting, Figures 1 and 3).

Nothing is run: `table.report` names the report.json of eval/bench.py or of a training run. Several
batch sizes or temperatures become columns, of tokens/s over plain decoding of the same rows.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.eval.papers.jobs import PLACES, ROOT
from specdraft.eval.papers.table import Plan, Row, Table, compact, written
from specdraft.eval.publishing.plots import acceptance_by_position
from specdraft.models.enlarged.target import ENLARGED
from specdraft.recipes.compare import differences
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.yaml_file import read_value

OPTIONS = {  # of eval/bench.py, where several are measured
    "--prompts": "prompt_set",
    "--batch-sizes": "batch_size",
    "--temperatures": "temperature",
}
VARIED = {"prompt_set": "{}", "temperature": "T = {:g}", "batch_size": "batch {}"}


@dataclass(frozen=True, kw_only=True)
class ReportTable(Table):
    """Methods as rows."""

    reads_recipe = False

    report: str = "runs/tiny/report.json"
    methods: tuple[str, ...] = ()  # none: all

    def make(self, plan: Plan, seeds: Sequence[int], at_once: int) -> dict:
        """Read the report. Raises: DataError for a file that is none, or a method it lacks."""
        report = read_report(Path(self.report))
        return self.kept(report | {"runs": chosen(report["runs"], self.methods)})

    def kept(self, report: dict) -> dict:
        """A report with overrides instead of the resolved recipe, without replays and nodes."""
        runs, name = report["runs"], report["recipe"].get("name")
        if contestants := report.get("contestants"):
            path, overrides = f"recipes/{contestants[0]['name']}.yaml", _common(report["recipe"])
        else:
            path = f"recipes/{name}.yaml"
            overrides = changes(report["recipe"], path)
        target = report.get("target") or name
        return {
            "source": f"{target}: {runs[0]['prompt_set']}, {runs[0]['outputs']} prompts",
            "command": shlex.join(command(report, path, overrides)),
            "recipe": path,
            "overrides": overrides,
            "seeds": [],
            "environment": report.get("environment"),
            **written(self.by_method(runs), {}),
            "runs": [compact(run) for run in runs],
        }

    def by_method(self, runs: Sequence[dict]) -> dict[str, Row]:
        """The figures of a method's run, or its speedup by what the runs differ in."""
        varied = [key for key in VARIED if len({run.get(key) for run in runs}) > 1]
        found: dict[str, Row] = {}
        for run in runs:
            column = ", ".join(VARIED[key].format(run[key]) for key in varied)
            wanted = {column: "speedup"} if varied else self.columns
            some = {title: run[key] for title, key in wanted.items() if run.get(key) is not None}
            cells = {title: {"mean": value} for title, value in some.items()}
            before = found.get(run["method"], Row({}))
            found[run["method"]] = Row(before.figures | cells, [*before.runs, run])
        return found

    def pictures(self, made: dict) -> dict[str, Any]:
        """Acceptance by position, where anything was drafted."""
        drafted = any(run.get("acceptance_by_depth") for run in made["runs"])
        return {"acceptance.png": acceptance_by_position(made["runs"])} if drafted else {}


def read_report(path: Path) -> dict:
    """Return a report; DataError for a file that is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report["runs"], list) or not isinstance(report["recipe"], dict):
            raise TypeError
        if not report["runs"] or not all({"method", *VARIED} <= {*run} for run in report["runs"]):
            raise KeyError
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


def command(report: dict, path: str, overrides: Sequence[str]) -> list[str]:
    """What made a report: a benchmark of a recipe, or a comparison of runs, which has none."""
    words = ["python", "eval/bench.py", path, *overrides]
    if contestants := report.get("contestants"):
        runs = (f"runs/{one['name']}" for one in contestants)
        words = ["python", "eval/compare.py", *runs, *overrides]
    for option, key in OPTIONS.items():
        values = list(dict.fromkeys(f"{run[key]}" for run in report["runs"]))
        words += [option, ",".join(values)] if len(values) > 1 else []
    _, enlarged, shape = (report.get("target") or "").rpartition(ENLARGED)
    return words + (["--shape", shape] if enlarged else [])


def _common(recipe: dict) -> list[str]:
    """Overrides of a comparison: settings that its runs may have had otherwise."""
    told = {"target": ("dtype",), "eval": ("batch_size", "limit", "repeats")}
    return [f"{name}.{key}={recipe[name][key]}" for name, keys in told.items() for key in keys]


def changes(recipe: dict, path: str) -> list[str]:
    """Overrides that make a resolved recipe of a recipe that comes with the package."""
    if not (ROOT / path).is_file():
        return []
    here = json.loads(json.dumps(load_recipe(ROOT / path).to_dict()))
    found = differences(recipe, here, PLACES)
    return [f"{key}={yaml_text(value)}" for key, (value, _) in found.items()]


def yaml_text(value: object) -> str:
    """A value as one would write it on a command line, without quotes where YAML needs none."""
    exact = json.dumps(value)
    bare = exact.replace('"', "").replace(", ", ",")
    return bare if read_value(bare) == value else exact
