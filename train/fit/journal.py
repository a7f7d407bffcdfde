"""What a run says while it trains: log.jsonl, trackers, one bar with one status line."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Self

from tqdm import tqdm

from specdraft.data.atomic import stating_shortfall, write_atomic
from specdraft.models.cards.log import LOG
from specdraft.train.fit.checkpoint import TrainState
from specdraft.train.fit.trackers import Trackers


class StatusBar(tqdm):
    """A bar that leaves out the figures that a terminal has no room for: tqdm would cut one in the
    middle, which makes it another."""

    figures: tuple[str, ...] = ()  # what matters most comes first

    def __str__(self) -> str:
        shown = self.format_dict  # which renews ncols, too
        for count in range(len(self.figures), 0, -1):
            figures = {"postfix": " ".join(self.figures[:count]), "ncols": None}
            line = self.format_meter(**{**shown, **figures})
            if not shown["ncols"] or len(line) <= shown["ncols"]:
                return line
        return super().__str__()


class Journal:
    """Rank 0 writes and shows; on other ranks every method does nothing."""

    def __init__(self, out: Path, steps: int, state: TrainState, trackers: Trackers, is_main: bool):
        self.is_main, self.trackers = is_main, trackers
        self.values, self.best = {}, ""  # of the status line
        if is_main:
            out.mkdir(parents=True, exist_ok=True)
            forget_after(out / LOG, {"train": state.step, "eval": state.evaluated})
            self.file = (out / LOG).open("a", buffering=1)
            trackers.start(state.step)
        # Last: what fails above is told on a line of its own.
        self.bar = StatusBar(
            total=steps,
            initial=state.step,
            disable=not is_main,
            unit="step",
            desc="train",
            bar_format="{desc} {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}",
            # A file or a pipe keeps every redrawing of the bar: seldom is enough there.
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.is_main:
            self.file.close()
            self.trackers.finish()

    def advance(self) -> None:
        """Count one optimiser step."""
        self.bar.update()

    def log(self, kind: str, step: int, values: dict) -> None:
        """Write one record: a line of log.jsonl and a scalar per number, lists by their index."""
        if not self.is_main:
            return
        with stating_shortfall(Path(self.file.name)):
            self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        tagged = (_scalars(f"{kind}/{name}", value) for name, value in values.items())
        self.trackers.log(dict(chain.from_iterable(tagged)), step)

    def status(self, values: dict) -> None:
        """Renew the status line."""
        self.values = values
        accuracy = "/".join(f"{a:.2f}" for a in values["accuracy"]).replace("0.", ".")
        self.bar.figures = (
            f"{values['tokens_per_second'] / 1000:.1f}k tok/s{self.best}",
            f"loss {values['loss']:.3g}",
            f"acc {accuracy}",
            *(f"{n} {values[n]:.0%}" for n in ("glanced", "on_policy") if values.get(n)),
            f"lr {values['lr']:.1e}",
            f"wait {values['data_wait']:.0%}",
        )

    def evaluated(self, metrics: dict, best: dict) -> None:
        """Keep the newest evaluation in the status line."""
        if "tokens_per_step" in metrics:
            self.best = f" {metrics['tokens_per_step']:.2f} tok/step"
            if best.get("tokens_per_step", 0.0) > metrics["tokens_per_step"]:
                self.best += f" (best {best['tokens_per_step']:.2f})"
            if self.values:
                self.status(self.values)

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        if self.is_main:
            self.bar.write(text)


class StepTimer:
    """Where the time between two log lines went."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.started, self.waited, self.tokens = time.perf_counter(), 0.0, 0.0
        self.paused = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what is no training: evaluation, checkpoints."""
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began

    def report(self) -> dict[str, float]:
        """Return tokens per second of training, and the share of it spent waiting for data."""
        seconds = max(time.perf_counter() - self.started - self.paused, 1e-9)
        return {"tokens_per_second": self.tokens / seconds, "data_wait": self.waited / seconds}


def forget_after(log: Path, last: dict[str, int]) -> None:
    """Drop the lines of `log` beyond the last step of their kind: a resumed run writes them again.

    last: {"train", "eval"}; a checkpoint may be older than the evaluation of its own step.
    """
    if not log.is_file():
        return
    kept = []
    for line in log.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
            if record["step"] <= last[record["kind"]]:
                kept.append(line)
        except (ValueError, LookupError, TypeError):  # what a killed run was writing, or damaged
            continue
    write_atomic(log, b"".join(kept))


def _scalars(tag: str, value: object) -> list[tuple[str, float]]:
    if isinstance(value, list):
        return [s for n, item in enumerate(value) for s in _scalars(f"{tag}_{n}", item)]
    return [(tag, value)] if isinstance(value, int | float) else []
