"""Draft with a head what the moment is worth: the most probable nodes, and no pass too many.

Within a pass, level after level, the `width` most probable nodes get children, `siblings` each;
behind a pass the host looks, once, and reads on behind the most probable ends where that is worth
its time; at last the most probable nodes of all are verified, as many as are worth it
(eval/pricing/worth.py, eval/drafters/best_first.py).

Shapes: R rows, E paths of a pass, K block size, F nodes with children at a level, W the most of
them, C children of each, H hidden, V tokens drafted among.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.eval.drafters.best_first import SHARPNESS, Rewarded, Weighed, usual_width
from specdraft.eval.drafters.drawing import ranking
from specdraft.eval.drafters.head import HeadDrafter, Hidden
from specdraft.eval.drafters.pass_options import DEFAULT, PassOptions
from specdraft.eval.engine.sampling import most_probable
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.transfer import download, upload
from specdraft.eval.engine.tree import Tree
from specdraft.eval.pricing.cost import CostModel
from specdraft.eval.pricing.worth import Cut, Worth
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.passes.row import Block, weighed
from specdraft.models.sar.fusion import State
from specdraft.models.target import Target

MASKS = 64  # of passes over several paths that are kept


@dataclass
class Blocks(Weighed):
    """One row's draft while it grows, block after block. Node 0 is the root."""

    # Of every node, which distribution of its pass it was drawn from.
    origins: list[int] = field(default_factory=lambda: [-1])
    ends: list[int] = field(default_factory=lambda: [0])  # nodes that the last pass began behind
    deepest: list[int] = field(default_factory=list)  # the best of those that it ended with
    # Of every pass but the first, which path of the pass before each of its own continues.
    lineage: tuple[tuple[int, ...], ...] = ()

    @property
    def end_chances(self) -> list[float]:
        """Of the best ends of the last pass, descending."""
        return [self.chances[node] for node in self.deepest]

    def unfold(
        self,
        chances: list[list[float]],
        tokens: list[list[int]],
        opened: list[Sequence[int]],
        paths: int,
    ) -> None:
        """Add the nodes of a pass: the children of each node that has any, level after level.

        opened: of every level but the last, which of its children have children in turn. paths:
        how many ends are wanted.
        """
        front, origin = self.ends, 0
        for places in (*opened, None):
            first = len(self.parents)
            for number, node in enumerate(front, start=origin):
                self.sprout(node, tokens[number], chances[number])
                self.origins += [number] * len(tokens[number])
            origin += len(front)
            front = [first + place for place in places or ()]
        self.deepest = self.best_since(first, paths)

    def go_on(self, paths: int, size: int) -> list[int]:
        """Begin a pass behind the best ends: the nodes of their blocks of so many tokens."""
        blocks, known = [], {end: number for number, end in enumerate(self.ends)}
        for node in self.deepest[:paths]:
            block = [node]
            while len(block) < size:
                block.append(self.parents[block[-1]])
            blocks.append(block[::-1])
        self.lineage += (tuple(known[self.parents[block[0]]] for block in blocks),)
        self.ends = self.deepest[:paths]
        return [node for block in blocks for node in block]


class Drafted(NamedTuple):
    """The levels of a pass, of all rows: of every node with children, one after the other."""

    hidden: Tensor  # [R, .., H], what its distribution is made of
    chances: Tensor  # [R, .., C], of its children
    tokens: Tensor  # [R, .., C]
    opened: list[Tensor]  # of each level but the last, places [R, W] of those with children in turn

    @classmethod
    def of(cls, block: Block) -> "Drafted":
        """What a row's own pass drafts: the first child of each node has children."""
        return cls(*(part[None] for part in block), [])


