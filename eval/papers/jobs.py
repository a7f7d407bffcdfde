"""Runs that a table needs: each a process of its own, and none is made twice."""

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from specdraft.eval.methods.registry import problems
from specdraft.eval.papers.processes import start
from specdraft.recipes.compare import differences
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.load import load_recipe

ROOT = Path(__file__).parents[2]
PLACES = ("name", "output.dir", "data.cache_dir")  # say where, not what
TABLE = "table."  # overrides that begin so are settings of a table, not of a recipe


@dataclass(frozen=True)
class Job:
    """One run: a script on a recipe with overrides, which ends with a report in a folder.

    `table` names one that eval/paper.py makes of what other runs have trained.
    """

    script: str  # from the root of the package: train/falcon.py
    recipe: str
    overrides: tuple[str, ...]
    folder: Path
    table: str = ""
    seeds: tuple[int, ...] = ()  # of a table that draws

    @property
    def settings(self) -> list[str]:
        """The overrides that its command has."""
        return [*self.overrides, "train.threads=1", f"output.dir={self.folder}"]

    @property
    def path(self) -> Path:
        """Where its report is when it is done."""
        return self.folder / ("table.json" if self.table else "report.json")

    @property
    def module(self) -> str:
        """Its script as a module, whose imports are those of the run."""
        return ".".join(("specdraft", *Path(self.script).with_suffix("").parts))

    @property
    def command(self) -> list[str]:
        """What can be run by hand instead."""
        start = [sys.executable, str(ROOT / self.script)]
        if not self.table:
            place = ["--out", str(self.folder)] if self.script == "eval/bench.py" else []
            return [*start, self.recipe, *self.settings, *place]
        options = ["--recipe", self.recipe, "--out", str(self.path)]
        options += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        return [*start, self.table, *self.settings, *options]

    @property
    def done(self) -> bool:
        """Whether its report is there. RecipeError where that is one of other settings."""
        if not self.path.is_file():
            return False
        report = self.report()
        there = report["recipe"]
        if self.table:
            there = resolved(report["recipe"], report["overrides"])
        if differing := differences(there, resolved(self.recipe, self.settings), PLACES):
            key, (old, new) = next(iter(differing.items()))
            raise RecipeError(
                f"{self.folder} is a run with {key} = {old}, not {new}: remove it, or give "
                "another folder (--runs; of a curve, --out)"
            )
        return True

    def report(self) -> dict:
        """What the run has written. Raises DataError for half of it, or for no report."""
        try:
            report = json.loads(self.path.read_text(encoding="utf-8"))
            report["recipe"]  # KeyError or TypeError: other JSON
            return report
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} is no report; delete it, and the same command makes it again"
            ) from error


def resolved(recipe: str, overrides: Sequence[str]) -> dict:
    """Return a recipe with overrides as JSON has it, settings of a table as one more section."""
    own = [override for override in overrides if override.startswith(TABLE)]
    tree = load_recipe(recipe, [each for each in overrides if each not in own], check=problems)
    table = dict(override.removeprefix(TABLE).split("=", 1) for override in own)
    return json.loads(json.dumps(tree.to_dict())) | {"table": table}


def run_all(jobs: Sequence[Job], at_once: int, label: str) -> None:
    """Run the jobs that are not done; RecipeError for the first that fails.

    Caches that they share are built by one of them, for which the others wait (data/lock.py).
    """
    missing = [job for job in jobs if not job.done]
    with (
        tqdm(total=len(jobs), initial=len(jobs) - len(missing), desc=label, unit="run") as bar,
        keeping(lambda: f"{bar.n} of {len(jobs)} runs are done, and each goes on where it was"),
    ):
        _run(missing, at_once, bar)


def _run(jobs: Sequence[Job], at_once: int, bar: tqdm) -> None:
    """Run jobs, so many at a time. None outlives this one: it is asked to stop, and saves."""
    waiting, running = deque(enumerate(jobs)), {}  # process -> its job, and what it says
    modules = sorted({job.module for job in jobs})
    with TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    number, job = waiting.popleft()
                    log = Path(folder) / str(number)
                    running[start(job.command[1:], modules, log)] = job, log
                for process in [one for one in running if one.exitcode is not None]:
                    _check(process.exitcode, *running.pop(process))
                    bar.update()
                time.sleep(0.1)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.join()


def _check(code: int, job: Job, log: Path) -> None:
    if code:
        reason = (log.read_text().strip().splitlines() or ["no reason given"])[-1]
        if code < 0:  # what it said last is no reason; of SIGKILL it is mostly want of memory
            reason = f"ended by {signal.Signals(-code).name}"
        raise RecipeError(f"{' '.join(job.command)} failed: {reason}")
