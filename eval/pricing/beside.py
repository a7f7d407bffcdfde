"""Whether a head drafts beside drafts that cost nothing to make: where it adds what its pass takes.

Where a table's draft is likely, a head's would be hardly longer; where the table knows nothing, a
head may still be sure. What a head adds is learnt from its drafts of late, apart for free drafts
that were worth about as much: by the probabilities of their nodes, which scatter less than what is
accepted.

Shapes: N nodes of a row, the most probable first.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

from specdraft.eval.pricing.cost import CostModel
from specdraft.eval.pricing.evidence import Evidence
from specdraft.eval.pricing.worth import Cut, Worth

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # tokens: where one kind of free drafts ends


class WorthBeside(Worth):
    """What the parts of a draft are worth beside a free one. Of every step: `begin` and `prefers`;
    `goes_on` after each pass and `choose`, for all rows that began; then `earn`."""

    def __init__(self, costs: CostModel | None, block_size: int, most: int):
        super().__init__(costs, block_size, most)
        self.added = [Evidence() for _ in range(len(SIZES) + 1)]  # by a head, of each kind
        # Of the rows with a pass, by their places: tokens that their free drafts are worth.
        self._free: dict[int, float] = {}

    def gain(self, chances: Sequence[float]) -> float:
        """Tokens that the best of N nodes, each the child of the one before, may add to a row, what
        verifying them costs taken off."""
        prices, best = self._prices(), 0.0
        for nodes, some in enumerate(accumulate(chances), start=1):
            cost = (prices[self.rows * nodes] - prices[0]) / self.rows
            best = max(best, some - self.rate * cost)
        return best

    def prefers(self, free: Mapping[int, Sequence[float]]) -> list[int]:
        """Which rows a head drafts for, given the probabilities of every row's free draft."""
        gains = {row: self.gain(chances) for row, chances in free.items()}
        kinds = {row: self._kind(gain) for row, gain in gains.items()}
        chosen, price = [*free], self._price_of(len(free))
        while chosen and (able := [row for row in chosen if kinds[row].may(price)]) != chosen:
            chosen, price = able, self._price_of(max(len(able), 1))
        for kind in {*kinds.values()}:
            kind.allows(price)
        self._profit, self._made = 0.0, len(free)
        self._first = self._pass_ms(len(chosen), 0) if chosen else 0.0
        self._free = {place: gains[row] for place, row in enumerate(free) if row in chosen}
        return chosen

    def _kind(self, gain: float) -> Evidence:
        return self.added[bisect(SIZES, gain)]

    def _price_of(self, rows: int) -> float:
        """Tokens that a pass over some rows has to add to each."""
        return self.rate * self._pass_ms(rows, 0) / rows

    def choose(self, chances: Sequence[Sequence[float]]) -> Cut:
        cut, prices = super().choose(chances), self._prices()
        kept = [sorted(own, reverse=True)[: cut.most] for own in chances]
        kept = [[chance for chance in own if chance >= cut.least] for own in kept]
        nodes = sum(map(len, kept))
        each = (prices[nodes] - prices[0]) / max(nodes, 1)
        later = self._later / max(len(self._free), 1)
        for place, free in self._free.items():
            spent = self.rate * (len(kept[place]) * each + later)
            self._kind(free).add(sum(kept[place]) - spent - free, 1)
        return cut
