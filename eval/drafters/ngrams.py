"""Draft what most often followed the last tokens in a table's corpus, as far as it is worth it.

The table knows, of every context of up to N tokens that it was counted with, which token followed
most often and how often. A draft is a chain: behind the longest context that is known comes its
token, and so on, as long as the path is likely enough (eval/pricing/worth.py). A draft takes some
look-ups: it costs what verifying it costs. REST (arXiv 2311.08252) and SuffixDecoding (arXiv
2411.04975) keep whole corpora to draft from, in trees of fixed sizes or by scores.

Shapes: N tokens of the longest context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdraft.eval.drafters.best_first import Rewarded
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Tree, chain
from specdraft.eval.pricing.cost import CostModel, Curve
from specdraft.eval.pricing.worth import USUAL, Worth
from specdraft.models.maxgram import POWERS

Followers = Mapping[int, tuple[int, float]]  # hash of a context: its next token, how likely it is
LEAST = 0.02  # a path that is less likely pays nowhere
MARGIN = 0.5  # of what a node costs on average: one that spares a pad costs less
NOTHING = Curve({}, points=0, median_error=0.0, worst_error=0.0, median_held_out=0.0)


class LastTokens:
    """What a drafter from tokens alone knows of each row: its last tokens, and how many it has."""

    def __init__(self, rows: int, kept: int):
        self.kept = kept
        self.ends: list[list[int]] = [[] for _ in range(rows)]
        self.lengths = [0] * rows

    def start(self, row: int, request: Request) -> None:
        known = [*request.source, *request.prompt]
        self.ends[row], self.lengths[row] = known[-self.kept :], len(request.prompt)

    def move(self, row: int, to: int) -> None:
        self.ends[to], self.lengths[to] = self.ends[row], self.lengths[row]

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        self.ends[row] = (self.ends[row] + tokens)[-self.kept :]
        self.lengths[row] += len(tokens)


class NGramDrafter(Rewarded, LastTokens):
    """A `Drafter` without a model. known: of contexts of 1, 2, .. N tokens; count: tokens of a
    draft at most; costs: of this machine; None: those of eval/pricing/worth.py."""

    rules: frozenset[str] = frozenset()  # its drafts are candidates, not samples
    from_tokens = True

    def __init__(
        self,
        known: Sequence[Followers],
        costs: CostModel | None = None,
        count: int = 10,
        rows: int = 1,
        device: torch.device | str = "cpu",
    ):
        super().__init__(rows, len(known))
        self.known, self.max_nodes, self.device = known, count, torch.device(device)
        self.worth = Worth(replace(costs or USUAL, draft=NOTHING), 1, count)
        self.forwards, self.seconds = 0, 0.0
        self._no_draft = Tree.empty(self.device)

    def draft(self, rows: list[int]) -> list[Tree]:
        self.worth.begin(rows, sum(self.lengths[row] for row in rows) / len(rows))
        if not self.worth.starts():
            return [self._no_draft] * len(rows)
        least = max(MARGIN * self.worth.node_price, LEAST)
        paths = [self._path(self.ends[row], least) for row in rows]
        cut = self.worth.choose([chances for _, chances in paths])
        kept = (sum(chance >= cut.least for chance in chances[: cut.most]) for _, chances in paths)
        return [self._tree(tokens[:n]) for (tokens, _), n in zip(paths, kept, strict=True)]

    def _path(self, end: list[int], least: float) -> tuple[list[int], list[float]]:
        """Tokens behind the end of a text, and how likely all up to each of them are: at least so
        much."""
        tokens, chances, reach, size = [], [], 1.0, self.max_nodes
        while len(tokens) < size and (found := self._follower(end)):
            token, chance = found
            reach *= chance
            if reach < least:
                break
            tokens.append(token)
            chances.append(reach)
            end = [*end, token][-self.kept :]
        return tokens, chances

    def _follower(self, end: Sequence[int]) -> tuple[int, float] | None:
        """What follows the longest context that is known; None where none is."""
        hashed, best = 0, None
        for followers, power, token in zip(self.known, POWERS, reversed(end), strict=False):
            hashed = (hashed + (token + 1) * power) % 2**64
            # Of a context that was left out the longer ones were, too: they are no more frequent.
            if (found := followers.get(hashed)) is None:
                break
            best = found
        return best

    def _tree(self, tokens: list[int]) -> Tree:
        if not tokens:
            return self._no_draft
        return Tree(chain(len(tokens)), upload(tokens, self.device))
