"""What is timed: forwards of the target, drafts, steps of the loop; all of them in turns.

A machine drifts: measured one after the other, the last points of a grid would be those of a slower
machine. So every turn visits every cell of the grid once, in an order of its own. A visit runs its
cell a few times to warm up and a few times more to be timed, each between two runs of one plain
forward, the same for all cells, which tells the machine's pace at this moment. (Where neighbours
share the cores, one forward takes 7 to 17 ms, and two right after each other the same: a cell and
the pace beside it, divided, spread by 8% where both alone spread by 22% and 17%; AMD EPYC, family
25.) eval/costing/ledger.py says what is made of all turns.

In decoding, a forward finds in the machine's caches what the draft before it has left there, and a
draft what the forward has. Timed one right after another of its kind, both would be a fifth cheaper
than they ever are. So between two timed runs comes one of the other kind, untimed, of as many rows.
(A draft of 24 rows takes 1.2 times what it does behind a forward of one; AMD EPYC, family 26.)
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdraft.eval.costing.grid import Grid, apart
from specdraft.eval.engine.batch import pack, row_inputs
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.row import Row
from specdraft.eval.engine.timing import Stopwatch, Timing
from specdraft.eval.engine.transfer import wait
from specdraft.eval.engine.tree import Tree, shape
from specdraft.eval.engine.verdict import verdicts
from specdraft.models.feature_layers import Layers
from specdraft.models.target import Target

TIMED = 5  # runs of a visit whose median counts
# Runs before them that do not: until a core's caches hold what comes again in every step. Of a
# plain forward of 3M parameters the second takes 1.5 times what the tenth does (AMD EPYC, family
# 26).
WARM_UP = 10
ENOUGH = 0.05  # seconds after which no further run of either is begun
STEPS = 4  # of the loop that are timed, behind the one that reads the prompt
FRESH = 4  # tokens that a step brings, where its tree is deep enough
PROMPT = 8  # tokens of a prompt of the loop, whose time does not depend on them, and of the pace
SOURCE = 128  # tokens that an encoder has read for every row

Key = tuple[str, str]  # of a cell: what is timed, and at which numbers
# Given a number of rows, returns what is run, untimed, between two timed runs of one kind.
Between = Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Cell:
    """One thing to time. `open` makes ready for a visit and returns a run, which tells its own
    seconds: what it does beside what is timed does not count."""

    what: str  # verify, ragged (verify, of rows of two widths), loop or draft
    at: Mapping[str, Any]  # rows, nodes, ..: arguments of its terms in eval/pricing/cost.py
    open: Callable[[], Callable[[], float]]

    @property
    def key(self) -> Key:
        return self.what, str(sorted(self.at.items()))


class Try(NamedTuple):
    """What a visit found: milliseconds of its cell, and of the pace meanwhile."""

    ms: float
    pace: float


def settled(tries: Sequence[Try], pace: float) -> float:
    """Milliseconds of a cell at a pace, whatever the machine did during its visits.

    >>> settled([Try(2.2, 1.0), Try(3.0, 1.5), Try(2.0, 1.0)], pace=1.5)
    3.0
    """
    return median(own.ms / own.pace for own in tries) * pace


def turns(cells: Sequence[Cell], repeats: int) -> Iterator[tuple[int, Cell]]:
    """Yield every cell once per turn, with the turn's number; each turn has another order, which is
    the same in every run."""
    for turn in range(repeats):
        order = list(cells)
        random.Random(turn).shuffle(order)
        yield from ((turn, cell) for cell in order)


@torch.inference_mode()
def visit(cell: Cell, pace: Callable[[], float]) -> Try:
    """A cell now: medians of a few runs, for a step of decoding is seldom its fastest.

    pace: runs what is timed before and behind each run of the cell, and returns its seconds.
    """
    run = cell.open()
    _repeat(run, WARM_UP)
    paces = [pace()]

    def timed() -> float:
        seconds = run()
        paces.append(pace())
        return seconds

    pairs = zip(_repeat(timed, TIMED), map(mean, pairwise(paces)), strict=True)
    shares, beside = zip(*((seconds / around, around) for seconds, around in pairs), strict=True)
    now = 1e3 * median(beside)
    return Try(median(shares) * now, now)


def _repeat(run: Callable[[], float], times: int) -> list[float]:
    """What so many runs return, or as many as there is time for: one at least."""
    begun = time.perf_counter()
    seconds = [run()]
    while len(seconds) < times and time.perf_counter() - begun < ENOUGH:
        seconds.append(run())
    return seconds


def bench_request(target: Target, prompt: int, length: int) -> Request:
    """A request of `prompt` tokens for `length` more, which no token ends early; with a source
    where its target reads one."""
    source = [0] * min(SOURCE, target.context or SOURCE) if target.reads_source else []
    return Request([0] * prompt, length, eos_ids=frozenset(), source=source)


def nothing() -> None:
    """What comes between two forwards of plain decoding."""


def always_nothing(rows: int) -> Callable[[], object]:
    """Nothing comes between, of however many rows."""
    return nothing


class Guesser:
    """A `Drafter` that drafts trees of one size, and runs something else, `between`, before each.

    The first path of a tree begins with the target's own answer, so that as much is accepted as in
    decoding. (Of one row's drafts a third move something in the cache, of 24 rows' a twentieth;
    stories3M.)
    """

    forwards = 0
    rules: frozenset[str] = frozenset()
    from_tokens = True

    def __init__(self, target: Target, most: int, feature_layers: Layers):
        self.target, self.max_nodes, self.feature_layers = target, most, feature_layers
        self.seconds, self.nodes = 0.0, 1  # of a tree
        self.answer: list[int] = []  # of every request
        self.between: Callable[[], object] = nothing
        self._said: dict[int, int] = {}  # of every row, tokens of the answer

    def start(self, row: int, request: Request) -> None:
        self._said[row] = 0

    def move(self, row: int, to: int) -> None:
        self._said[to] = self._said.pop(row)

    def draft(self, rows: list[int]) -> list[Tree]:
        with Stopwatch() as watch:
            if self.nodes > 1:
                self.between()
            trees = [self.tree(self.nodes, self.answer[self._said[row] :]) for row in rows]
        self.seconds += watch.seconds
        return trees

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        self._said[row] += len(tokens)

    def tree(self, nodes: int, right: Sequence[int] = ()) -> Tree:
        """A tree of a path and, below its nodes but the last in turn, leaves. Its tokens are random
        but for the first of the path, which are those of `right`; its shape is known, as in
        decoding: to learn 24 of 16 nodes takes as long as half of the loop's part of a step."""
        path = min(nodes, FRESH)
        others = [node % (path - 1) for node in range(nodes - path)]
        tokens = torch.randint(self.target.vocab_size, (nodes - 1,)).tolist()
        right = right[: path - 1]
        tokens[: len(right)] = right
        tokens = torch.tensor(tokens, dtype=torch.long, device=self.target.device)
        return Tree(shape((*range(-1, path - 1), *others)), tokens)


