"""What one training run holds together, and the optimiser step it repeats.

Losses are sums and their count is the count of the whole optimiser step, over micro-batches and
ranks, so the same batch gives the same update however it is cut. Per step: plan every micro-batch
without gradient (the plan says which positions count), reduce the count once, then go through the
micro-batches again with gradient.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from specdraft.data.ranks import Ranks
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.find import RECIPE
from specdraft.recipes.interrupt import StopRequest
from specdraft.recipes.load import dump
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.accelerator import prepare
from specdraft.train.fit.batches import Batch, Key, Loader, Rows, SamplingPlan
from specdraft.train.fit.checkpoint import Checkpoints, TrainState, expected_bytes, save_drafter
from specdraft.train.fit.continued import SHARDING
from specdraft.train.fit.journal import Journal, StepTimer
from specdraft.train.fit.optimizer import make_optimizer
from specdraft.train.fit.schedules import learning_rate, total_steps
from specdraft.train.fit.trackers import Trackers

# Decodes prompts with the drafter at a step; its `tokens_per_step` chooses the one that is kept.
Evaluate = Callable[[nn.Module, int], dict[str, float]]
Sums = dict[str, Tensor]

STOP_TIME, STOP_ASKED = 1, 2


class Objective(Protocol):
    """What a kind of drafter has of its own in training; `fit` does the rest."""

    folder: str  # below output.dir: where the best drafter is kept
    copies: int  # that `collate` makes of every row

    def collate(self, rows: list[dict], keys: list[Key]) -> Batch:
        """Pad rows to one micro-batch; what is random in it comes from the rows' keys."""

    def plan(self, model: nn.Module, batch: Batch, progress: float) -> tuple[Any, Tensor]:
        """Decide, without gradient, what `loss` is to do, and which positions count (bool).

        progress: the share of the training that lies behind, 0..1.
        """

    def loss(self, model: nn.Module, batch: Batch, plan: Any, counted: Tensor) -> tuple:
        """Return the loss summed over the counted positions, and the sums the log is made of."""

    def report(self, sums: Sums) -> dict[str, float | list]:
        """Turn sums over steps, micro-batches and ranks into the ratios that are logged."""


