"""How much of a draft is worth its time: decisions by what steps cost and what they have brought.

Decoding earns tokens for milliseconds. At a rate of so many tokens of all rows per millisecond, t
milliseconds have to bring rate * t tokens. So a node is verified where the probability of its path
is above rate * (what one node more costs), and a head reads on where what another pass may add is
above rate * (what the pass costs). With the rate that the last steps had, this is the policy of the
most tokens per millisecond in the long run (renewal reward; Dinkelbach 1967). The more rows run,
the more a node costs them all, and the fewer are drafted, down to none.

Rows that attend together are padded to the widest: a node that makes a row the widest has to earn
the pads of all, too. (Of 24 rows of stories that spares 4% of the time.)

Where rows that end are not replaced, what does not depend on the rows of a step is paid until the
slowest ends. A row that is ahead of the others saves its own share of the steps alone, and another
pass for it has to earn more tokens. (Of 24 rows of stories such passes took 5% of the time, and the
slowest row ended no sooner.)

Nothing here is measured while decoding: what is drafted depends on costs that are given, on tokens
and on the rows that run.

Shapes: R rows, E paths of a row, K depths of a pass.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, zip_longest
from operator import add
from typing import NamedTuple

import numpy as np

from specdraft.eval.pricing.cost import CostModel, Curve
from specdraft.eval.pricing.evidence import Evidence

KEEP = 0.98  # what a step counts for, of the one after it
CACHED = 64  # cached tokens: costs are those of their nearest multiple
NEVER = 2.0  # no path is so probable
ENDED = -1  # no row's place


def _ratios(weights: dict[str, float]) -> Curve:
    return Curve(weights, points=0, median_error=0.0, worst_error=0.0, median_held_out=0.0)


# Where nothing was measured; of a plain forward, since only ratios matter. A node more takes 2% of
# it and a pass of three depths a sixth: between a target of 7B parameters on a GPU and a tiny one
# on a CPU.
USUAL = CostModel(
    verify=_ratios({"forward": 1.0, "tokens from 1": 0.02}),
    knots=(1,),
    loop=_ratios({"step": 0.03}),
    draft=_ratios({"draft": 0.1, "passes": 0.1, "row passes": 0.01, "levels": 0.02}),
)


class Cut(NamedTuple):
    """What of a draft is verified."""

    least: float  # probability of a node, by its path; `NEVER`: none
    most: int  # nodes of a row


class Worth:
    """What the parts of a draft are worth, for the rows that run now.

    Of every step: `begin` and `starts`; where it does, `goes_on` after each pass and `choose`; then
    `earn` for each row once its tokens are committed.
    """

    def __init__(self, costs: CostModel | None, block_size: int, most: int):
        """costs: None or of no drafter: `USUAL`. most: nodes of a row."""
        self.costs = costs if costs and costs.draft else USUAL
        self.k, self.most = block_size, most
        # Of the last steps: what they have brought, and plain decoding in the same time; tokens.
        self.tokens = self.plain = 1.0
        # Of the last passes: what was there before a block, and behind it.
        self.before, self.behind = 1.0, 0.5
        self.evidence = Evidence()  # of drafts, one per row, their first passes not counted
        self.rows, self.cached, self.rate = 1, CACHED, 0.0
        self._order: list[int] = []  # rows that take part in the step, by their places
        self._running: set[int] = set()  # of them, those whose tokens count
        self._begun: set[int] = set()  # rows that were given a request since the last step
        self._replaced = False  # whether other requests take the rows of those that end
        self._made = 0  # drafts of the step
        self._earned = self._earners = 0  # tokens of this step, and rows that have committed them
        # Tokens of each row's request, those of its first step not counted.
        self._committed = Counter[int]()
        self._first = self._later = 0.0  # milliseconds of this step's passes
        self._profit: float | None = None  # less what this step's draft takes, in tokens
        self._steps: dict[tuple[int, int], list[float]] = {}
        self._shares: dict[tuple[int, int], float] = {}
        self._passes: dict[tuple[int, int], float] = {}

    def begin(self, running: Collection[int], cached: float) -> None:
        """A step of these rows, behind so many cached tokens each."""
        rows, before, self._running = len(running), {*self._order}, {*running}
        if before - self._running - self._begun:  # one has ended, and its row stays empty
            self._replaced = False
        elif self._begun:
            self._replaced = not before & self._running <= self._begun
        if rows == 1 and self._begun >= self._running:
            self.evidence.wake()
        self._settle()
        self._order, self._begun = [*running], set()
        self.rows, self._first, self._later = rows, 0.0, 0.0
        self.cached = CACHED * max(round(cached / CACHED), 1)
        if not self.evidence.left:
            self._price()

    def _price(self) -> None:
        """Set what the parts of this step's drafts have to bring: the rate, and of a node."""
        prices, block = self._prices(), self.rows * self.k
        plain = prices[0]
        # Tokens of all rows per millisecond, at the speed-up over plain decoding of late; plain
        # decoding itself can be had at any step.
        self.rate = max(self.tokens / self.plain, 1.0) * self.rows / plain
        self._node = self.rate * (prices[block] - plain) / block  # what one has to bring
        self._keep = (self.behind / self.before) ** (1 / self.k)

    @property
    def node_price(self) -> float:
        """Tokens that a node of this step has to bring, on average."""
        return self._node

    def starts(self) -> list[int]:
        """Which rows are drafted for: all, or, where drafts of late were not worth it, none; then
        the step's drafting has ended."""
        first = self._pass_ms(self.rows, 0)
        if not self.evidence.allows(self.rate * first / self.rows):
            self.tokens = self.plain = 1.0
            return []
        self._made, self._first, self._profit = self.rows, first, 0.0
        return self._order

    def goes_on(
        self,
        rows: Sequence[int],
        ends: Sequence[Sequence[float]],
        free: Sequence[Sequence[float]] | None = None,
    ) -> tuple[list[int], int]:
        """Which of some rows are worth another pass, by their numbers among these, and over how
        many paths each; none: ([], 0).

        ends: of every row, the probabilities of E paths that it could go on behind, descending;
        free: tokens that drafts without a pass would add behind them.
        """
        added = [
            [self._added(weight * end) for end in own]
            for weight, own in zip(self._weights(rows), ends, strict=True)
        ]
        if free is not None:
            added = [
                [max(new - old, 0.0) for new, old in zip(*both, strict=True)]
                for both in zip(added, free, strict=True)
            ]
        if len(ends) == 1 and len(ends[0]) == 1:  # nothing to choose among, as on most CPUs
            worth = added[0][0] - self.rate * self._pass_ms(1, 1)
            self._later += self._pass_ms(1, 1) if worth > 0 else 0.0
            return ([0], 1) if worth > 0 else ([], 0)
        best, chosen = 0.0, ([], 0)
        gains = [0.0] * len(ends)
        for paths, column in enumerate(zip_longest(*added, fillvalue=0.0), start=1):
            gains = [*map(add, gains, column)]
            ranked = sorted(range(len(ends)), key=gains.__getitem__, reverse=True)
            gained = 0.0
            for count, number in enumerate(ranked, start=1):
                gained += gains[number]
                worth = gained - self.rate * self._pass_ms(count, paths)
                if worth > best:
                    best, chosen = worth, (sorted(ranked[:count]), paths)
        rows, paths = chosen
        self._later += self._pass_ms(len(rows), paths) if rows else 0.0
        return chosen

    def passed(self, before: float, behind: float) -> None:
        """A pass has made of a path of some probability one of K tokens more."""
        self.before, self.behind = KEEP * self.before + before, KEEP * self.behind + behind

    def choose(self, chances: Sequence[Sequence[float]]) -> Cut:
        """What is verified; ends drafting of this step. chances: of every row's nodes."""
        prices, rate, most = self._prices(), self.rate, self.most
        pad = self.costs.pad_ms if self.rows > 1 else 0.0
        if pad:
            chances = [sorted(own, reverse=True) for own in chances]
            most = min(self._widest(chances, pad), most)
            chances = [own[:most] for own in chances]
        best, least, gained, count = -rate * prices[0], NEVER, 0.0, 0
        ranked = sorted(chain.from_iterable(chances), reverse=True)[: self.rows * most]
        for number, chance in enumerate(ranked, start=1):
            gained += chance
            # Each takes the place of a pad.
            if (worth := gained - rate * (prices[number] - pad * number)) > best:
                best, least, count = worth, chance, number
        later, plain = self._later + prices[count], prices[0]
        if pad and count:
            widest = max(sum(chance >= least for chance in own) for own in chances)
            later += pad * (self.rows * widest - count)
        self.tokens *= KEEP
        self.plain = KEEP * self.plain + self.rows * (self._first + later) / plain
        if self._profit is not None:
            self._profit = -rate * (later - plain)
        return Cut(least, most)

    def admit(self, row: int) -> None:
        """A request begins in a row: what it reads first is no step's gain."""
        self._begun.add(row)
        self._committed[row] = 0
        self._running.discard(row)

    def move(self, row: int, to: int) -> None:
        """A row's request goes on in another row, whose own has ended and is not replaced."""
        self._committed[to] = self._committed[row]
        now = {row: to, to: ENDED}
        self._order = [now.get(place, place) for place in self._order]
        self._begun = {now.get(place, place) for place in self._begun} - {ENDED}

    def earn(self, row: int, tokens: int) -> None:
        """A row has committed tokens, the bonus among them; they count if the step was its own."""
        if row not in self._running:
            return
        self._committed[row] += tokens
        self._earned += tokens
        self._earners += 1

    def _settle(self) -> None:
        """Note what the last step has brought, if drafts were made."""
        if self._profit is not None:
            self.tokens += self._earned
            self.evidence.add(self._profit + self._earned - self._earners, self._made)
        self._earned, self._earners, self._profit = 0, 0, None

    def _weights(self, rows: Sequence[int]) -> list[float]:
        """What a token of each of these rows is worth, where one of the slowest row's is worth 1.

        A token of a row at the mean or ahead of it is worth that row's own share of a step.
        """
        if self.rows == 1 or self._replaced:
            return [1.0] * len(rows)
        share, committed = self._share(), [self._committed[row] for row in self._order]
        least, mean = min(committed), sum(committed) / self.rows
        if least == mean:
            return [1.0] * len(rows)
        behind = (max(mean - self._committed[row], 0.0) / (mean - least) for row in rows)
        return [share + (1.0 - share) * part for part in behind]

    # -- prices ----------------------------------------------------------------------------------

    def _share(self) -> float:
        """What a row more adds to a plain step of several rows, over the step's time per row."""
        key = self.rows, self.cached
        if (share := self._shares.get(key)) is None:
            one, all_rows = self._step_ms(1, 1), self._step_ms(self.rows, 1)
            share = (all_rows - one) / (self.rows - 1) * self.rows / all_rows
            share = self._shares[key] = min(max(share, 0.0), 1.0)
        return share

    def _widest(self, ranked: Sequence[Sequence[float]], pad_ms: float) -> int:
        """How many nodes of a row are worth it that the others are padded to as many; ranked: their
        probabilities, descending."""
        pad = self.rate * pad_ms
        paid = self._node - pad  # by a node that takes the place of a pad
        width = 0
        for column in zip_longest(*ranked, fillvalue=0.0):
            if sum(chance - paid for chance in column if chance > paid) <= self.rows * pad:
                break
            width += 1
        return width

    def _added(self, chance: float) -> float:
        """Tokens that K nodes behind a path may add, what verifying them costs taken off.

        Each is as probable, given the one before it, as those of the last passes were.
        """
        added = 0.0
        for _ in range(self.k):
            chance *= self._keep
            if chance <= self._node:
                break
            added += chance - self._node
        return added

    def _prices(self) -> list[float]:
        """Milliseconds of a step without its draft, by how many nodes all rows draft together."""
        rows, cached = self.rows, self.cached
        if (prices := self._steps.get((rows, cached))) is None:
            most = rows * max(self.most, self.k)
            # From one of these numbers to the next a cost rises evenly (eval/pricing/cost.py).
            knots = (knot - rows for knot in self.costs.knots)
            turns = sorted({0, 1, most, *(nodes for nodes in knots if 1 < nodes < most)})
            known = [self._step_ms(rows, 1 + nodes / rows) for nodes in turns]
            prices = np.interp(range(most + 1), turns, known).tolist()
            self._steps[rows, cached] = prices
        return prices

    def _step_ms(self, rows: int, nodes: float) -> float:
        """Milliseconds of a step without its draft, with `nodes` of each row, the root included."""
        return self.costs.verify_ms(rows, nodes, self.cached) + self.costs.loop_ms(rows, nodes)

    def _pass_ms(self, rows: int, paths: int) -> float:
        """Milliseconds of another pass over some paths of each row; of 0 paths: of a draft's first
        pass."""
        if (ms := self._passes.get((rows, paths))) is None:
            levels = [1] * self.k
            ms = self.costs.draft_ms([1], levels, rows, best_first=True)
            if paths:
                levels += [paths] * self.k
                both = self.costs.draft_ms([1, paths], levels, rows, best_first=True)
                ms = both - ms
            self._passes[rows, paths] = ms
        return ms
