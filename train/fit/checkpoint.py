"""Checkpoints: complete or absent, and never continued by another recipe.

`checkpoints/step-N/` is written under a temporary name by every rank, fsynced and renamed; only a
renamed folder counts. It holds what accelerate saves (weights, optimiser, random states of every
rank; the engine's own files under DeepSpeed), `state.json`, and checksums of all that. The learning
rate, the glancing ratio and the order of the data are pure functions of the step, so the step is
their state. Files of plain processes are whole and serve any number of them; an engine's serve its
like only.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from specdraft.data import atomic
from specdraft.data.ranks import Ranks
from specdraft.models.weights.checksums import SUMS, check_sums, write_sums
from specdraft.recipes.errors import CacheError, HeadError, in_a_line
from specdraft.recipes.terminal import say
from specdraft.train.fit.continued import Launch, check_continued, measured_alike

STATE = "state.json"


@dataclass
class TrainState:
    """Where a run stands; everything about it that is not a tensor."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # of training so far, over all continuations
    evaluated: int = 0  # step of the last evaluation
    best: dict[str, float] = field(default_factory=dict)  # metrics of the best drafter
    # Of the log since its last line, over all ranks: the next line goes on with them.
    sums: dict[str, float | list] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, below `<out>/checkpoints`."""

    def __init__(
        self,
        out: Path,
        recipe: dict,
        rows: int,
        accelerator: Accelerator,
        keep: int,
        needed: int = 0,  # bytes that one takes at least; see `expected_bytes`
        data: str | None = None,  # what the rows hold, hashed; None: not known
    ):
        self.folder, self.needed, self.data = out / "checkpoints", needed, data
        self.recipe, self.rows, self.accelerator, self.keep = recipe, rows, accelerator, keep
        self.launch, self.ranks = Launch.of(accelerator), Ranks.of(accelerator)
        if self.launch.engine is None:
            accelerator.register_save_state_pre_hook(self._give_whole_weights)
            accelerator.register_load_state_pre_hook(self._take_whole_weights)

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of the prepared model and optimiser; called by every rank.

        Raises: CacheError, on every rank, when the disk is full; older checkpoints stay.
        """
        final = self.folder / f"step-{state.step}"
        writing = self.folder / f".writing-{state.step}"
        if self.ranks.is_first:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        self.ranks.wait()
        self._write(writing, final, lambda: self.accelerator.save_state(str(writing)))
        self._write(writing, final, lambda: self._complete(writing, state))
        if self.ranks.is_first:
            if final.exists():
                _retire(final)
            writing.rename(final)
            atomic.sync(self.folder)
            for old in _by_step(self.folder)[: -self.keep]:
                _retire(old)
            self._sweep()
        self.ranks.wait()

    def _write(self, writing: Path, final: Path, write: Callable[[], object]) -> None:
        """Have every rank write its part, and all give up where one of them finds no room."""
        full = False
        try:
            write()
        except Exception as error:
            if not atomic.is_full_disk(error):
                raise
            full = True
        if any(gather_object([full])):
            if self.ranks.is_first:
                shutil.rmtree(writing, ignore_errors=True)
            raise CacheError(self._shortfall(final))

    def _complete(self, writing: Path, state: TrainState) -> None:
        """Add to the files of all ranks what makes them a checkpoint."""
        if self.ranks.is_first:
            content = {"state": asdict(state), "recipe": self.recipe, "rows": self.rows}
            content["data"] = self.data
            (writing / STATE).write_text(json.dumps(content | asdict(self.launch), indent=1))
            write_sums(writing)
            atomic.sync_tree(writing)

    def _shortfall(self, final: Path) -> str:
        newest = self.newest()
        if newest is None:
            return f"{atomic.shortfall(final, self.needed or None)} from the start"
        needed = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        return f"{atomic.shortfall(final, needed)} from {newest.name}"

    def check_room(self) -> None:
        """Raise CacheError, on every rank, where the disk cannot hold another checkpoint: the steps
        until then would be lost."""
        lacking = None
        if self.ranks.is_first and self.needed > atomic.free_bytes(self.folder):
            lacking = atomic.shortfall(self.folder, self.needed)
        if lacking := self.ranks.share(lacking):
            raise CacheError(lacking)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        return next(iter(complete_ones(self.folder)), None)

    def resume(self) -> TrainState | None:
        """Load the newest checkpoint that is whole into the prepared objects; None when there is
        none at all.

        Its best drafter counts where this recipe measures as its own did. Raises RecipeError when
        it was made by a recipe that would have run differently, or by processes whose files these
        cannot read, and CacheError when all are damaged.
        """
        if self.ranks.is_first:
            self._take_back()
            self._sweep()
        newest = self.ranks.share(self._newest_whole() if self.ranks.is_first else None)
        if isinstance(newest, str):
            raise CacheError(newest)
        if newest is None:
            return None
        content = read_state(newest)
        check_continued(newest, content, self.recipe, self.rows, self.data)
        there = Launch(content["processes"], content.get("engine"))
        there.check_continued_by(self.launch, newest)
        self.accelerator.load_state(str(newest))
        # Micro-batches of the next step: what it counted were those of another train.accumulation
        # perhaps, and a rank that was not there has not counted at all.
        self.accelerator.step = 0
        state = TrainState(**content["state"])
        if not measured_alike(content["recipe"], self.recipe):
            state.best = {}
        return state

    def _newest_whole(self) -> Path | str | None:
        """The newest checkpoint that is whole; those above it are set aside, and that is said.

        What is wrong, where there are some and none is whole.
        """
        problem, damaged = None, []
        for checkpoint in complete_ones(self.folder):
            try:
                check_sums(checkpoint)
                read_state(checkpoint)
            except (HeadError, CacheError) as error:
                problem = f"{checkpoint} is damaged: {error}"
                damaged.append(checkpoint)
            else:
                break
        else:
            return problem and f"{problem}; no other is whole, delete {self.folder} to start over"
        for folder in damaged:
            aside = folder.with_name(f".damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        if problem:
            say(f"{problem}; going on from {checkpoint.name}")
        return checkpoint

    # Without DDP's wrapper, which is there or not with the number of processes.

    def _give_whole_weights(
        self, models: list[nn.Module], weights: list[dict[str, Tensor]], _: str
    ) -> None:
        weights[:] = [self.accelerator.unwrap_model(model).state_dict() for model in models]

    def _take_whole_weights(self, models: list[nn.Module], _: str) -> None:
        models[:] = [self.accelerator.unwrap_model(model) for model in models]

    def _take_back(self) -> None:
        """Give its name back to one that a kill has left retired, with nothing yet in its place."""
        newest = self.newest()
        for retired in self.folder.glob(".deleted-step-*"):
            final = retired.with_name(retired.name.removeprefix(".deleted-"))
            if newest is None or int(_step(newest)) < int(_step(final)):
                retired.rename(final)

    def _sweep(self) -> None:
        """Delete what is retired, and what a run that was killed was writing."""
        for name in (".writing-*", ".deleted-*"):
            for leftover in self.folder.glob(name):
                shutil.rmtree(leftover, ignore_errors=True)


def _retire(checkpoint: Path) -> None:
    """Rename one that is to be deleted: half of it must not be taken for a checkpoint."""
    checkpoint.rename(checkpoint.with_name(f".deleted-{checkpoint.name}"))


def expected_bytes(drafter: nn.Module) -> int:
    """About what a checkpoint takes: the weights, and AdamW's two moments of those trained."""
    return sum(one.nbytes * (1 + 2 * one.requires_grad) for one in drafter.parameters())


def complete_ones(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the newest first."""
    return [path for path in _by_step(folder) if (path / STATE).is_file()][::-1]


def _by_step(folder: Path) -> list[Path]:
    named = (path for path in folder.glob("step-*") if _step(path).isdecimal())
    return sorted(named, key=lambda path: int(_step(path)))


def check_run(out: Path, recipe: dict) -> None:
    """Raise RecipeError, before hours of caching, where the newest checkpoint of a run's folder
    was made by another recipe. What is damaged is `resume`'s affair."""
    for checkpoint in complete_ones(out / "checkpoints")[:1]:
        try:
            content = read_state(checkpoint)
        except CacheError:
            return
        check_continued(checkpoint, content, recipe)


def read_state(checkpoint: Path) -> dict:
    """Read a checkpoint's state.json; raises CacheError when it cannot be read."""
    try:
        content = json.loads((checkpoint / STATE).read_text())
        content["state"].pop("best_step", None)  # which earlier versions wrote
        TrainState(**content["state"])
        return content | {key: content[key] for key in ("recipe", "rows", "processes")}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CacheError(
            f"{checkpoint / STATE} cannot be read ({in_a_line(error)}); delete {checkpoint}"
        ) from error


def save_drafter(drafter, folder: Path) -> None:
    """Save a drafter so that `folder` holds the old one or the new one, never a mixture.

    A drafter's config never changes within a run, so replacing its files one by one, the weights
    last, is as good as replacing the folder, which no file system does in one step. Their checksums
    go first and come last.
    Raises: CacheError when the disk is full.
    """
    writing = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    needed = sum(weight.nbytes for weight in drafter.state_dict().values())
    with atomic.cleaned_up(writing, folder, needed):
        drafter.save_pretrained(writing)
        atomic.sync_tree(writing)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMS).unlink(missing_ok=True)
    for file in sorted(writing.iterdir(), key=_weights_last):
        file.replace(folder / file.name)
    atomic.sync(folder)
    writing.rmdir()


def _weights_last(file: Path) -> tuple[bool, bool]:
    return file.name == SUMS, file.suffix == ".safetensors"


def _step(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("step-")
