"""The one training loop: `fit`.

Runs under plain processes, DDP, DeepSpeed and FSDP by launch config alone. Every step is a pure
function of the recipe, the data and its number, so a run that is cut off goes on bit for bit (on
CPU) from its newest checkpoint.
"""

import time

from accelerate import Accelerator
from torch import nn

from specdraft.recipes.interrupt import StopRequest
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.batches import Rows
from specdraft.train.fit.checkpoint import TrainState
from specdraft.train.fit.journal import StepTimer
from specdraft.train.fit.run import STOP_ASKED, STOP_TIME, Evaluate, Objective, Run


def fit(
    drafter: nn.Module,
    data: Rows,
    objective: Objective,
    recipe: Recipe,
    accelerator: Accelerator,
    evaluate: Evaluate | None = None,
) -> TrainState:
    """Train `drafter` on `data`, from the newest checkpoint in `recipe.output.dir` if there is one.

    data: rows {"input_ids" [T], "loss_mask" [T], ..} as the objective's `collate` reads them, and
    `lengths`. Leaves checkpoints/, log.jsonl, what its trackers write, and `objective.folder`: the
    drafter with the most tokens per step by `evaluate`, or the last one. Raises KeyboardInterrupt,
    after saving, on Ctrl-C or SIGTERM; RecipeError when a checkpoint belongs to another recipe, a
    tracker does not start, or the gradient is no number any more.
    """
    stop = StopRequest(saves=True)
    run = Run(drafter, data, objective, recipe, accelerator, evaluate, stop)
    train, state = recipe.train, run.state
    with stop, run.journal() as journal:
        if state.step:
            journal.say(f"resumed at step {state.step} of {run.steps}")
            run.evaluate_if(_due(train.eval_every, state.step), journal)
        timer, began = StepTimer(), time.perf_counter() - state.seconds
        last = state.step if run.out_of_time() else run.steps
        for batches in run.timed_steps(state.step, last, timer):
            values, stopping = run.step(batches, timer)
            state.step, state.seconds = state.step + 1, time.perf_counter() - began
            journal.advance()
            if state.step % train.log_every == 0 or state.step == run.steps:
                run.log(journal, timer, values)
            if stopping == STOP_ASKED:
                run.save_and_stop()
            with timer.pause():  # neither is training
                run.evaluate_if(_due(train.eval_every, state.step), journal)
                if _due(train.save_every, state.step):
                    run.save()
            if stopping == STOP_TIME:
                journal.say(f"stopped at step {state.step}: train.max_minutes is over")
                break
        run.finish(journal)
    return state


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
