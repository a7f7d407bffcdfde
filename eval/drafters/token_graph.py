"""Token graphs: drafted trees where a phrase that comes again shares what follows its first.

Graph-structured speculative decoding (ACL Findings 2024), methods section. A node is tau-redundant
when the last tau tokens of its path already ended at another node that it does not descend from. It
becomes a leaf, and an edge leads from it to that first occurrence, whose successors are its own.

"Descends" counts the shared edges, too: where x is followed by y, and elsewhere y by x, each of the
second occurrences could lead to the other's first, and a text could run in circles. A node never
shares with one that leads to it, so the graph is acyclic by construction.

GSD drafts TSD's tree with a draft LM, but a probable child that is redundant is not read: what
follows it is copied before verification. Copies have no cache entry: an accepted one is read at the
next draft, as any other token that the draft did not foresee.

Sets of nodes are the bits of an integer: a lookup is a hash and a few word operations.

    >>> graph = TokenGraph([7], tau=1)  # 7 - 5 - 6 and 7 - 9 - 5, tokens that are nodes 0 .. 4
    >>> nodes = [graph.add(parent, token) for parent, token in ((0, 5), (1, 6), (0, 9), (3, 5))]
    >>> graph.merge(1), graph.merge(4), graph.shared  # the second 5 shares what follows the first
    (False, True, [-1, -1, -1, -1, 1])
    >>> graph.first[5,], graph.above  # 1 << 1; node 4 leads to 1, and so 0, 3 and 4 do: 1 + 8 + 16
    (2, [0, 25, 27, 1, 9])
    >>> tree = graph.unmerge(limit=100)  # one copy of the 6, below node 4
    >>> tree.tokens, tree.parents, tree.origins
    ([7, 5, 6, 9, 5, 6], [-1, 0, 1, 0, 3, 4], [0, 1, 2, 3, 4, 2])
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdraft.eval.drafters.level import TSD, Growth
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology, Tree
from specdraft.models.target import Target


@dataclass(frozen=True)
class Unmerged:
    """A graph written out as a tree: its own nodes under their own numbers, then the copies."""

    parents: list[int]
    tokens: list[int]
    origins: list[int]  # node of the graph that each node of the tree is, or is a copy of


class TokenGraph:
    """A graph that grows like a tree: by children of existing nodes, then by merging them.

    context: committed tokens, the last of them the root, node 0. Raises ValueError for none.
    """

    def __init__(self, context: Sequence[int], tau: int):
        if not context or tau < 0:
            raise ValueError(f"a graph needs a root and tau >= 0, not {list(context)} and {tau}")
        self.tau = tau
        self.parents, self.tokens, self.shared = [-1], [context[-1]], [-1]
        # The last tau tokens of every node's path, and every node that leads to it.
        self.grams: list[tuple[int, ...]] = [tuple(context)[max(len(context) - tau, 0) :]]
        self.above = [0]
        self.first: dict[tuple[int, ...], int] = {}  # gram -> nodes that may be shared

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parent: int, token: int) -> int:
        """Append a child of a node; return its number. ValueError below a merged node."""
        if self.shared[parent] >= 0:
            raise ValueError(f"node {parent} shares the successors of node {self.shared[parent]}")
        self.parents.append(parent)
        self.tokens.append(token)
        self.shared.append(-1)
        gram = (*self.grams[parent], token)
        self.grams.append(gram[max(len(gram) - self.tau, 0) :])
        self.above.append(self.above[parent] | 1 << parent)
        return len(self.parents) - 1

    def merge(self, node: int) -> bool:
        """Let a leaf share the successors of the first occurrence of its gram; return whether there
        is one. If not, the node is such an occurrence for those that come later."""
        gram, bit = self.grams[node], 1 << node
        if len(gram) < self.tau:
            return False
        known = self.first.get(gram, 0)
        others = known & ~self.above[node]
        if not others:
            self.first[gram] = known | bit
            return False
        first = (others & -others).bit_length() - 1
        self.shared[node] = first
        for below, above in enumerate(self.above):
            if below == first or above >> first & 1:
                self.above[below] |= self.above[node] | bit
        return True

    def successors(self) -> list[tuple[int, ...]]:
        """What follows every node: its own children, or those of the node it shares with."""
        children = Topology(self.parents).children
        return [children[node if first < 0 else first] for node, first in enumerate(self.shared)]

    def unmerge(self, limit: int) -> Unmerged:
        """Copy what is shared below every node that shares it, breadth first, `limit` at most."""
        successors, count = self.successors(), len(self)
        parents, tokens, origins = list(self.parents), list(self.tokens), list(range(count))
        waiting = deque(node for node, first in enumerate(self.shared) if first >= 0)
        while waiting:
            node = waiting.popleft()
            for origin in successors[origins[node]]:
                if len(parents) == count + limit:
                    return Unmerged(parents, tokens, origins)
                waiting.append(len(parents))
                parents.append(node)
                tokens.append(self.tokens[origin])
                origins.append(origin)
        return Unmerged(parents, tokens, origins)


class GraphGrowth(Growth):
    """A tree that merges what it repeats."""

    def __init__(self, context: list[int], tau: int):
        self.graph = TokenGraph(context, tau)
        super().__init__(self.graph.tokens, self.graph.parents)

    def add(self, parent: int, token: int) -> int:
        return self.graph.add(parent, token)


class GSD(TSD):
    """Graph-structured drafting; `copies` nodes at most come from merged ones. shape: as of TSD.

    Pruning is as in TSD. A pruned child is neither merged nor shared with: it has no successors.
    """

    def __init__(self, student: Target, rows: int, capacity: int, tau: int, copies: int, **shape):
        super().__init__(student, rows, capacity, copies=copies, **shape)
        self.tau, self.copies = tau, copies

    def plant(self, row: int) -> GraphGrowth:
        return GraphGrowth(self.memory[row].tokens[-max(self.tau, 1) :], self.tau)

    def is_expanded(self, growth: GraphGrowth, child: int) -> bool:
        return not growth.graph.merge(child)

    def harvest(self, row: int, growth: GraphGrowth) -> Tree:
        tree = growth.graph.unmerge(self.copies)
        tokens = upload(tree.tokens[1:], self.student.device)
        return Tree(Topology(tree.parents), tokens, copies=len(tree.parents) - len(growth))
