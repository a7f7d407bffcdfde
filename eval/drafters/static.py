"""Static decoding trees of a SAR head: which ranks are drafted where, and in which pass.

Falcon, "custom-designed decoding tree": a node at depth d takes the token of a given rank from the
d-th distribution on its path. A head of block size k predicts k depths per pass, so depths
1..k come from the pass behind the last committed token, depths k+1..2k from a pass behind each
depth-k node that has children, and so on.

Every pass ranks `width` tokens of each of its distributions; all that is drafted lies in one row of
ranked tokens, where nodes and later passes find theirs by place:

    >>> tree = StaticTree([(0,), (1,), (0, 0), (0, 0, 0)], block_size=2)
    >>> tree.paths  # nodes 1, 2, .., depth first
    [(0,), (0, 0), (0, 0, 0), (1,)]
    >>> [(plan.depth, plan.width) for plan in tree.passes]  # 2 x 2 tokens, then 2 x 1 after (0, 0)
    [(0, 2), (2, 1)]
    >>> tree.choices.tolist()  # depth 1 at places 0 1, depth 2 at 2 3, depth 3 at 4, depth 4 at 5
    [0, 2, 4, 1]
    >>> tree.passes[1].blocks.tolist(), tree.sources  # what the second pass reads; of each node
    ([0, 2], (0, 1, 2, -1, -1))

Shapes: N nodes, E paths expanded in a pass, K block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from specdraft.eval.engine.tree import Topology
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError

Path = tuple[int, ...]  # ranks from the root, 0 = most probable


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of the head over E paths at once: the paths' nodes of the next K depths.

    The block of a path expanded here is the K tokens up to its end.
    Its K distributions are ranked, `width` tokens each: [E * K * width] in all.
    """

    depth: int  # of the nodes that the paths end at
    scratch: int  # drafted inputs that the passes before have read
    parents: Tensor  # [E], which path of the pass before each path continues
    blocks: Tensor  # [E * K], this pass's input among the ranked tokens of the one before
    visible: Tensor  # [E * K, scratch + E * K], which drafted inputs each input attends to
    width: int  # largest rank + 1


class StaticTree:
    """A tree of rank paths, cut into the passes of a head with block size K.

    Nodes are numbered depth first: the most probable path, and any that follows it for a while, is
    a prefix of the tree's cached tokens, and accepting it moves none of them.
    """

    def __init__(self, paths: Sequence[Path], block_size: int):
        """paths: prefix-closed, e.g. [(0,), (1,), (0, 0)]; ValueError when a parent is missing."""
        self.block_size = block_size
        self.paths = sorted(map(tuple, paths))
        index = {(): 0} | {path: node for node, path in enumerate(self.paths, start=1)}
        for path in self.paths:
            if path[:-1] not in index:
                raise ValueError(f"path {list(path)} has no parent {list(path[:-1])} in the tree")
        self.topology = Topology([-1, *(index[path[:-1]] for path in self.paths)])

    @classmethod
    def chain(cls, depth: int, block_size: int) -> "StaticTree":
        """The most probable token at every depth."""
        return cls([(0,) * length for length in range(1, depth + 1)], block_size)

    def check_vocabulary(self, target: Target) -> None:
        """Raise RecipeError for a tree that takes a rank that the target's vocabulary lacks."""
        rank = max(path[-1] for path in self.paths)
        if rank >= target.vocab_size:
            raise RecipeError(
                f"the tree takes the token of rank {rank}, and {target.name} has "
                f"{target.vocab_size} tokens; take another eval.tree, or drop its last siblings"
            )

    @cached_property
    def passes(self) -> list[Pass]:
        """The passes that fill the tree, in order."""
        return [self._plan(number) for number in range(len(self._expanded))]

    @cached_property
    def choices(self) -> Tensor:
        """[N - 1], place of each node's token among the ranked tokens of all passes."""
        return torch.tensor([self._place(path) for path in self.paths])

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Of every node, which distribution its children come from, counting those of all passes
        in order, E * K each; -1 for a leaf."""
        sources = [-1] * len(self.topology)
        for node, path in enumerate(self.paths, start=1):
            sources[self.topology.parents[node]] = self._distribution(path)
        return tuple(sources)

    def _distribution(self, path: Path) -> int:
        """Which distribution, counting those of all passes, a node's token is from."""
        number, offset = divmod(len(path) - 1, self.block_size)
        before = sum(map(len, self._expanded[:number]))
        expanded = self._expanded[number].index(path[: number * self.block_size])
        return (before + expanded) * self.block_size + offset

    def _place(self, path: Path) -> int:
        """Place of a node's token among the ranked tokens of all passes."""
        return self._starts[self._distribution(path)] + path[-1]

    @cached_property
    def _starts(self) -> list[int]:
        """Where the ranked tokens of every distribution begin."""
        sizes = zip(self._expanded, self._widths, strict=True)
        widths = [width for paths, width in sizes for _ in range(len(paths) * self.block_size)]
        return [0, *accumulate(widths)]

    @cached_property
    def _expanded(self) -> list[list[Path]]:
        """The paths that each pass expands."""
        ends = range(0, max(map(len, self.paths)), self.block_size)
        return [sorted({path[:end] for path in self.paths if len(path) > end}) for end in ends]

    @cached_property
    def _widths(self) -> list[int]:
        """How many tokens of each distribution a pass ranks."""
        widths = [0] * len(self._expanded)
        for path in self.paths:
            number = (len(path) - 1) // self.block_size
            widths[number] = max(widths[number], path[-1] + 1)
        return widths

    def _plan(self, number: int) -> Pass:
        size, expanded = self.block_size, self._expanded[number]
        if number == 0:
            alone, none = torch.zeros(1).long(), torch.zeros(0, dtype=torch.long)
            return Pass(0, 0, alone, none, torch.ones(size, size).bool(), self._widths[0])
        before, depth = self._expanded[number - 1], number * size
        # Keys: blocks drafted in earlier passes, then this pass's own; a block sees its ancestors.
        keys = [path for paths in self._expanded[1 : number + 1] for path in paths]
        sees = [[path[: len(key)] == key for key in keys] for path in expanded]
        inputs = [path[: depth - size + n + 1] for path in expanded for n in range(size)]
        first = self._starts[size * sum(map(len, self._expanded[: number - 1]))]
        return Pass(
            depth=depth,
            scratch=size * (len(keys) - len(expanded)),
            parents=torch.tensor([before.index(path[: depth - size]) for path in expanded]),
            blocks=torch.tensor([self._place(path) - first for path in inputs]),
            visible=torch.tensor(sees).repeat_interleave(size, 0).repeat_interleave(size, 1),
            width=self._widths[number],
        )
