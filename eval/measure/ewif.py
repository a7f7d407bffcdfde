"""EWIF: what drafting is expected to gain, from acceptance by position and costs.

CS Drafting (arXiv 2312.11462), Theorem 4.1: with alpha_i the probability that the i-th drafted
token is accepted when those before it are, and c_i the cost of drafting it as a share of a target
forward, a draft of k tokens is expected to improve wall-clock by

    EWIF = sum_{i=0..k} prod_{j<=i} alpha_j / (1 + sum_i c_i)

over plain decoding: tokens of a step over its cost. SWI, the measured counterpart, is in
eval/measure/metrics.py. Here every position may have a drafter of its own: the horizontal cascade.

Shapes: k drafted positions, D drafters.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul


@dataclass(frozen=True)
class Proposer:
    """One drafter: how likely each of its tokens is accepted, and what one costs."""

    alpha: float
    cost: float  # of a drafted token, as a share of a target forward


def expected_tokens(alphas: Sequence[float]) -> float:
    """Tokens that a step emits on average, the bonus included."""
    return sum(accumulate(alphas, mul, initial=1.0))


def ewif(alphas: Sequence[float], cost: float) -> float:
    """Theorem 4.1 for acceptance `alphas` [k] by position and the whole cost of a draft."""
    return expected_tokens(alphas) / (1 + cost)


def of_assignment(drafters: Sequence[Proposer]) -> float:
    """EWIF of a draft whose position i is drafted by drafters[i]."""
    return ewif([one.alpha for one in drafters], sum(one.cost for one in drafters))


def of_mixture(drafters: Sequence[Proposer], shares: Sequence[Sequence[float]]) -> float:
    """EWIF of drawing each position's drafter at random with probabilities shares[i] [D]."""
    alphas = [sum(s * d.alpha for s, d in zip(row, drafters, strict=True)) for row in shares]
    costs = (sum(s * d.cost for s, d in zip(row, drafters, strict=True)) for row in shares)
    return ewif(alphas, sum(costs))


def best_assignment(drafters: Sequence[Proposer], length: int) -> tuple[Proposer, ...]:
    """The best deterministic assignment of drafters to `length` positions, by trying all D^k."""
    return max(product(drafters, repeat=length), key=of_assignment)


def mixtures(size: int, length: int, parts: int) -> Iterator[tuple[tuple[float, ...], ...]]:
    """Every way to draw `length` positions from `size` drafters with shares in 1 / parts."""
    grid = [
        tuple(share / parts for share in shares)
        for shares in product(range(parts + 1), repeat=size)
        if sum(shares) == parts
    ]
    return product(grid, repeat=length)


def mixing_gains(drafters: Sequence[Proposer], length: int, parts: int = 4) -> float:
    """How much the best mixture is better than the best assignment: never above 0 (Theorem 4.4).

    EWIF is a ratio of functions that are linear in each share, so it is largest at a corner.
    """
    best = of_assignment(best_assignment(drafters, length))
    mixed = (of_mixture(drafters, shares) for shares in mixtures(len(drafters), length, parts))
    return max(mixed) - best


def simulate(alphas: Sequence[float], cost: float, steps: int, seed: int = 0) -> float:
    """Tokens over cost of `steps` steps in which position i is accepted by a coin of alphas[i]."""
    chance, tokens = random.Random(seed), 0
    for _ in range(steps):
        refused = (n for n, alpha in enumerate(alphas) if chance.random() >= alpha)
        tokens += 1 + next(refused, len(alphas))
    return tokens / (steps * (1 + cost))