def _two_widths(rows: int, nodes: int, widest: int) -> list[int]:
    """Sizes of rows, every other one as wide as the widest, with so many nodes in the mean.

    >>> _two_widths(5, 4, 7)
    [1, 7, 1, 7, 4]
    """
    return [2 * nodes - widest, widest] * (rows // 2) + [nodes] * (rows % 2)


class TargetBench:
    """A target in a decoder of as many rows as the grid has, and what is timed of it.

    layers: of the target that the drafter reads beside the last feature. `between` is done before
    each forward that a draft comes before in decoding.
    """

    def __init__(self, target: Target, grid: Grid, layers: Layers = ()):
        self.target, self.grid = target, grid
        self.guesser = Guesser(target, max(grid.side), layers)
        self.between: Between = always_nothing
        capacity = max(grid.capacity, PROMPT + self._answer + max(grid.side))
        self.decoder = Decoder(target, self.guesser, max(grid.rows), capacity)

    @property
    def _answer(self) -> int:
        """Tokens that the steps of the loop may bring."""
        return (1 + STEPS) * (1 + max(self.grid.side)) + 1

    @cached_property
    def answer(self) -> list[int]:
        """What the target says in the steps of the loop."""
        count = FRESH * (1 + STEPS) + 1
        request = bench_request(self.target, PROMPT, count)
        (said,) = Decoder(self.target, None, 1, PROMPT + count).run([request])
        return said.tokens

    def cells(self) -> Iterator[Cell]:
        """The forwards of the grid, and the loop at some of its places."""
        for rows, nodes, cached in self.grid.places():
            yield self._verify_cell([nodes] * rows, cached, self.between)
        if self.grid.ragged:
            for rows in self.grid.rows[1:]:
                sizes = _two_widths(rows, *self.grid.ragged)
                yield self._verify_cell(sizes, self.grid.cached[0], self.between)
        rows = self.grid.rows
        for count in sorted({rows[0], rows[len(rows) // 3], rows[-1]}):  # its part needs no more
            yield from (self._loop_cell(count, nodes) for nodes in self.grid.side)

    @torch.inference_mode()
    def pace(self) -> Callable[[], float]:
        """The plain forward beside which everything is timed, of whatever grid: a row's, behind a
        short prompt."""
        return self._verify_cell([1], PROMPT, always_nothing).open()

    def forward(self, rows: int) -> Callable[[], float]:
        """A forward that verifies a few nodes of each row: what comes between two drafts."""
        side = self.grid.side  # the more rows, the fewer nodes are worth it
        nodes = side[-1] if rows == 1 else side[len(side) // 2]
        return self._verify_cell([nodes] * rows, min(self.grid.cached), always_nothing).open()

    def _verify_cell(self, sizes: Sequence[int], cached: int, between: Between) -> Cell:
        """What `Timing.verify` of the decoder counts; sizes: nodes of each row; cached: tokens, in
        the mean of the rows. The cache holds whatever lies there."""
        rows, widest = len(sizes), max(sizes)

        def opened() -> Callable[[], float]:
            packed, trees = self.decoder.packed, [*map(self.guesser.tree, sizes)]
            lengths, eos, shares = apart(cached, rows), frozenset(), []
            for slot, length in enumerate(lengths):
                request = bench_request(self.target, length + 1, 1)
                shares.append((Row(slot, slot, request, [0], eos, False), 1))
                packed.start(slot, request.source)
            inputs = row_inputs(shares, dict(enumerate(trees)), trees[0])
            width = self.target.hidden_size
            drafted = between(rows) if widest > 1 else nothing

            def go() -> float:
                drafted()
                packed.pool.lengths[:rows] = lengths
                batch, waited = pack(inputs, packed), Timing()
                wait(self.target.device)
                with Stopwatch() as forward:
                    features = packed.forward(batch.ids, batch.positions, batch.segments)
                    logits = self.target.logits(features[:, :width].contiguous())
                verdicts(inputs, batch.ids, logits, waited)
                return forward.seconds + waited.verify

            return go

        at = {"rows": rows, "nodes": sum(sizes) // rows, "cached": cached}
        if len({*sizes}) == 1:
            return Cell("verify", at, opened)
        return Cell("ragged", at | {"widest": widest}, opened)

    def _loop_cell(self, rows: int, nodes: int) -> Cell:
        """A step without what the target and the drafter take."""

        def go() -> float:
            guesser, timing = self.guesser, Timing()
            guesser.answer = self.answer
            guesser.nodes, guesser.between, guesser.seconds = nodes, self.between(rows), 0.0
            self.decoder.timing, steps, before = timing, [], 0.0
            stream = self.decoder.stream([bench_request(self.target, PROMPT, self._answer)] * rows)
            while len(steps) <= STEPS:
                next(stream)
                if timing.forwards > len(steps):
                    own = timing.total - timing.verify - guesser.seconds
                    steps.append(own - before)
                    before = own
            stream.close()
            return median(steps[1:])

        return Cell("loop", {"rows": rows, "nodes": nodes}, lambda: go)
