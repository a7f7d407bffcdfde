"""Training runs of a comparison: each a process of its own, and none is run twice."""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from specdraft.recipes.errors import RecipeError


@dataclass(frozen=True)
class Job:
    """One run: a script of this folder on a recipe with overrides, into a folder."""

    script: str
    recipe: str
    overrides: tuple[str, ...]
    folder: Path

    @property
    def command(self) -> list[str]:
        """What can be run by hand instead."""
        script = Path(__file__).with_name(self.script)
        overrides = [*self.overrides, "train.threads=1", f"output.dir={self.folder}"]
        return [sys.executable, str(script), self.recipe, *overrides]


def train_all(jobs: Sequence[Job], at_once: int, label: str) -> None:
    """Run the jobs whose folder has no report.json yet; RecipeError for the first that fails.

    The first one runs alone: it makes the caches that the others share.
    """
    missing = [job for job in jobs if not (job.folder / "report.json").is_file()]
    done = len(jobs) - len(missing)
    with tqdm(total=len(jobs), initial=done, desc=label, unit="run") as bar:
        for some, workers in ((missing[:1], 1), (missing[1:], at_once)):
            with ThreadPoolExecutor(workers) as pool:
                for _ in pool.map(_train, some):
                    bar.update()


def _train(job: Job) -> None:
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
