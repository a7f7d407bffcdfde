"""What cascades are expected to gain, without a model: EWIF over lengths and costs.

EWIF (CS Drafting, Theorem 4.1) of one drafter beside what coins give, of the best horizontal
cascade of two, and Theorem 4.4 on small cases by trying every assignment and a grid of mixtures.
"""

import random
from dataclasses import dataclass
from typing import Annotated, Any

from specdraft.eval.measure.ewif import (
    Proposer,
    best_assignment,
    ewif,
    mixing_gains,
    of_assignment,
    simulate,
)
from specdraft.eval.papers.table import Plan, Row, SeededTable
from specdraft.eval.publishing.plots import of_horizontal_cascade, of_one_drafter
from specdraft.recipes.fields import Fraction, Interval, NonNegative

COSTS = (0.01, 0.03, 0.1, 0.3)
STEPS = 100_000
CASES, LENGTH = 100, 3


@dataclass(frozen=True, kw_only=True)
class ExpectationTable(SeededTable):
    """The formula beside coins, which a seed throws."""

    reads_recipe = False

    alpha: Fraction = 0.8  # of the larger drafter
    cost: NonNegative = 0.1  # share of a target forward
    small_alpha: Fraction = 0.4
    small_cost: NonNegative = 0.01
    most: Annotated[int, Interval(1, 1000)] = 20  # drafted tokens

    @property
    def drafters(self) -> tuple[Proposer, Proposer]:
        """The larger one, the smaller one."""
        return Proposer(self.alpha, self.cost), Proposer(self.small_alpha, self.small_cost)

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Lengths of a draft, the best cascade, and what mixing drafters gains."""
        found, (large, small) = {}, self.drafters
        for k in sorted({1, min(5, self.most), self.most}):
            draft = ([self.alpha] * k, k * self.cost)
            thrown = simulate(*draft, STEPS, seed)
            found[f"{k} drafted"] = Row({"EWIF": ewif(*draft), "by coins": thrown})
        best = max((best_assignment(self.drafters, k) for k in range(1, 11)), key=of_assignment)
        counts = f"{best.count(large)} of the larger, {best.count(small)} of the smaller"
        found[f"best of up to 10: {counts}"] = Row({"EWIF": of_assignment(best)})
        chance = random.Random(seed)
        pairs = [
            [Proposer(chance.random(), chance.random()) for _ in range(2)] for _ in range(CASES)
        ]
        gain = max(mixing_gains(pair, LENGTH) for pair in pairs)
        found[f"Theorem 4.4: {CASES} pairs"] = Row({"gain of mixing": gain})
        return found

    def pictures(self, made: dict) -> dict[str, Any]:
        """EWIF over lengths, by cost and with tails of the smaller drafter."""
        return {
            "one_drafter.png": of_one_drafter(self.alpha, COSTS, self.most),
            "horizontal.png": of_horizontal_cascade(*self.drafters, self.most),
        }
