"""A curve that saturates: tokens per step by training rows, and how sure it is.

    tau(n) = ceiling - gap * n^(-slope),    gap >= 0, 0 < slope <= 2

fitted by least squares. For every slope of a grid the other two are linear; the best slope stands.
Uncertainty is that of the measurements: what they are off the fit, seeds and misfit alike, is drawn
anew around it (a parametric bootstrap), and the middle 90% of what those fits say is the interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SLOPES = np.geomspace(0.02, 2.0, 120)
DRAWS, PARAMETERS = 200, 3


@dataclass(frozen=True)
class Saturation:
    """One fitted curve."""

    ceiling: float  # tokens per step with all data there could be
    gap: float
    slope: float

    def __call__(self, rows: float) -> float:
        """Return the tokens per step that so many rows bring."""
        return self.ceiling - self.gap * rows**-self.slope


def fit_saturation(sizes: Sequence[float], values: Sequence[float]) -> Saturation:
    """Fit the curve to one value or several per size; at least three sizes that differ.

    Where data bring nothing, or harm, it is flat at their mean: gap is 0.
    """
    told = np.asarray(values, float)
    falling = np.asarray(sizes, float) ** -SLOPES[:, None]  # [slopes, values]
    centred = falling - falling.mean(1, keepdims=True)
    gaps = -(centred @ told) / (centred**2).sum(1)  # of a straight line through each row
    ceilings = told.mean() + gaps * falling.mean(1)
    errors = ((ceilings[:, None] - gaps[:, None] * falling - told) ** 2).sum(1)
    best = int(np.where(gaps > 1e-9, errors, np.inf).argmin())
    if gaps[best] <= 1e-9:
        return Saturation(float(told.mean()), 0.0, 1.0)
    return Saturation(float(ceilings[best]), float(gaps[best]), float(SLOPES[best]))


def predict(
    by_size: Mapping[int, Sequence[float]], rows: float, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """Return what so many rows bring, and the interval of 90%.

    by_size: values of the seeds. The interval is None where there are no more values than the
    curve has parameters: nothing tells how sure it is.
    """
    pairs = [(size, value) for size, values in by_size.items() for value in values]
    sizes, told = (np.array(column, float) for column in zip(*pairs, strict=True))
    fitted = fit_saturation(sizes, told)
    if len(told) <= PARAMETERS:
        return fitted(rows), None
    spread = np.sqrt(((fitted(sizes) - told) ** 2).sum() / (len(told) - PARAMETERS))
    generator = np.random.default_rng(seed)
    noise = generator.normal(0.0, spread, (DRAWS, len(told)))
    drawn = [fit_saturation(sizes, fitted(sizes) + off)(rows) for off in noise]
    low, high = np.quantile(drawn, [0.05, 0.95])
    return fitted(rows), (float(low), float(high))
