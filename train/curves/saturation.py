"""A curve that saturates: tokens per step by training rows, and how sure it is.

What falls as a power of the data is an error (Hestness et al. 2017, arXiv 1712.00409), down to a
floor that no data lower; here the chance that the target rejects the next drafted token:

    error(n) = floor + gap * n^(-slope),           0 <= floor, 0 <= gap, 0 < slope <= 2
    tau = 1 + a + a^2 + .. + a^depth,              a = 1 - error, depth: tokens of a chain

Three or four sizes leave open how much of the error is floor, so no single fit is believed: every
pair of floor and slope on a grid, with its best gap, is weighted by how likely it makes what was
measured, and what is foretold is the median of what they say, its interval their middle 90%.
Before, all floors are equally likely, and a slope as likely from one value to twice as much as to
half; noise is Gaussian, of the spread that the best fit leaves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FLOORS = np.linspace(0.0, 0.99, 100)
SLOPES = np.geomspace(0.02, 2.0, 100)  # most that were found are 0.07 to 0.35 (the same paper)
PARAMETERS = 3
LEAST_SPREAD = 0.02  # of an error: no training follows a power law to the hundredth


@dataclass(frozen=True)
class Saturation:
    """What drafts of up to `depth` tokens bring with so much data, as far as is known."""

    depth: int
    floors: np.ndarray  # [curves]
    gaps: np.ndarray  # [curves]
    slopes: np.ndarray  # [curves]
    weights: np.ndarray  # [curves], sum 1

    def __call__(self, rows: float, share: float = 0.5) -> float:
        """Return tokens per step with so many rows: the median, or another quantile."""
        taus = tokens_per_step(self.floors + self.gaps * rows**-self.slopes, self.depth)
        order = np.argsort(taus)
        reached = np.cumsum(self.weights[order]) >= share
        return float(taus[order][int(reached.argmax())])

    def interval(self, rows: float) -> tuple[float, float]:
        """Return the middle 90%."""
        return self(rows, 0.05), self(rows, 0.95)

    @property
    def likeliest(self) -> dict[str, float]:
        """Return the curve that fits best: floor, gap and slope of the error."""
        best = int(self.weights.argmax())
        named = {"floor": self.floors, "gap": self.gaps, "slope": self.slopes}
        return {name: float(values[best]) for name, values in named.items()}


def tokens_per_step(error: np.ndarray, depth: int) -> np.ndarray:
    """Return tau of a chain whose every token is rejected with this chance once it is reached."""
    accepted = 1.0 - np.clip(error, 0.0, 1.0)
    return sum(accepted**place for place in range(depth + 1))


def error_of(taus: Sequence[float], depth: int) -> np.ndarray:
    """Return the chance of rejection that makes these tokens per step."""
    grid = np.linspace(1.0, 0.0, 4001)
    return np.interp(np.asarray(taus, float), tokens_per_step(grid, depth), grid)


def tokens_by_rows(runs: Iterable[Mapping]) -> dict[int, list[float]]:
    """Return tokens per step of trainings, by the rows that they were given."""
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(run["rows"], []).append(run["tokens_per_step"])
    return found


def fit_saturation(by_rows: Mapping[int, Sequence[float]], depth: int) -> Saturation:
    """Weigh all curves by tokens per step of two sizes or more, each of one seed or several.

    Where data bring nothing, or harm, the likeliest are flat: their gap is 0.
    """
    pairs = [(rows, value) for rows, values in by_rows.items() for value in values]
    sizes, told = (np.array(column, float) for column in zip(*pairs, strict=True))
    errors = error_of(told, depth)
    floors, slopes = (axis.ravel() for axis in np.meshgrid(FLOORS, SLOPES))
    falling = sizes ** -slopes[:, None]  # [curves, values]
    above = errors - floors[:, None]
    gaps = np.maximum((falling * above).sum(1) / (falling**2).sum(1), 0.0)
    misfit = ((above - gaps[:, None] * falling) ** 2).sum(1)
    freedom = max(len(told) - PARAMETERS, 1)
    spread = max(float(np.sqrt(misfit.min() / freedom)), LEAST_SPREAD)
    weights = np.exp(-(misfit - misfit.min()) / (2 * spread**2))
    return Saturation(depth, floors, gaps, slopes, weights / weights.sum())
