"""Learning rates and step counts as pure functions: they have no state to save or to resume."""

import math

from specdraft.recipes.schema import Recipe


def learning_rate(step: int, steps: int, lr: float, warmup: float, schedule: str) -> float:
    """Return the rate of optimiser step `step` (from 0) out of `steps`.

    It rises linearly over the first `warmup` share of the steps, then stays (`constant`), falls
    in a line or half a cosine to zero (`linear`, `cosine`).
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return lr * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    if schedule == "linear":
        return lr * (1.0 - done)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return lr


def total_steps(recipe: Recipe, rows: int) -> int:
    """Return the optimiser steps of a run over `rows` rows, from train.steps or train.epochs."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    return math.ceil(recipe.train.epochs * math.ceil(rows / recipe.train.batch_size))
