"""Max-Gram behind any drafter: its deepest paths go on with copied tokens.

The horizontal cascade of CS Drafting (arXiv 2312.11462, Algorithm 1, the first row of K) for trees:
deep nodes are rarely reached, so they should come from a drafter that costs nothing.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.transfer import download, upload
from specdraft.eval.engine.tree import Topology, Tree
from specdraft.eval.lookup.maxgram import MaxGramDrafter


class MaxGramTail:
    """A `Drafter` that continues the first `paths` of the deepest paths of another one's trees, in
    draft order, by up to `count` tokens each."""

    rules: frozenset[str] = frozenset()  # copies are no samples

    def __init__(self, drafter: Drafter, maxgram: MaxGramDrafter, count: int, paths: int = 1):
        self.drafter, self.maxgram, self.count, self.paths = drafter, maxgram, count, paths
        self.max_nodes = drafter.max_nodes + count * paths
        self.from_tokens = drafter.from_tokens
        self.feature_layers = getattr(drafter, "feature_layers", ())

    @property
    def forwards(self) -> int:
        return self.drafter.forwards

    @property
    def seconds(self) -> float:
        return self.drafter.seconds

    def start(self, row: int, request: Request) -> None:
        self.drafter.start(row, request)
        # Both are told the same: with features, the prompt comes as the target reads it.
        known = request if self.from_tokens else replace(request, prompt=request.prompt[:1])
        self.maxgram.start(row, known)

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        self.drafter.observe(row, tokens, features)
        self.maxgram.observe(row, tokens, features)

    def move(self, row: int, to: int) -> None:
        self.drafter.move(row, to)
        self.maxgram.move(row, to)

    def draft(self, rows: list[int]) -> list[Tree]:
        trees = self.drafter.draft(rows)
        tokens = download(*(tree.tokens for tree in trees))
        return [
            self._extend(row, tree, drafted.tolist())
            for row, tree, drafted in zip(rows, trees, tokens, strict=True)
        ]

    def _extend(self, row: int, tree: Tree, drafted: list[int]) -> Tree:
        ends = deepest(tree.topology, self.paths)
        tails = []
        for end in ends:
            ahead = [drafted[node - 1] for node in tree.topology.path(end)]
            tails.append(self.maxgram.continuation(row, ahead, self.count))
        topology = grafted(tree.topology, tuple(zip(ends, map(len, tails), strict=True)))
        fresh = upload([token for tail in tails for token in tail], tree.tokens.device)
        return Tree(topology, torch.cat((tree.tokens, fresh)))


def deepest(topology: Topology, count: int) -> list[int]:
    """The first `count` nodes of the greatest depth."""
    return [node for node, own in enumerate(topology.depths) if own == topology.depth][:count]


@lru_cache(maxsize=512)
def grafted(topology: Topology, tails: tuple[tuple[int, int], ...]) -> Topology:
    """Put chains below nodes: (node, length) each. The same object again for the same shape, so
    that the target's masks are."""
    parents = list(topology.parents)
    for node, length in tails:
        for _ in range(length):
            parents.append(node)
            node = len(parents) - 1
    return Topology(parents)
