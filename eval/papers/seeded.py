"""Runs of a comparison: each a process of its own, and none is made twice."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from specdraft.recipes.compare import differences
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe

ROOT = Path(__file__).parents[2]
PLACES = ("name", "output.dir", "data.cache_dir")  # say where, not what


@dataclass(frozen=True)
class Job:
    """One run: a script on a recipe with overrides, which ends with a report in a folder."""

    script: str  # from the root of the package: train/falcon.py
    recipe: str
    overrides: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()  # that are no overrides
    ends_with: str = "report.json"

    @property
    def settings(self) -> list[str]:
        """All overrides."""
        return [*self.overrides, "train.threads=1", f"output.dir={self.folder}"]

    @property
    def command(self) -> list[str]:
        """What can be run by hand instead."""
        script = str(ROOT / self.script)
        return [sys.executable, script, self.recipe, *self.settings, *self.options]

    @property
    def done(self) -> bool:
        """Whether its report is there. RecipeError where that is one of other settings."""
        if not (self.folder / self.ends_with).is_file():
            return False
        ours = json.loads(json.dumps(load_recipe(self.recipe, self.settings).to_dict()))
        if differing := differences(self.report()["recipe"], ours, PLACES):
            key, (there, here) = next(iter(differing.items()))
            raise RecipeError(
                f"{self.folder} is a run with {key} = {there}, not {here}: remove it, or give "
                "another folder (--runs)"
            )
        return True

    def report(self) -> dict:
        """What the run has written."""
        return json.loads((self.folder / self.ends_with).read_text())


def run_all(jobs: Sequence[Job], at_once: int, label: str) -> None:
    """Run the jobs that are not done; RecipeError for the first that fails.

    The first one runs alone: it makes the caches that the others share.
    """
    missing = [job for job in jobs if not job.done]
    done = len(jobs) - len(missing)
    with tqdm(total=len(jobs), initial=done, desc=label, unit="run") as bar:
        for some, workers in ((missing[:1], 1), (missing[1:], at_once)):
            with ThreadPoolExecutor(workers) as pool:
                for _ in pool.map(_run, some):
                    bar.update()


def _run(job: Job) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(job.command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RecipeError(f"{' '.join(job.command)} failed: {reason}")


def over_seeds(values: Sequence[float]) -> dict:
    """The values with their mean and, of two or more, its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.mean(values), "standard_error": error}


def told(figure: dict) -> str:
    """Mean +- standard error, as it is printed."""
    error = figure["standard_error"]
    return f"{figure['mean']:.2f}" + ("" if error is None else f" +- {error:.2f}")
