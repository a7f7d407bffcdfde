"""Which static tree buys the most tokens for the milliseconds of this machine.

With the shares of ranks by depth the best tree of N nodes to some depth is known
(eval/drafters/tree_growth.py), and the tokens that a step with it brings. What the step takes is
the sum of its parts (eval/engine/cost.py). A deeper tree needs more passes of a head, a larger one
a longer forward: every depth is tried with every number of nodes.

Shapes: D depths, W ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from specdraft.eval.costing.drafts import shape_of
from specdraft.eval.drafters.static import Path, StaticTree
from specdraft.eval.drafters.tree_growth import best_paths, probability
from specdraft.eval.engine.cost import CostModel

LARGEST = 64  # nodes tried


@dataclass(frozen=True)
class Load:
    """What trees are chosen for."""

    rows: int = 1  # decoded at once
    cached: int = 128  # tokens of a row


@dataclass(frozen=True)
class Candidate:
    """A tree, and what a step with it is expected to bring and to take."""

    paths: tuple[Path, ...]
    passes: int
    tokens: float  # of a step, the bonus token included
    ms: float  # of a step, over all rows

    @property
    def rate(self) -> float:
        """Expected tokens of a row per millisecond."""
        return self.tokens / self.ms

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    def __str__(self) -> str:
        return f"{len(self.paths)} nodes to depth {self.depth}"


def plain_rate(costs: CostModel, load: Load) -> float:
    """Tokens of a row per millisecond without a draft."""
    return 1 / (costs.verify_ms(load.rows, 1, load.cached) + costs.loop_ms(load.rows))


def candidates(
    shares: Tensor, costs: CostModel, block_size: int, coupled: bool, load: Load
) -> Iterator[Candidate]:
    """Yield the best tree of every depth and number of nodes, for shares [D, W] of ranks.

    block_size: depths of a pass; all of them for Medusa's heads.
    """
    seen = set()
    for depth in range(1, len(shares) + 1):
        paths = best_paths(shares[:depth], LARGEST)
        gained = accumulate((probability(shares, path) for path in paths), initial=1.0)
        next(gained)
        for nodes, tokens in enumerate(gained, start=1):
            chosen = tuple(sorted(paths[:nodes]))
            if chosen not in seen:
                seen.add(chosen)
                yield _priced(chosen, tokens, costs, block_size, coupled, load)


def _priced(
    paths: tuple[Path, ...],
    tokens: float,
    costs: CostModel,
    block_size: int,
    coupled: bool,
    load: Load,
) -> Candidate:
    passes, levels = shape_of(StaticTree(paths, block_size, coupled))
    rows, nodes = load.rows, len(paths) + 1  # the root is verified, too
    ms = costs.verify_ms(rows, nodes, load.cached) + costs.draft_ms(passes, levels, rows)
    return Candidate(paths, len(passes), tokens, ms + costs.loop_ms(rows, nodes))


def finalists(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best by rate, then the best of other numbers of passes and of other sizes: where costs
    are a little wrong, one of them is better."""
    ranked = sorted(found, key=lambda one: -one.rate)
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