class DynamicFalcon(Rewarded, HeadDrafter):
    """Draft best first, as much as is worth it.

    costs: of this machine; None: those of eval/pricing/worth.py. Of a draft at most: width, nodes
    of a level with children; siblings, children of each; paths that a pass reads; nodes; passes.
    """

    rules: frozenset[str] = frozenset()

    def __init__(
        self,
        head: FalconHead | Eagle3Head,
        target: Target,
        costs: CostModel | None = None,
        rows: int = 1,
        capacity: int = 2048,
        width: int | None = None,
        siblings: int = 4,
        paths: int = 2,
        nodes: int = 48,
        passes: int = 8,
        options: PassOptions = DEFAULT,
    ):
        if width is None:
            width = usual_width(target)
        depth = passes * head.config.block_size
        siblings = min(siblings, head.config.draft_vocab or target.vocab_size)
        reads = depth, paths * depth
        super().__init__(head, target, rows, capacity, *reads, siblings, options, SHARPNESS)
        self.width, self.paths, self.siblings = width, paths, siblings
        self.max_nodes = max(nodes, depth)
        self.worth = Worth(costs, self.k, self.max_nodes)
        self._masks: dict[tuple, Hidden] = {}  # of a lineage's last pass

    def grow(self, rows: list[int]) -> list[Tree]:
        self.worth.begin(rows, sum(self.pool.lengths[row] for row in rows) / len(rows))
        growths = {row: Blocks([self.memory[row].ahead[-1]]) for row in self.worth.starts()}
        if not growths:
            return [self._no_draft] * len(rows)
        self.make_passes(growths)
        return self.harvest(rows, growths)

    def harvest(self, rows: list[int], growths: dict[int, Blocks]) -> list[Tree]:
        """What is worth to be verified of the rows' drafts, where they have any."""
        cut = self.worth.choose([growth.chances[1:] for growth in growths.values()])
        trees = self._trees(growths, cut)
        return [trees.get(row, self._no_draft) for row in rows]

    def _trees(self, growths: dict[int, Blocks], cut: Cut) -> dict[int, Tree]:
        """What is verified of each row's draft, where anything is."""
        most, tokens, shapes = min(cut.most, self.max_nodes), [], {}
        for row, growth in growths.items():
            topology, order = growth.pruned(cut.least, most)
            if len(order) > 1:
                shapes[row] = topology
                tokens += [growth.tokens[node] for node in order[1:]]
        # Of all rows at once: a copy takes as long as the rest of a tree.
        parts = upload(tokens, self.target.device).split([len(one) - 1 for one in shapes.values()])
        return {row: Tree(shapes[row], part) for row, part in zip(shapes, parts, strict=True)}

    def make_passes(self, growths: dict[int, Blocks]) -> None:
        """Let passes follow each other, each over the rows that it is worth it for."""
        with Stopwatch() as watch:
            self._grow([*growths], [*growths.values()])
        self.seconds += watch.seconds

    def _grow(self, rows: list[int], growths: list[Blocks]) -> None:
        block, state = None, ()  # of a row that goes alone; of the fusion
        if self.width == 1 and self.goes_alone(rows):
            block = self.read_alone(rows[0])
            drafted = Drafted.of(block)
        else:
            slots, state = self._read(rows)
            drafted = self._choose(rows, growths, slots, 0)
        self.forwards += len(rows)
        for depth in range(self.k, self.depth + 1, self.k):
            self._unfold(growths, drafted)
            if depth == self.depth:
                return
            chosen, paths = self.going_on(rows, growths)
            if not chosen:
                return
            rows, growths = [rows[n] for n in chosen], [growths[n] for n in chosen]
            if block and paths == 1:
                growths[0].go_on(paths, self.k)
                block = self.go_on_alone(rows[0], block, depth)
                drafted = Drafted.of(block)
            else:
                block, place = None, (depth, drafted.hidden, state)
                slots, state = self._extend(rows, growths, chosen, paths, *place)
                drafted = self._choose(rows, growths, slots, depth)
            self.forwards += len(rows)

    def going_on(self, rows: list[int], growths: list[Blocks]) -> tuple[list[int], int]:
        """Which rows another pass is made for, by their numbers, and behind how many ends each."""
        return self.worth.goes_on(rows, [own.end_chances for own in growths])

    def _extend(
        self,
        rows: list[int],
        growths: list[Blocks],
        chosen: list[int],  # the rows' numbers in the pass before
        paths: int,
        depth: int,
        drawn: Tensor,  # [R, .., H], of the pass before
        state: State,
    ) -> tuple[Tensor, State]:
        """Read the best blocks of every row; return their slots [R, E * K, H] and end states."""
        tokens, origins, parents, before = [], [], [], len(growths[0].ends)
        scratch = self.k * sum(map(len, growths[0].lineage))
        for number, growth in zip(chosen, growths, strict=True):
            nodes = growth.go_on(paths, self.k)
            tokens += [growth.tokens[node] for node in nodes]
            origins += [number * drawn.shape[1] + growth.origins[node] for node in nodes]
            parents += [number * before + parent for parent in growth.lineage[-1]]
        device, count = drawn.device, len(rows)
        hidden = drawn.flatten(0, 1).index_select(0, upload(origins, device))
        if state:
            where = upload(parents, device)
            state = tuple(part.index_select(1, where) for part in state)
        return self.read_blocks(
            rows,
            upload(tokens, device).view(count, -1),
            hidden.view(count, -1, hidden.shape[-1]),
            state,
            (depth, scratch),
            [self._hidden(growth.lineage) for growth in growths],
        )

    def _hidden(self, lineage: tuple[tuple[int, ...], ...]) -> Hidden:
        """The masks of the last pass's blocks: each sees its ancestors and itself."""
        if max(map(len, lineage)) == 1:
            return None, None
        if lineage not in self._masks:
            if len(self._masks) == MASKS:
                self._masks.clear()
            sees: list[list[bool]] = [[]]  # of every path of a pass, which of all blocks
            for parents in lineage:
                own = torch.eye(len(parents)).bool().tolist()
                sees = [[*sees[parent], *row] for parent, row in zip(parents, own, strict=True)]
            blocks = torch.tensor(sees).repeat_interleave(self.k, 0)
            self._masks[lineage] = self.hiding(blocks.repeat_interleave(self.k, 1))
        return self._masks[lineage]

    # -- one pass --------------------------------------------------------------------------------

    def _choose(
        self, rows: list[int], growths: list[Blocks], slots: Tensor, depth: int
    ) -> "Drafted":
        """Draft the K levels behind the ends of every row, given the slots [R, E * K, H] there."""
        blocks = slots.unflatten(1, (-1, self.k)).unbind(2)  # of each level [R, E, H]
        if self.width == 1:
            drawn, scores, opened = self._chains(rows, blocks, depth)
        else:
            starts = [[growth.chances[end] for end in growth.ends] for growth in growths]
            reach = upload(starts, slots.device, torch.float32)
            drawn, scores, opened = self._beams(rows, blocks, depth, reach)
        chances, places = weighed(torch.cat(scores, 1), self.siblings, SHARPNESS)
        tokens = self.vocabulary.tokens(places)
        return Drafted(torch.cat(drawn, 1), chances, tokens, opened)

    def _unfold(self, growths: list[Blocks], drafted: "Drafted") -> None:
        """Bring a pass to the host, its one wait, and add its nodes to every row's tree."""
        _, *parts, opened = drafted
        chances, tokens, *places = (p.tolist() for p in download(*parts, *opened))
        for number, growth in enumerate(growths):
            start = max(growth.chances[end] for end in growth.ends)
            first = range(0, len(growth.ends) * self.siblings, self.siblings)
            own = [part[number] for part in places] or [first] * (self.k - 1)
            growth.unfold(chances[number], tokens[number], own, self.paths)
            self.worth.passed(start, growth.chances[growth.deepest[0]])

    def _chains(
        self, rows: list[int], blocks: Sequence[Tensor], depth: int
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """One node of each level behind each path has children, the most probable.

        Returns, of every level, what the distributions are made of [R, E, H] and their scores
        [R, E, V]; no places, since a node's first child is the one.
        """
        drawn, scores = [], []
        for level, hidden in enumerate(blocks):
            if level and self.head.coupling is not None:
                ahead = self.vocabulary.tokens(most_probable(scores[-1]))
                hidden = self.head.couple(hidden, drawn[-1], self.embed(ahead))
            drawn.append(hidden)
            scores.append(self._scores(rows, hidden, depth + level + 1))
        return drawn, scores, []

    def _beams(
        self, rows: list[int], blocks: Sequence[Tensor], depth: int, reach: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The W most probable nodes of each level, behind whichever path, have children; reach:
        probabilities of the paths [R, E].

        Returns, of every level, what the distributions are made of [R, F, H], their scores
        [R, F, V] and, but for the last, the places of these nodes among the level's [R, W].
        """
        drawn, scores, opened = [], [], []
        front = None  # of the nodes: tokens, parents in the level before, paths; [R, F] each
        for level, hidden in enumerate(blocks):
            if front is not None:
                tokens, parents, paths = front
                hidden = _pick(hidden, paths)
                if self.head.coupling is not None:
                    ahead = self.embed(self.vocabulary.tokens(tokens))
                    hidden = self.head.couple(hidden, _pick(drawn[-1], parents), ahead)
            drawn.append(hidden)
            scores.append(self._scores(rows, hidden, depth + level + 1))
            if level + 1 < self.k:
                chances, best = weighed(scores[-1], self.siblings, SHARPNESS)
                ends = (chances * reach[..., None]).flatten(1)
                reach, places = ends.topk(min(self.width, ends.shape[1]))
                parents = places // self.siblings
                paths = parents if front is None else paths.gather(1, parents)
                front = best.flatten(1).gather(1, places), parents, paths
                opened.append(places)
        return drawn, scores, opened

    def _scores(self, rows: list[int], hidden: Tensor, depth: int) -> Tensor:
        """What tokens behind nodes at a depth are ranked by, given what the nodes predict
        [R, F, H]: [R, F, V], float32."""
        logits = self.vocabulary.logits(hidden * self.head.config.feature_scale).float()
        for number, row in enumerate(rows):
            request = self.memory[row].request
            if request.temperature > 0:
                position = self.pool.lengths[row] + depth
                where = torch.full((hidden.shape[1],), position, device=hidden.device)
                logits[number] = ranking(logits[number], request, where, self.vocabulary.ids)
        return logits


def _pick(nodes: Tensor, places: Tensor) -> Tensor:
    """Pick the nodes [R, W, H] at `places` [R, W] of each row out of all of them [R, F, H]."""
    if len(nodes) == 1:
        return nodes.index_select(1, places[0])
    return nodes.gather(1, places[..., None].expand(-1, -1, nodes.shape[-1]))
