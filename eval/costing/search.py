"""Which static tree buys the most tokens for the milliseconds of this machine.

With the shares of ranks by depth the best tree of N nodes to some depth is known
(eval/costing/tree_growth.py); what its steps bring is replayed (eval/costing/replay.py), and what
they take is the sum of their parts (eval/pricing/cost.py). A deeper tree needs more passes of a
head, a larger one a longer forward: every depth is tried with every number of nodes.

Shapes: D depths, W ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from specdraft.eval.costing.drafts import shape_of
from specdraft.eval.costing.replay import Load, Ranks
from specdraft.eval.costing.tree_growth import best_paths
from specdraft.eval.drafters.static import Path, StaticTree
from specdraft.eval.pricing.cost import CostModel

LARGEST = 64  # nodes tried


@dataclass(frozen=True)
class Candidate:
    """A tree, and what decoding with it is expected to bring and to take."""

    paths: tuple[Path, ...]
    passes: int
    tokens: float  # of a step, that of the prompt and the bonus token included
    speedup: float  # over plain decoding of the same answers

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))


@dataclass(frozen=True)
class TreePrices:
    """What trees of one drafter bring, by its ranks in known answers, and what they take."""

    ranks: Ranks
    costs: CostModel
    block_size: int  # depths of a pass; all of them for Medusa's heads
    coupled: bool
    load: Load

    def candidates(self, shares: Tensor) -> Iterator[Candidate]:
        """Yield the best tree of every depth and number of nodes, for shares [D, W] of ranks."""
        seen = set()
        for depth in range(1, len(shares) + 1):
            paths = best_paths(shares[:depth], LARGEST)
            for nodes in range(1, len(paths) + 1):
                chosen = tuple(sorted(paths[:nodes]))
                if chosen not in seen:
                    seen.add(chosen)
                    yield self.priced(chosen)

    def priced(self, paths: tuple[Path, ...]) -> Candidate:
        """What decoding with a tree is expected to bring and to take; sorted paths."""
        load, costs, steps = self.load, self.costs, self.ranks.steps(paths)
        shape = shape_of(StaticTree(paths, self.block_size, self.coupled))

        @cache
        def step(rows: int) -> float:
            return load.step_ms(costs, rows, len(paths) + 1) + costs.draft_ms(*shape, rows)

        tokens = load.tokens / (sum(steps) + len(steps))
        speedup = load.plain_ms(costs) / load.ms(steps, step, costs)
        return Candidate(paths, len(shape[0]), tokens, speedup)


def finalists(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best, then the best of other numbers of passes and of other sizes: where costs are a
    little wrong, one of them is better."""
    ranked = sorted(found, key=lambda one: -one.speedup)
    chosen: list[Candidate] = []
    for one in ranked:
        if len(chosen) == count:
            break
        if all(_differs(one, other) for other in chosen):
            chosen.append(one)
    return chosen


def _differs(one: Candidate, other: Candidate) -> bool:
    """Whether two trees are unlike enough to be worth decoding both."""
    sizes = sorted((len(one.paths), len(other.paths)))
    return one.passes != other.passes or sizes[1] >= 1.4 * sizes[0]
