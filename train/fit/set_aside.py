"""Several kinds of drafters in one run's folder: the files of the others' trainings are set aside.

Checkpoints, log and boards lie in `output.dir` itself, and are those of the kind that was trained
there last; those of another wait in its own folder, and come back when it is trained on.
"""

import shutil
from pathlib import Path

from specdraft.recipes.errors import UserError
from specdraft.recipes.load import from_dict
from specdraft.train.fit.checkpoint import complete_ones, read_state

LEFT = ("log.jsonl", "tensorboard", "checkpoints")  # the last one says whose the others are


def set_aside_others(out: Path, kind: str) -> None:
    """Put away what another kind's training left in `out`, and bring back what this one's had."""
    there = _trained_last(out)
    if there not in (None, kind):
        for name in LEFT:
            _move(out / name, out / there / name)
    if not complete_ones(out / "checkpoints") and complete_ones(out / kind / "checkpoints"):
        for name in LEFT:  # of another training, which ended before its first checkpoint
            _delete(out / name)
    for name in reversed(LEFT):
        _move(out / kind / name, out / name)


def _trained_last(out: Path) -> str | None:
    """The kind of the newest checkpoint; None where there is none that says so."""
    for checkpoint in complete_ones(out / "checkpoints"):
        try:
            return from_dict(read_state(checkpoint)["recipe"]).kind
        except UserError:
            continue
    return None


def _move(there: Path, here: Path) -> None:
    if there.exists() and not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        there.rename(here)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
