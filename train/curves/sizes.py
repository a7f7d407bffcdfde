"""The trainings of a data curve: every kind of drafter on nested subsets, each its own process.

A subset is drawn from the recipe's data, anew for every seed (`data.shuffle_seed`): a file's first
rows may be of another kind than the rest, and no two subsets bring the same. A larger one of the
same seed holds the smaller ones. The largest takes the recipe's steps, and so do all with equal
steps; with growing steps all take as many epochs, and steps that grow with the root of the rows are
between: where rows are few, more epochs of fewer steps, as people train. At the largest size all
are one run.

The first sizes cost least, vary most from subset to subset, and are what a forecast is made of:
they may have more seeds than the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdraft.eval.methods.registry import find
from specdraft.eval.papers.jobs import Job
from specdraft.models.cards.log import LOG, records
from specdraft.models.kinds import overrides_of
from specdraft.recipes.schema import Recipe

BACK_TEST = 3  # the first sizes, which predict the largest
POWERS = {"equal": 0.0, "root": 0.5, "growing": 1.0}  # of the rows that steps grow with

# What measures a kind (models/kinds.py). Chains do: no tree is fitted to a head of a few rows.
METHODS = {
    "falcon": "falcon_chain",
    "eagle": "eagle_chain",
    "eagle3": "eagle3_chain",
    "medusa": "medusa_chain",
    "student": "ssd",
    "table": "maxgram",
}
# Nothing is chosen on the way, fitted or logged elsewhere: the last drafter is what its data gave.
PLAIN = ("train.eval_every=null", "train.save_every=null", "train.epochs=null", "train.trackers=[]")


@dataclass(frozen=True)
class Size:
    """One training: a point of a curve."""

    kind: str
    rows: int
    steps: int
    seed: int
    job: Job

    @property
    def minutes(self) -> float | None:
        """What the training took. A table, which is counted, keeps no log: None."""
        lines = records(self.job.folder / LOG, "train")
        return max((line["minutes"] for line in lines), default=None)

    @property
    def read(self) -> int | None:
        """Rows that the training read, counting again what it read again. A table, which is
        counted, takes no steps, but every row once: None."""
        if self.kind == "table":
            return None
        return self.steps * self.job.report()["recipe"]["train"]["batch_size"]


def plan_sizes(
    recipe: Recipe,
    source: str,  # the recipe's file, or what else names it
    kinds: Sequence[str],
    rows: Sequence[int],
    seeds: Sequence[int],
    overrides: Sequence[str],
    of_kind: Mapping[str, Sequence[str]],
    out: Path,
    regimes: Sequence[str] = tuple(POWERS),
    more_seeds: Sequence[int] = (),
) -> Iterator[tuple[str, Size]]:
    """Yield every training with its regime, smallest first; one of several regimes comes for each.

    overrides: for all; of_kind: for one kind, after what makes it; more_seeds: of the first sizes.
    """
    whole = recipe.train.steps
    for place, size in enumerate(sorted(rows)):
        drawn = dict.fromkeys((*seeds, *more_seeds) if place < BACK_TEST else seeds)
        for kind in kinds:
            for seed in drawn:
                for regime in regimes:
                    steps = max(1, round(whole * (size / max(rows)) ** POWERS[regime]))
                    job = _job(source, kind, size, steps, seed, (overrides, of_kind), out)
                    yield regime, Size(kind, size, steps, seed, job)


def _job(source: str, kind: str, rows: int, steps: int, seed: int, given: tuple, out: Path) -> Job:
    method, (overrides, of_kind) = METHODS[kind], given
    settings = (
        *overrides_of(kind, source, overrides),
        *PLAIN,
        *overrides,
        *of_kind.get(kind, ()),
        *(f"data.limit={rows}", f"data.shuffle_seed={seed}"),
        *(f"train.steps={steps}", f"train.seed={seed}"),
        *(f"eval.methods=[plain,{method}]", "eval.tree=tiny_k1"),
        f"data.cache_dir={out / 'cache'}",
    )
    folder = out / kind / f"{rows}-rows-{steps}-steps-seed{seed}"
    return Job(find(method).trainer, source, settings, folder)
