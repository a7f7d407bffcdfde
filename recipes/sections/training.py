"""How training runs: its optimiser, its length, and what it saves and says on the way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import (
    Count,
    Draft,
    Few,
    Fraction,
    NonNegative,
    Positive,
    Rows,
    Section,
    Seed,
)
from specdraft.recipes.sections.target import Dtype

Tracker = Literal[  # accelerate's names, which are those of their packages
    "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab"
]


@dataclass(frozen=True, kw_only=True)
class OptimSection(Section):
    """An optimiser, with warm-up and a schedule of the learning rate, over all optimiser steps."""

    # muon: torch's, for the matrices of a drafter, AdamW for the rest (train/fit/optimizer.py).
    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 3.0e-5  # peak learning rate; by the target's width: recipes/own.yaml
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)  # of AdamW
    weight_decay: NonNegative = 0.0
    warmup: Fraction = 0.05  # share of all steps
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after warm-up
    clip_norm: Positive = 1.0

    def conflicts(self) -> Iterator[str]:
        """Yield a beta of 1, which would never forget the first gradient."""
        if max(self.betas) == 1:
            yield self.complaint("betas", "each must be below 1")


@dataclass(frozen=True, kw_only=True)
class TrainSection(Section):
    """The loop that every trainer runs. A step is one of the optimiser, over all ranks."""

    steps: Count | None = None  # optimiser steps; exactly one of steps and epochs
    epochs: Count | None = None
    batch_size: Rows = 16  # sequences per optimiser step, over all ranks
    accumulation: Rows = 1  # forwards per optimiser step
    # Tokens that a forward takes at most, padding included, or one row: each above is cut, by
    # length, into as many as that needs, and a long row pads no others. null: none is.
    forward_tokens: Count | None = None
    seed: Seed = 0
    precision: Dtype = "float32"  # of the head's forward; master weights are float32
    rollout: Draft = 1  # passes over the head's own features in training
    alignments: Literal["one", "all"] = "one"  # of a row's blocks at a step; one: drawn
    checkpointing: bool = False  # backward runs a student's layers, a head's passes again
    eval_every: Count | None = None  # steps between evaluations; null: none, the last one is kept
    save_every: Count | None = None  # steps between checkpoints; null: at the end only
    keep: Count = 2  # checkpoints kept
    log_every: Count = 10  # steps
    # What takes the figures beside log.jsonl (train/fit/trackers.py); []: nothing does.
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    max_minutes: Positive | None = None  # stop training after this time
    threads: Few | None = None  # of a CPU process; null: the cores, shared among the ranks

    def conflicts(self) -> Iterator[str]:
        """Yield two lengths of training, and a batch that cannot be cut into equal forwards."""
        if self.steps is not None and self.epochs is not None:
            yield self.complaint(("steps", "epochs"), "set exactly one, the other to null")
        if self.batch_size % self.accumulation:
            divided = f"must divide train.batch_size ({self.batch_size})"
            yield self.complaint("accumulation", divided)
