"""What more data would bring: a saturating curve by what there is to learn from.

That is less than the rows that are read, where some are read again: a few times they are nearly as
good as new ones, after some fifteen worth nothing. So a few rows that are read often and many that
are read once lie on one curve, whether steps grow with the rows or not.
"""

from collections.abc import Mapping, Sequence
from math import expm1
from typing import Any

from specdraft.train.curves.saturation import fit_saturation
from specdraft.train.curves.sizes import POWERS

# R*: 15.4 of language models (below). The bundled target's drafters, 45 trainings of each kind with
# equal and with growing steps, lie closest to one curve each with 4 to 10, all together with 6.
REPEATS = 6.0


def effective_rows(rows: float, read: float | None) -> float:
    """Return how many rows, read once each, teach as much as so many of which `read` are read.
    None: each of them once.

    U + U R* (1 - exp(-R / R*)), of U rows that are read R times again (Muennighoff et al. 2023,
    arXiv 2305.16264, section 3.1).
    """
    if read is None:
        return rows
    unique = min(rows, read)
    again = read / unique - 1.0
    return unique * (1.0 - REPEATS * expm1(-again / REPEATS))


class Forecast:
    """Tokens per step of a kind of drafter by its rows, with the steps that its regime gives."""

    def __init__(self, points: Sequence[Mapping[str, Any]]):
        """points: of trainings in one regime, see data_curve.py."""
        self.largest = max(points, key=lambda point: point["rows"])
        self.fitted = fit_saturation(
            [effective_rows(point["rows"], point["read"]) for point in points],
            [point["reached_by_depth"] for point in points],
        )

    def __call__(self, rows: float) -> float:
        """Return the median."""
        return self.fitted(self._effective(rows))

    def interval(self, rows: float) -> tuple[float, float]:
        """Return the middle 90%."""
        return self.fitted.interval(self._effective(rows))

    def _effective(self, rows: float) -> float:
        read, known = self.largest["read"], self.largest["rows"]
        if read is not None:
            read *= (rows / known) ** POWERS[self.largest["steps_are"]]
        return effective_rows(rows, read)