class Run:
    """Everything that one call of `fit` holds together.

    Making one builds optimiser, loader and checkpoints, and loads the newest checkpoint.
    """

    def __init__(
        self,
        drafter: nn.Module,
        data: Rows,
        objective: Objective,
        recipe: Recipe,
        accelerator: Accelerator,
        evaluate: Evaluate | None,
        stop: StopRequest,
    ):
        self.objective, self.recipe, self.evaluate, self.stop = objective, recipe, evaluate, stop
        self.accelerator, self.ranks = accelerator, Ranks.of(accelerator)
        self.out, self.steps = Path(recipe.output.dir), total_steps(recipe, len(data))
        self.loader = self._loader(data)
        optimizer = make_optimizer(drafter, recipe.optim, accelerator.device)
        sharding = accelerator.distributed_type in SHARDING and self.ranks.is_first
        # Where the launcher shards the drafter: what its weights are gathered into.
        self.whole = copy.deepcopy(drafter) if sharding else None
        needed = expected_bytes(drafter)
        self.model, self.optimizer = prepare(accelerator, drafter, optimizer)
        self.drafter = accelerator.unwrap_model(self.model)
        self.checkpoints = Checkpoints(
            self.out,
            recipe.to_dict(),
            len(data),
            accelerator,
            recipe.train.keep,
            needed,
            data.key,
        )
        self._resume()
        if self.ranks.is_first:  # only now: another recipe's run keeps its own
            for folder in (self.out, self.out / objective.folder):
                dump(recipe, folder / RECIPE)
        if self.state.step < self.steps:
            self.checkpoints.check_room()

    def _loader(self, data: Rows) -> Loader:
        train = self.recipe.train
        return Loader(
            data,
            SamplingPlan(data.lengths, train.batch_size, train.seed),
            self.objective.collate,
            accumulation=train.accumulation,
            rank=self.ranks.rank,
            ranks=self.ranks.world,
            pin=self.accelerator.device.type == "cuda",
            forward_tokens=train.forward_tokens,
            copies=self.objective.copies,
        )

    def _resume(self) -> None:
        """Go on from the newest checkpoint, where there is one."""
        resumed = self.checkpoints.resume()
        self.state = resumed or TrainState()
        self.saved = resumed and replace(resumed)  # what the newest checkpoint says
        self.sums = self._restored(self.state.sums)  # of this rank since the last line of the log
        if self.state.step > self.steps:
            raise RecipeError(
                f"{self.checkpoints.newest()} lies beyond the {self.steps} steps of this recipe; "
                "raise train.steps or train.epochs, or give another output.dir"
            )

    def journal(self) -> Journal:
        """Open the journal where this run stands."""
        trackers = Trackers(self.accelerator, self.recipe)
        return Journal(self.out, self.steps, self.state, trackers, self.ranks.is_first)

    def timed_steps(self, start: int, stop: int, timer: StepTimer) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, timing the wait for them."""
        asked = time.perf_counter()
        for batches in self.loader.steps(start, stop):
            timer.waited += time.perf_counter() - asked
            yield batches
            asked = time.perf_counter()

    def step(self, batches: list[Batch], timer: StepTimer) -> tuple[dict[str, float], int]:
        """Take one optimiser step; return what the log says of it alone, and a reason to stop."""
        accelerator, device = self.accelerator, self.accelerator.device
        optim, number = self.recipe.optim, self.state.step
        rate = learning_rate(number, self.steps, optim.lr, optim.warmup, optim.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        progress = number / self.steps
        if len(batches) == 1:  # of several, one after the other: together they take its memory
            batches = [batches[0].to(device)]
        plans = [self.objective.plan(self.model, b.to(device), progress) for b in batches]
        count, tokens, asks, over = self._reduced(
            sum(counted.sum() for _, counted in plans),
            sum(batch.num_tokens for batch in batches),
            self.stop.asked,
            self.ranks.is_first and self.out_of_time(),
        )
        timer.tokens += tokens
        # DDP averages over ranks and accelerate over micro-batches; the loss wants neither.
        scale = accelerator.num_processes * len(batches) / max(count, 1.0)
        if self.recipe.train.forward_tokens is not None:  # as many as this step's rows need
            accelerator.gradient_accumulation_steps, accelerator.step = len(batches), 0
        for batch, (plan, counted) in zip(batches, plans, strict=True):
            with accelerator.accumulate(self.model):
                total, parts = self.objective.loss(self.model, batch.to(device), plan, counted)
                accelerator.backward(total * scale)
            self.sums = {name: self.sums.get(name, 0) + part for name, part in parts.items()}
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {"lr": rate, "grad_norm": norm}
        return values, STOP_ASKED if asks else STOP_TIME if over else 0

    def _reduced(self, *values: float | Tensor) -> list[float]:
        # Stop requests travel with the count: all ranks must agree on the step they stop at.
        device = self.accelerator.device
        packed = [torch.as_tensor(value, device=device).float() for value in values]
        return self.accelerator.reduce(torch.stack(packed), "sum").tolist()

    def _clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(
            self.model.parameters(), self.recipe.optim.clip_norm
        )
        norm = 0.0 if norm is None else float(norm)  # None: the engine does not tell
        if not math.isfinite(norm):
            raise RecipeError(
                f"the gradient's norm is {norm} at step {self.state.step}; "
                f"lower optim.lr (now {self.recipe.optim.lr:g}) or raise optim.warmup"
            )
        return norm

    def out_of_time(self) -> bool:
        """Whether train.max_minutes has passed, over all continuations of the run."""
        limit = self.recipe.train.max_minutes
        return limit is not None and self.state.seconds >= 60.0 * limit

    def log(self, journal: Journal, timer: StepTimer, values: dict[str, float]) -> None:
        """Reduce the sums since the last line over all ranks and write them as ratios."""
        values |= self.objective.report(self.accelerator.reduce(self.sums, "sum"))
        self.sums = {}
        values |= timer.report() | {"minutes": self.state.seconds / 60.0}
        journal.log("train", self.state.step, values)
        journal.status(values)
        timer.reset()

    def evaluate_if(self, due: bool, journal: Journal) -> None:
        """Evaluate on rank 0 if it is due and not done; keep the drafter if it is the best yet.

        Raises: KeyboardInterrupt, after saving, where it was cut off.
        """
        state = self.state
        if not due or self.evaluate is None or state.evaluated == state.step:
            return
        drafter, metrics = self.whole_drafter(), None
        if self.ranks.is_first:
            with suppress(KeyboardInterrupt), self.stop.cut():
                metrics = self.evaluate(drafter.eval(), state.step)
            drafter.train()
        metrics = self.ranks.share(metrics)
        if metrics is None:
            self.save_and_stop()
        state.evaluated = state.step
        if metrics["tokens_per_step"] > state.best.get("tokens_per_step", 0.0):
            state.best = metrics
            if self.ranks.is_first:
                save_drafter(drafter, self.out / self.objective.folder)
        journal.log("eval", state.step, metrics)
        journal.evaluated(metrics, state.best)
        self.ranks.wait()

    def whole_drafter(self) -> nn.Module:
        """Return the drafter unwrapped, gathered to rank 0 where the launcher shards it."""
        if self.accelerator.distributed_type not in SHARDING:
            return self.drafter
        weights = self.accelerator.get_state_dict(self.model)  # collective
        if self.whole is None:
            return self.drafter
        self.whole.load_state_dict(weights)
        return self.whole.to(self.accelerator.device)

    def finish(self, journal: Journal) -> None:
        """Evaluate the last drafter, and leave a checkpoint and the drafter's folder behind."""
        self._save_once()  # no step is lost where what follows finds no room
        self.evaluate_if(True, journal)
        if self.evaluate is None:
            drafter = self.whole_drafter()
            if self.ranks.is_first:
                save_drafter(drafter, self.out / self.objective.folder)
        self._save_once()
        if self.stop.asked:  # of what comes behind training, nothing has begun
            raise KeyboardInterrupt(f"trained to step {self.state.step}")

    def save(self) -> None:
        """Write a checkpoint."""
        sums = self.accelerator.reduce(self.sums, "sum")
        self.state.sums = {name: part.tolist() for name, part in sums.items()}
        with self.stop.saving():
            self.checkpoints.save(self.state)
        self.saved = replace(self.state)

    def save_and_stop(self) -> NoReturn:
        """End as who was told to stop. Raises: KeyboardInterrupt."""
        self._save_once()
        raise KeyboardInterrupt(f"stopped at step {self.state.step}")

    def _save_once(self) -> None:
        if self.saved != self.state:  # of the same step, too, where it was evaluated since
            self.save()

    def _restored(self, sums: dict[str, float | list]) -> Sums:
        """The sums of all ranks in a checkpoint, which the first one goes on with."""
        device, share = self.accelerator.device, int(self.ranks.is_first)
        return {name: torch.tensor(part, device=device) * share for name, part in sums.items()}
