"""Trees grown best first, and those of a draft LM: as much as the moment is worth.

A node is as probable as all tokens on its path together (EAGLE-2, arXiv 2406.16858, whose trees
grow so). A draft LM reads, level after level, the most probable nodes of the last one, where that
is worth its time; at last the most probable nodes of all are verified, as many as are worth it
(eval/pricing/worth.py).

Nodes are chosen by their probability, so a draft is no sample: the acceptance rules are the walks,
which take any draft.

A drafter that was trained towards the target's distribution is surer of the target's choice than
its probabilities say: where a head's are 0.45, 0.65, 0.85, greedy choices agree in 0.79, 0.91, 0.99
of cases (stories3M; the tiny target alike). Half the temperature says so.

Shapes: R rows, E nodes that are read at a level, C children of each, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp

from torch import Tensor

from specdraft.eval.drafters.level import Growth, LevelDrafter
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.transfer import download, upload
from specdraft.eval.engine.tree import Topology, Tree, path_to, shape
from specdraft.eval.pricing.cost import CostModel
from specdraft.eval.pricing.worth import Cut, Worth
from specdraft.models.passes.row import WEIGHED
from specdraft.models.target import Target

SHARPNESS = 2.0  # inverse temperature of a drafter's probabilities


@dataclass
class Weighed(Growth):
    """A tree while it grows, whose nodes know how probable their paths are."""

    chances: list[float] = field(default_factory=lambda: [1.0])

    def sprout(self, node: int, tokens: list[int], chances: list[float]) -> None:
        """Append a node's children, the most probable first, each with its own probability."""
        reach = self.chances[node]
        self.parents += [node] * len(tokens)
        self.tokens += tokens
        self.chances += [reach * chance for chance in chances]

    def graft(self, node: int, tokens: list[int], chances: list[float]) -> None:
        """Append a chain behind a node, each token with how probable its whole path is."""
        first = len(self.parents)
        self.parents += [node, *range(first, first + len(tokens) - 1)][: len(tokens)]
        self.tokens += tokens
        self.chances += chances

    def leaves(self, least: float) -> list[int]:
        """Nodes without children that are at least so probable."""
        inner = {*self.parents}
        likely = (node for node, chance in enumerate(self.chances) if chance >= least)
        return [node for node in likely if node not in inner]

    def path(self, node: int) -> list[int]:
        """The tokens from behind the root up to a node."""
        return [self.tokens[one] for one in path_to(node, self.parents)]

    def best_since(self, first: int, count: int) -> list[int]:
        """The most probable of the nodes from `first` on."""
        nodes = range(first, len(self.parents))
        return sorted(nodes, key=self.chances.__getitem__, reverse=True)[:count]

    def pruned(self, least: float, most: int) -> tuple[Topology, tuple[int, ...]]:
        """What is left of at least some probability, the `most` most probable nodes at most, and
        which nodes these are, the root first: depth first, as a static tree's.

        No child is more probable than its parent: what is left is a tree.
        """
        kept = [node for node, chance in enumerate(self.chances) if chance >= least]
        if len(kept) > most + 1:  # of equals, those before: parents are
            kept = sorted(sorted(kept, key=self.chances.__getitem__, reverse=True)[: most + 1])
        return _depth_first((*kept[1:],), (*map(self.parents.__getitem__, kept[1:]),))


@lru_cache(maxsize=4096)
def _depth_first(
    nodes: tuple[int, ...], parents: tuple[int, ...]
) -> tuple[Topology, tuple[int, ...]]:
    """The tree of a root and some nodes, and their order in it; kept, as a few come again."""
    children: dict[int, list[int]] = {}
    for node, parent in zip(nodes, parents, strict=True):
        children.setdefault(parent, []).append(node)
    order, found, waiting = [], [], [(0, -1)]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(order)) for child in children.get(node, ())[::-1]]
        found.append(parent)
        order.append(node)
    return shape((*found,)), (*order,)


def _chances(ranked: Sequence[float]) -> list[float]:
    """Probabilities of tokens, the most probable first, for log-probabilities but for a constant.

    >>> [round(chance, 3) for chance in _chances([1.0, 1.0, 0.0])]
    [0.468, 0.468, 0.063]
    """
    shares = [exp(SHARPNESS * (score - ranked[0])) for score in ranked]
    whole = sum(shares)
    return [share / whole for share in shares]


class Rewarded:
    """What rows begin and commit is told to `worth`, beside the drafter that this is mixed into."""

    worth: Worth

    def start(self, row: int, request: Request) -> None:
        super().start(row, request)
        self.worth.admit(row)

    def move(self, row: int, to: int) -> None:
        super().move(row, to)
        self.worth.move(row, to)

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        super().observe(row, tokens, features)
        self.worth.earn(row, len(tokens))


def usual_width(target: Target) -> int:
    """Nodes of a level that get children: where a level takes its launches, more take no longer,
    and a single path can be replayed."""
    return 1 if target.device.type == "cpu" or target.replays else 4


