"""Draft trees level by level with a draft LM: the loop that all of them share, and TSD.

A level is one forward over the open nodes of all rows, each of which sees the committed tokens, its
ancestors and itself: tree attention in the drafter. The host reads every level, since what is read
next depends on it. A strategy is `expand`: which children the open nodes get, and which of those
are open in turn.

Shapes: E open nodes of all rows, V vocabulary, W children per node.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.eval.drafters.drawing import draws_of
from specdraft.eval.drafters.lm import LMDrafter
from specdraft.eval.engine.plan import CAUSAL, Segment
from specdraft.eval.engine.transfer import download, upload
from specdraft.eval.engine.tree import Topology, Tree, path_to
from specdraft.models.target import Target


@dataclass
class Growth:
    """One row's tree while it grows, on the host. Node 0 is the root, the last committed token."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    # What rejection rules will ask for, where tokens are samples: as in `Draws`.
    probs: list[Tensor] = field(default_factory=list)
    sources: list[int] = field(default_factory=lambda: [-1])

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parent: int, token: int) -> int:
        """Append a child; return its number."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.sources.append(-1)
        return len(self.parents) - 1

    def drawn_from(self, nodes: list[int], probs: Tensor | None) -> None:
        """Remember the distributions [len(nodes), V] of the nodes' children; None: not samples."""
        if probs is None:
            return
        first = sum(len(known) for known in self.probs)
        for number, node in enumerate(nodes):
            self.sources[node] = first + number
        self.probs.append(probs)


Open = dict[int, list[int]]  # row -> nodes that are read, or expanded, together


class LevelDrafter(LMDrafter):
    """Grow all rows' trees by one level per forward, down to `depth`."""

    def plant(self, row: int) -> Growth:
        """A tree of a root."""
        return Growth(self.memory[row].tokens[-1:])

    def expand(self, growths: dict[int, Growth], opened: Open, logits: Tensor, depth: int) -> Open:
        """Add children, at a depth, below the open nodes, given the logits [E, V] after them;
        return those that have to be read."""
        raise NotImplementedError

    def harvest(self, row: int, growth: Growth) -> Tree:
        """The tree to verify."""
        tokens = upload(growth.tokens[1:], self.student.device)
        draws = draws_of(self.memory[row].request, growth.probs, growth.sources)
        return Tree(Topology(growth.parents), tokens, draws)

    def grow(self, rows: list[int], logits: Tensor) -> list[Tree]:
        growths = {row: self.plant(row) for row in rows}
        opened: Open = {row: [0] for row in rows}
        for depth in range(1, self.depth + 1):
            opened = self.expand(growths, opened, logits, depth)
            opened = {row: nodes for row, nodes in opened.items() if nodes}
            if not opened or depth == self.depth:
                break
            logits = self._read_level(growths, opened, depth)
        return [self.harvest(row, growths[row]) for row in rows]

    def _read_level(self, growths: dict[int, Growth], opened: Open, depth: int) -> Tensor:
        """Read the open nodes, all of one depth; return the logits [E, V] after them."""
        ids, positions, segments = [], [], []
        for row, nodes in opened.items():
            ids += [growths[row].tokens[node] for node in nodes]
            positions += [self.num_committed_tokens(row) + depth - 1] * len(nodes)
            segments.append(self._segment(row, growths[row], nodes))
        return self.forward(upload(ids, self.student.device), positions, segments)

    def _segment(self, row: int, growth: Growth, nodes: list[int]) -> Segment:
        """Place nodes behind what is cached of a row; each sees its ancestors and itself."""
        cached, length = self.memory[row].cached, self.pool.lengths[row]
        start = length + len(cached)
        cached += nodes
        if len(nodes) == 1 and len(path_to(nodes[0], growth.parents)) == len(cached):
            return Segment(row, start, 1, CAUSAL)  # a chain so far: it sees all that was read
        slots = {node: slot for slot, node in enumerate(cached)}
        paths = (path_to(node, growth.parents) for node in nodes)
        seen = [(n, slots[node]) for n, path in enumerate(paths) for node in path]
        hidden = torch.ones(len(nodes), len(cached), dtype=torch.bool)
        hidden[tuple(torch.tensor(seen).T)] = False
        bias = torch.zeros(len(nodes), length + len(cached), dtype=self.student.dtype)
        bias[:, length:].masked_fill_(hidden, float("-inf"))
        return Segment(row, start, len(nodes), bias.to(self.student.device))


class TSD(LevelDrafter):
    """Tree-structured drafting: the `out_degree` best children of every open node (GSD, section 3).

    With q the student's probability of a child and m the largest among its siblings, a child is
    kept but not expanded where q < theta_prob, and where q < theta_sib * m; with `drop_siblings`
    the latter is not even kept. Drafting ends at `nodes` nodes. Under shared noise q is what is
    left of it once the noise is known (`drawing.ranking`).

    Children are chosen by their probability, so a tree is never a sample: no rule that rejects.
    """

    def __init__(
        self,
        student: Target,
        rows: int = 1,
        capacity: int = 2048,
        depth: int = 10,
        out_degree: int = 4,
        theta_prob: float = 0.2,
        theta_sib: float = 0.3,
        drop_siblings: bool = False,
        nodes: int = 256,
        copies: int = 0,
    ):
        super().__init__(student, rows, capacity, depth, nodes + copies)
        self.width, self.nodes = min(out_degree, student.vocab_size), nodes
        self.theta_prob, self.theta_sib, self.drop_siblings = theta_prob, theta_sib, drop_siblings

    def expand(self, growths: dict[int, Growth], opened: Open, logits: Tensor, depth: int) -> Open:
        counts = {row: len(nodes) for row, nodes in opened.items()}
        best = self.rank(counts, logits, depth).softmax(-1).topk(self.width)
        chances, tokens = (part.tolist() for part in download(best.values, best.indices))
        families = zip(tokens, chances, strict=True)
        opens: Open = {}
        for row, nodes in opened.items():
            sprouted = (self._add_children(growths[row], node, *next(families)) for node in nodes)
            opens[row] = [child for children in sprouted for child in children]
        return opens

    def _add_children(
        self, growth: Growth, node: int, tokens: list[int], chances: list[float]
    ) -> list[int]:
        """Add a node's children, the most probable first; return those to expand."""
        opened = []
        for token, chance in zip(tokens, chances, strict=True):
            weak = chance < self.theta_sib * chances[0]
            if len(growth) > self.nodes or (weak and self.drop_siblings):
                break  # the later ones are no more probable
            child = growth.add(node, token)
            if chance >= self.theta_prob and not weak and self.is_expanded(growth, child):
                opened.append(child)
        return opened

    def is_expanded(self, growth: Growth, child: int) -> bool:
        """Whether a child that is probable enough is expanded."""
        return True
