"""GSD: draft a token graph with a draft LM, so that a phrase that comes again is drafted once.

Graph-structured speculative decoding (ACL Findings 2024). The tree of TSD, but a probable child
that is tau-redundant (eval/drafters/token_graph.py) is not read: what follows it is copied from its
first occurrence, before verification. Copies have no cache entry: an accepted one is read at the
next draft, as any other token that the draft did not foresee.
"""

from specdraft.eval.drafters.level import TSD, Growth
from specdraft.eval.drafters.token_graph import TokenGraph
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology, Tree
from specdraft.models.target import Target


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
