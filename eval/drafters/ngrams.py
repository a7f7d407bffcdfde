"""Draft what most often followed the last tokens in a table's corpus, as far as it is worth it.

The table knows, of every context of up to N tokens that it was counted with, which token followed
most often and how often. A draft is a chain: behind the longest context that is known comes its
token, and so on, as long as the path is likely enough (eval/pricing/worth.py). A draft takes some
look-ups: it costs what verifying it costs. REST (arXiv 2311.08252) and SuffixDecoding (arXiv
2411.04975) keep whole corpora to draft from, in trees of fixed sizes or by scores.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdraft.eval.drafters.best_first import Rewarded
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Tree, chain
from specdraft.eval.lookup.table import Followers, Lookups
from specdraft.eval.pricing.cost import CostModel, Curve
from specdraft.eval.pricing.worth import USUAL, Worth

LONGEST = 24  # tokens of a chain
LEAST = 0.02  # a path that is less likely pays nowhere
MARGIN = 0.5  # of what a node costs on average: one that spares a pad costs less
NODES = 4  # of a draft, that its average node is the average of: the first costs most
NOTHING = Curve({}, points=0, median_error=0.0, worst_error=0.0, median_held_out=0.0)


def least_chance(worth: Worth) -> float:
    """How likely a path has to be for another look-up, in the step that has begun."""
    return max(MARGIN * worth.node_price, LEAST)


class NGramDrafter(Rewarded, Lookups):
    """A `Drafter` without a model. count: tokens of a draft at most; costs: of this machine; None:
    those of eval/pricing/worth.py."""

    rules: frozenset[str] = frozenset()  # its drafts are candidates, not samples
    from_tokens = True

    def __init__(
        self,
        known: Sequence[Followers],
        costs: CostModel | None = None,
        count: int = LONGEST,
        rows: int = 1,
        device: torch.device | str = "cpu",
    ):
        super().__init__(known, rows)
        self.max_nodes, self.device = count, torch.device(device)
        costs = replace(costs or USUAL, draft=NOTHING)
        self.worth = Worth(costs, min(NODES, count), count)
        self.forwards, self.seconds = 0, 0.0
        self._no_draft = Tree.empty(self.device)

    def draft(self, rows: list[int]) -> list[Tree]:
        self.worth.begin(rows, self.cached(rows))
        if not self.worth.starts():
            return [self._no_draft] * len(rows)
        least = least_chance(self.worth)
        chains = [self.foretell(row, self.max_nodes, least) for row in rows]
        cut = self.worth.choose([own.chances for own in chains])
        return [
            self._tree(own.tokens[: sum(chance >= cut.least for chance in own.chances[: cut.most])])
            for own in chains
        ]

    def _tree(self, tokens: list[int]) -> Tree:
        if not tokens:
            return self._no_draft
        return Tree(chain(len(tokens)), upload(tokens, self.device))
