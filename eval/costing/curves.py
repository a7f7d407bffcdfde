"""Curves through what was measured: least squares of relative errors, no weight below zero.

Every figure of a grid counts the same, be it 1 or 1000 ms: rows of the system are divided by what
was measured. The weights are those of Lawson and Hanson's active set (Solving Least Squares
Problems, 1974, chapter 23).

Shapes: M points, N terms.
"""

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from specdraft.eval.pricing.cost import Curve, Terms

SPREAD = 2  # a knot is at least so many times the one before: what lies between them checks both


def fit(terms: Sequence[Terms], ms: Sequence[float]) -> Curve:
    """Fit the weights of terms, one set for each of the measured milliseconds."""
    names = [*terms[0]]
    target = torch.tensor(ms, dtype=torch.float64)
    system = torch.tensor([[own[name] for name in names] for own in terms], dtype=torch.float64)
    system /= target[:, None]
    weights = nonnegative(system)
    errors = (system @ weights - 1).abs().tolist()
    held_out = [
        float(system[n] @ nonnegative(torch.cat((system[:n], system[n + 1 :]))) - 1)
        for n in range(len(ms))
    ]
    return Curve(
        weights=dict(zip(names, weights.tolist(), strict=True)),
        points=len(ms),
        median_error=median(errors),
        worst_error=max(errors),
        median_held_out=median(map(abs, held_out)) if len(ms) > 1 else 0.0,
    )


def knots(tokens: Sequence[int]) -> tuple[int, ...]:
    """Where the slope of a curve over numbers of tokens may change: some that were measured, the
    largest left out, for behind it nothing is known of a slope.

    >>> knots([1, 2, 4, 8, 12, 16, 24, 32])
    (1, 2, 4, 8, 16)
    """
    chosen = [1]
    for count in sorted(tokens):
        if SPREAD * chosen[-1] <= count < max(tokens):
            chosen.append(count)
    return tuple(chosen)


def nonnegative(system: Tensor) -> Tensor:
    """Return the weights [N] >= 0 with which the columns of a system [M, N] come nearest to 1."""
    lengths = system.norm(dim=0)
    columns = system / lengths.where(lengths > 0, 1)  # of unit length: terms are up to 1e6
    wanted = columns.new_ones(len(columns))
    weights, free = columns.new_zeros(columns.shape[1]), torch.zeros(columns.shape[1]).bool()
    for _ in range(10 * len(free)):  # each round frees a weight; far fewer are needed
        gain = (columns.T @ (wanted - columns @ weights)).masked_fill(free, -torch.inf)
        best = gain.argmax()
        if gain[best] <= 1e-10 * len(columns) ** 0.5:
            break
        free[best] = True
        weights = _settle(columns, wanted, weights, free)
    return weights / lengths.where(lengths > 0, 1)


def _settle(columns: Tensor, wanted: Tensor, weights: Tensor, free: Tensor) -> Tensor:
    """Return the best of the free weights; those that would be negative are bound to zero, one
    after the other, and no longer free."""
    while True:
        best = torch.zeros_like(weights)
        if free.any():  # columns may be alike: a head's rounds, where each pass has one
            solved = torch.linalg.lstsq(columns[:, free], wanted[:, None], driver="gelsd")
            best[free] = solved.solution[:, 0]
        blocking = free & (best <= 0)
        if not blocking.any():
            return best
        steps = weights[blocking] / (weights[blocking] - best[blocking]).clamp(min=1e-300)
        weights = weights + steps.min() * (best - weights)
        # What reaches zero on the way stays there.
        bound = blocking.clone()
        bound[blocking] = steps <= steps.min()
        free &= ~bound
        weights = weights.where(free, 0)
