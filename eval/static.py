"""Static decoding trees of a SAR head: which ranks are drafted where, and in which pass.

Falcon, "custom-designed decoding tree": a node at depth d takes the token of a given rank from the
d-th distribution on its path. A head of block size k predicts k depths per pass, so depths
1..k come from the pass behind the last committed token, depths k+1..2k from a pass behind each
depth-k node that has children, and so on.

Shapes: N nodes, E paths expanded in a pass, K block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdraft.eval.tree import Topology

Path = tuple[int, ...]  # ranks from the root, 0 = most probable


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of the head over E paths at once, and the tree nodes it fills.

    A path expanded here ends at a node of depth `number * K`; its block is the K tokens up to it.
    """

    parents: Tensor  # [E], which path of the pass before each path continues
    # [E * K], which of the nodes that the pass before filled are this pass's input; first: none
    blocks: Tensor
    visible: Tensor  # [E * K, scratch + E * K], which drafted inputs each input attends to
    first: int  # the first of the M nodes filled, which are numbered in a row
    choices: Tensor  # [M], place of each node's token among the top ranks, [E * K * width]
    width: int  # largest rank + 1


class StaticTree:
    """A tree of rank paths, cut into the passes of a head with block size K."""

    def __init__(self, paths: Sequence[Path], block_size: int):
        """paths: prefix-closed, e.g. [(0,), (1,), (0, 0)]; ValueError when a parent is missing."""
        ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        self.block_size = block_size
        self.index = {(): 0} | {path: node for node, path in enumerate(ordered, start=1)}
        for path in ordered:
            if path[:-1] not in self.index:
                raise ValueError(f"path {list(path)} has no parent {list(path[:-1])} in the tree")
        self.topology = Topology([-1, *(self.index[path[:-1]] for path in ordered)])
        self.paths = ordered

    @classmethod
    def chain(cls, depth: int, block_size: int) -> "StaticTree":
        """The most probable token at every depth."""
        return cls([(0,) * length for length in range(1, depth + 1)], block_size)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Of every node, which distribution its children come from, counting those of all passes
        in order, E * K each; -1 for a leaf."""
        sources, before = [-1] * len(self.topology), 0
        for plan in self.passes:
            for number, choice in enumerate(plan.choices.tolist()):
                parent = self.topology.parents[plan.first + number]
                sources[parent] = before + choice // plan.width
            before += len(plan.parents) * self.block_size
        return tuple(sources)

    @cached_property
    def passes(self) -> list[Pass]:
        """The passes that fill the tree, in order."""
        passes, expanded, scratch = [], [()], []
        while expanded:
            passes.append(self._plan(expanded, scratch))
            scratch = scratch + expanded if passes[1:] else []
            depth = len(passes) * self.block_size
            inner = {path[:depth] for path in self.paths if len(path) > depth}
            expanded = sorted(inner)
        return passes

    def _plan(self, expanded: list[Path], scratch: list[Path]) -> Pass:
        size, depth = self.block_size, len(expanded[0])
        before = sorted({path[: depth - size] for path in expanded}) if depth else []
        filled = [path for path in self.paths if depth < len(path) <= depth + size]
        width = max(path[-1] for path in filled) + 1
        sources = [expanded.index(path[:depth]) * size + len(path) - depth - 1 for path in filled]
        # Keys: blocks drafted in earlier passes, then this pass's own; a block sees its ancestors.
        keys = [*scratch, *expanded]
        sees = [[path[: len(key)] == key for key in keys] for path in expanded]
        visible = torch.tensor(sees).repeat_interleave(size, 0).repeat_interleave(size, 1)
        # A pass fills whole depths, and nodes are numbered depth by depth.
        first = {len(path): self.index[path] for path in reversed(self.paths)}
        inputs = [path[: depth - size + n + 1] for path in expanded for n in range(size) if depth]
        blocks = [self.index[path] - first[depth - size + 1] for path in inputs]
        return Pass(
            parents=torch.tensor([before.index(path[: depth - size]) for path in expanded])
            if depth
            else torch.zeros(1, dtype=torch.long),
            blocks=torch.tensor(blocks).long(),
            visible=visible,
            first=first[depth + 1],
            choices=torch.tensor(
                [source * width + path[-1] for source, path in zip(sources, filled, strict=True)]
            ),
            width=width,
        )
