"""Curves that saturate: tokens per step by training rows, and how sure they are.

What falls as a power of the data is an error (Hestness et al. 2017, arXiv 1712.00409), down to a
floor that no data lower, and from an onset on: with less data than that there is little but chance.
Here it is the chance that a drafted token is rejected once it is reached. A chain's first token has
a curve of its own; those behind it, which only texts that are easy to draft for reach, and whose
errors fall for longer, share another:

    error(n) = floor + gap * (onset + n)^(-slope),        0 <= floor, 0 <= gap, 0 < slope <= 2
    tau = 1 + a_1 (1 + a + a^2 + .. + a^(depth - 1)),        a_1 = 1 - error_1(n), a = 1 - error(n)

A few sizes leave open how much of an error is floor, and whether the onset is past, so no single
fit is believed: every triple of floor, slope and onset on a grid, with its best gap, is weighted by
how likely it makes what was measured, and what is foretold is the median of what they say, its
interval their middle 90%. Before, all floors and onsets are equally likely, and a slope as likely
from one value to twice as much as to half; noise is Gaussian, in proportion to the error, of the
spread that the best fit leaves, and of tokens that are reached by few steps as much larger in
variance. Both curves go wrong together: the interval of tau is that of chains whose errors are at
the same quantile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

FLOORS = np.linspace(0.0, 0.98, 50)
SLOPES = np.geomspace(0.02, 2.0, 50)  # most that were found are 0.07 to 0.35 (the same paper)
ONSETS = np.array([0.0, 0.1, 0.3, 1.0])  # over the largest size
PARAMETERS = 4
LEAST_SPREAD = 0.05  # over an error: no training follows a power law more closely
LEAST_ERROR = 0.01  # whose noise is that of none


@dataclass(frozen=True)
class ErrorCurve:
    """The chance that a token is rejected, by rows of training, as far as it is known."""

    floors: np.ndarray  # [curves]
    gaps: np.ndarray  # [curves]
    slopes: np.ndarray  # [curves]
    onsets: np.ndarray  # [curves]
    weights: np.ndarray  # [curves], sum 1

    def __call__(self, rows: float, share: float = 0.5) -> float:
        """Return the chance with so many rows: the median, or another quantile."""
        falling = (self.onsets + rows) ** -self.slopes
        errors = np.clip(self.floors + self.gaps * falling, 0.0, 1.0)
        order = np.argsort(errors)
        behind = np.cumsum(self.weights[order]) >= share
        return float(errors[order][int(behind.argmax())])

    @property
    def likeliest(self) -> dict[str, float]:
        """Return the curve that fits best: its floor, gap, slope and onset."""
        best = int(self.weights.argmax())
        values = self.floors, self.gaps, self.slopes, self.onsets
        names = "floor", "gap", "slope", "onset"
        return {name: float(each[best]) for name, each in zip(names, values, strict=True)}


@dataclass(frozen=True)
class Saturation:
    """What chains of a depth bring with so much data."""

    first: ErrorCurve  # of their first token
    later: ErrorCurve  # of those behind it
    depth: int

    def __call__(self, rows: float, share: float = 0.5) -> float:
        """Return tokens per step with so many rows: the median, or another quantile."""
        first, later = (1.0 - curve(rows, 1.0 - share) for curve in (self.first, self.later))
        return 1.0 + first * sum(later**count for count in range(self.depth))

    def interval(self, rows: float) -> tuple[float, float]:
        """Return the middle 90%."""
        return self(rows, 0.05), self(rows, 0.95)


def reached_by_depth(run: Mapping) -> list[float]:
    """Return the share of all steps whose drafts' first d tokens are accepted, for d = 1, 2, ..

    run: one of a report. With 1 they sum to its tokens per step: the prompt's step, which drafts
    nothing, counts like any other, as do drafts cut short at the end.
    """
    accepted = run["accepted_by_depth"]
    drafting = (run["tokens_per_step"] - 1.0) / sum(accepted) if accepted else 0.0  # of all steps
    return [drafting * share for share in accepted]


def fit_saturation(sizes: Sequence[float], reached: Sequence[Sequence[float]]) -> Saturation:
    """Weigh all curves by what the drafts of trainings on two sizes or more reach.

    sizes: of every training, in rows; reached: the share of its steps that have their first d
    tokens accepted, d = 1, 2, .. Where data bring nothing, or harm, the likeliest curves are flat:
    their gap is 0.
    """
    rows = np.array(sizes, float)
    depths = np.array([*zip_longest(*reached, fillvalue=0.0)]).reshape(-1, len(rows))
    first = depths[:1].sum(0)
    accepted, asked = depths[1:].sum(0), depths[:-1].sum(0)  # of the tokens behind the first
    curve = _fit_errors(rows, first, np.ones(len(rows)))
    later = _fit_errors(rows, accepted, asked) if asked.any() else curve
    return Saturation(curve, later, len(depths))


def _fit_errors(sizes: np.ndarray, accepted: np.ndarray, asked: np.ndarray) -> ErrorCurve:
    """Weigh all curves by how often tokens were asked for, per step, and accepted; [runs] each."""
    seen = asked > 0
    sizes, asked = sizes[seen], asked[seen]
    errors = 1.0 - accepted[seen] / asked
    trust = asked / np.maximum(errors, LEAST_ERROR) ** 2
    grid = np.meshgrid(FLOORS, SLOPES, ONSETS * sizes.max(initial=0.0))
    floors, slopes, onsets = (axis.ravel() for axis in grid)
    falling = (onsets[:, None] + sizes) ** -slopes[:, None]  # [curves, values]
    above = errors - floors[:, None]
    gaps = np.maximum((trust * falling * above).sum(1) / (trust * falling**2).sum(1), 0.0)
    misfit = (trust * (above - gaps[:, None] * falling) ** 2).sum(1)
    freedom = max(len(errors) - PARAMETERS, 1)
    spread = max(float(np.sqrt(misfit.min() / freedom)), LEAST_SPREAD)
    weights = np.exp(-(misfit - misfit.min()) / (2 * spread**2))
    return ErrorCurve(floors, gaps, slopes, onsets, weights / weights.sum())