class BestFirst(Rewarded, LevelDrafter):
    """Draft best first with a draft LM, as much as is worth it.

    paths: nodes that are read at a level at most. costs: of this machine; None: those of
    eval/pricing/worth.py.
    """

    def __init__(
        self,
        student: Target,
        rows: int = 1,
        capacity: int = 2048,
        costs: CostModel | None = None,
        depth: int = 10,
        out_degree: int = 4,
        nodes: int = 48,
        paths: int | None = None,
    ):
        if paths is None:
            paths = usual_width(student)
        # What is read is placed behind the cache, whether it is verified or not.
        super().__init__(student, rows, capacity, depth, max(nodes, paths * depth))
        self.nodes, self.paths = nodes, paths
        self.width = min(out_degree, student.vocab_size)
        self.weighed = min(max(out_degree, WEIGHED), student.vocab_size)
        self.worth = Worth(costs, 1, nodes)

    def worthwhile(self, rows: list[int]) -> list[int]:
        self.worth.begin(rows, sum(map(self.num_committed_tokens, rows)) / len(rows))
        return self.worth.starts()

    def grow(self, rows: list[int], logits: Tensor) -> list[Tree]:
        if len(rows) == 1 and self.paths == 1:
            return [self._grow_alone(rows[0], logits)]
        growths = {row: Weighed(self.memory[row].tokens[-1:]) for row in rows}
        opened = {row: [0] for row in rows}
        for depth in range(1, self.depth + 1):
            opened = self.expand(growths, opened, logits, depth)
            if not opened or depth == self.depth:
                break
            logits = self._read_level(growths, opened, depth)
        cut = self.worth.choose([growth.chances[1:] for growth in growths.values()])
        return [self._pruned(row, growth, cut) for row, growth in growths.items()]

    def _grow_alone(self, row: int, logits: Tensor) -> Tree:
        """`grow` for a single row and one path, in half of the time on the host: of each level's
        children the first alone is read, and the others can only be leaves."""
        width, worth, reach = self.width, self.worth, 1.0
        tokens, chances = [], []  # of all children, level after level
        for depth in range(1, self.depth + 1):
            ranked = logits if self.greedy else self.rank({row: 1}, logits, depth)
            best, before = ranked.topk(self.weighed), reach
            (likely,), (scores,) = best.indices.tolist(), best.values.tolist()
            tokens += likely[:width]
            chances += [before * chance for chance in _chances(scores)[:width]]
            reach = chances[-width]
            worth.passed(before, reach)
            if depth == self.depth or not worth.goes_on([row], [[reach]])[0]:
                break
            logits = self.extend([row], best.indices.select(1, 0), depth)
        least, _ = worth.choose([chances])
        kept = sum(chance >= least for chance in chances[::width])  # of the chain
        leaves = [n for n, chance in enumerate(chances) if n % width and chance >= least]
        leaves = leaves[: self.nodes - kept]
        parents = (*range(-1, kept), *(leaf // width for leaf in leaves))
        drafted = [*tokens[: kept * width : width], *(tokens[leaf] for leaf in leaves)]
        # As in `_pruned`, what was read and is not verified has no number.
        self.memory[row].cached = [node if node <= kept else -1 for node in range(1, depth)]
        return Tree(shape(parents), upload(drafted, self.student.device))

    def expand(
        self, growths: dict[int, Weighed], opened: dict[int, list[int]], logits: Tensor, depth: int
    ) -> dict[int, list[int]]:
        counts = {row: len(nodes) for row, nodes in opened.items()}
        best = self.rank(counts, logits, depth).topk(self.weighed)
        tokens, scores = (part.tolist() for part in download(best.indices, best.values))
        families = zip(tokens, map(_chances, scores), strict=True)
        found = {}
        for row, nodes in opened.items():
            growth, first = growths[row], len(growths[row])
            for node in nodes:
                growth.sprout(node, *(part[: self.width] for part in next(families)))
            found[row] = growth.best_since(first, self.paths)
            self.worth.passed(growth.chances[nodes[0]], growth.chances[found[row][0]])
        rows = [*found]
        ends = [[growths[row].chances[n] for n in nodes] for row, nodes in found.items()]
        chosen, paths = self.worth.goes_on(rows, ends)
        return {rows[number]: found[rows[number]][:paths] for number in chosen}

    def _pruned(self, row: int, growth: Weighed, cut: Cut) -> Tree:
        """The tree to verify; what was read of it is found again by its new numbers."""
        topology, order = growth.pruned(cut.least, min(cut.most, self.nodes))
        number, memory = {node: new for new, node in enumerate(order)}, self.memory[row]
        # What is not verified cannot be accepted, and no node has its number.
        memory.cached = [number.get(node, -1) for node in memory.cached]
        tokens = upload([growth.tokens[node] for node in order[1:]], self.student.device)
        return Tree(topology, tokens)
