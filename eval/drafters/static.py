"""Static decoding trees of a SAR head: which ranks are drafted where, and in which pass.

Falcon, "custom-designed decoding tree": a node at depth d takes the token of a given rank from the
d-th distribution on its path. A head of block size k predicts k depths per pass, so depths
1..k come from the pass behind the last committed token, depths k+1..2k from a pass behind each
depth-k node that has children, and so on.

A pass makes its choices in rounds: all of them at once or, where the slots of a block are coupled,
depth after depth, a distribution for every node that has children. Every round ranks `width`
tokens of each of its distributions; all that is drafted lies in one row of ranked tokens, where
nodes, rounds and later passes find theirs by place:

    >>> tree = StaticTree([(0,), (1,), (0, 0), (0, 0, 0)], block_size=2)
    >>> tree.paths  # nodes 1, 2, .., depth first
    [(0,), (0, 0), (0, 0, 0), (1,)]
    >>> [[(r.slots.tolist(), r.width) for r in p.rounds] for p in tree.passes]
    [[([0, 1], 2)], [([0], 1)]]
    >>> tree.choices.tolist()  # depth 1 at places 0 1, depth 2 at 2 3, depth 3 at 4
    [0, 2, 4, 1]
    >>> tree.passes[1].blocks.tolist(), tree.sources  # what the second pass reads; of each node
    ([0, 2], (0, 1, 2, -1, -1))
    >>> coupled = StaticTree(tree.paths, block_size=2, coupled=True)
    >>> [[(r.slots.tolist(), r.width) for r in p.rounds] for p in coupled.passes]
    [[([0], 2), ([1], 1)], [([0], 1)]]

Shapes: N nodes, E paths expanded in a pass, K block size, D distributions of a round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from specdraft.eval.engine.tree import Topology
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.static_trees import load_tree_paths, tree_block_size

Path = tuple[int, ...]  # ranks from the root, 0 = most probable
# Behind which expanded path; and which slot of its block or, coupled, the path within the block.
Distribution = tuple[Path, int | Path]


@dataclass(frozen=True, eq=False)
class Round:
    """Distributions of a pass that are ranked together, `width` tokens each: [D * width].

    In a first round every one stands by itself; in a later one it is that of a slot which hears
    the token chosen before, and goes on from a distribution of the round before.
    """

    depth: int  # the least of the depths
    slots: Tensor  # [D], of the E * K slots of the pass
    depths: Tensor  # [D], of the nodes drawn from each
    before: Tensor | None  # [D], among the distributions of the round before; None: the first
    tokens: Tensor | None  # [D], the token before, among the ranked tokens of that round
    width: int  # largest rank + 1


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of the head over E paths at once: the paths' nodes of the next K depths.

    The block of a path expanded here is the K tokens up to its end. Its input i is a token of the
    pass before and the feature that this token was drawn from.
    """

    depth: int  # of the nodes that the paths end at
    scratch: int  # drafted inputs that the passes before have read
    parents: Tensor  # [E], which path of the pass before each path continues
    blocks: Tensor  # [E * K], this pass's tokens among the ranked tokens of the one before
    features: Tensor  # [E * K], this pass's features among the distributions of the one before
    visible: Tensor  # [E * K, scratch + E * K], which drafted inputs each input attends to
    rounds: tuple[Round, ...]


class StaticTree:
    """A tree of rank paths, cut into the passes of a head with block size K.

    Nodes are numbered depth first: the most probable path, and any that follows it for a while, is
    a prefix of the tree's cached tokens, and accepting it moves none of them.
    """

    def __init__(self, paths: Sequence[Path], block_size: int, coupled: bool = False):
        """paths: prefix-closed, e.g. [(0,), (1,), (0, 0)]; ValueError when a parent is missing.

        coupled: whether a slot hears the token before it, so that every node with children has a
        distribution of its own; else the nodes of a depth behind the same pass share theirs.
        """
        self.block_size, self.coupled = block_size, coupled
        self.paths = sorted(map(tuple, paths))
        index = {(): 0} | {path: node for node, path in enumerate(self.paths, start=1)}
        for path in self.paths:
            if path[:-1] not in index:
                raise ValueError(f"path {list(path)} has no parent {list(path[:-1])} in the tree")
        self.topology = Topology([-1, *(index[path[:-1]] for path in self.paths)])

    @classmethod
    def of_file(cls, name: str, block_size: int) -> "StaticTree":
        """The tree of a file, or a bundled one. Raises RecipeError where it is none, or says that
        it was made for other blocks."""
        wanted = tree_block_size(name)
        if wanted not in (None, block_size):
            raise RecipeError(
                f"the tree {name} was made for blocks of {wanted}, and the head has blocks of "
                f"{block_size}; take a tree for these, or fit one: eval/fit.py"
            )
        return cls(load_tree_paths(name), block_size)

    @classmethod
    def chain(cls, depth: int, block_size: int) -> "StaticTree":
        """The most probable token at every depth."""
        return cls([(0,) * length for length in range(1, depth + 1)], block_size)

    def check_vocabulary(self, target: Target, drafted: int | None = None) -> None:
        """Raise RecipeError for a tree that takes a rank that the vocabulary lacks, be it the
        target's or that of a head that drafts among so many tokens."""
        rank, size = max(path[-1] for path in self.paths), drafted or target.vocab_size
        if rank >= size:
            whose = f"the head drafts among {size}" if drafted else f"{target.name} has {size}"
            raise RecipeError(
                f"the tree takes the token of rank {rank}, and {whose} tokens; take another "
                "eval.tree, or drop its last siblings"
            )

    @cached_property
    def passes(self) -> list[Pass]:
        """The passes that fill the tree, in order."""
        return [self._plan(number) for number in range(len(self._expanded))]

    @cached_property
    def is_narrow(self) -> bool:
        """Whether no node has children but those of the most probable path."""
        return not any(any(path[:-1]) for path in self.paths)

    @cached_property
    def choices(self) -> Tensor:
        """[N - 1], place of each node's token among the ranked tokens of all passes."""
        return torch.tensor([self._place(path) for path in self.paths])

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The number of the distribution that each node's children come from, counted over all
        rounds in order; -1 for a leaf."""
        number, sources = _numbered(self._starts), [-1] * len(self.topology)
        for node, path in enumerate(self.paths, start=1):
            sources[self.topology.parents[node]] = number[self._distribution(path[:-1])]
        return tuple(sources)

    def _distribution(self, path: Path) -> Distribution:
        """The distribution that the children of a path come from."""
        start = len(path) - len(path) % self.block_size
        return path[:start], path[start:] if self.coupled else len(path) - start

    def _place(self, path: Path) -> int:
        """Place of a node's token among the ranked tokens of all passes."""
        return self._starts[self._distribution(path[:-1])] + path[-1]

    @cached_property
    def _starts(self) -> dict[Distribution, int]:
        """Where the ranked tokens of every distribution begin, in the order of rounds."""
        keys, widths = [], []
        for part in (part for parts in self._rounds for part in parts):
            keys += part
            widths += [self._width(part)] * len(part)
        return dict(zip(keys, accumulate(widths, initial=0), strict=False))

    def _width(self, part: Sequence[Distribution]) -> int:
        """How many tokens of each of its distributions a round ranks."""
        return 1 + max(max(self._ranks[key]) for key in part)

    @cached_property
    def _ranks(self) -> dict[Distribution, list[int]]:
        """The ranks that nodes take of every distribution."""
        ranks: dict[Distribution, list[int]] = {}
        for path in self.paths:
            ranks.setdefault(self._distribution(path[:-1]), []).append(path[-1])
        return ranks

    @cached_property
    def _expanded(self) -> list[list[Path]]:
        """The paths that each pass expands."""
        ends = range(0, max(map(len, self.paths)), self.block_size)
        return [sorted({path[:end] for path in self.paths if len(path) > end}) for end in ends]

    @cached_property
    def _rounds(self) -> list[list[list[Distribution]]]:
        """The distributions of each pass, round by round."""
        passes: list[list[list[Distribution]]] = []
        for expanded in map(set, self._expanded):
            keys = sorted(key for key in self._ranks if key[0] in expanded)
            slots = range(self.block_size) if self.coupled else ()
            parts = [[key for key in keys if len(key[1]) == slot] for slot in slots] or [keys]
            passes.append([part for part in parts if part])
        return passes

    def _plan(self, number: int) -> Pass:
        size, expanded = self.block_size, self._expanded[number]
        rounds = self._plan_rounds(number)
        if number == 0:
            alone, none = torch.zeros(1).long(), torch.zeros(0, dtype=torch.long)
            return Pass(0, 0, alone, none, none, torch.ones(size, size).bool(), rounds)
        before, depth = _numbered(self._expanded[number - 1]), number * size
        # Keys: blocks drafted in earlier passes, then this pass's own; a block sees its ancestors.
        keys = [path for paths in self._expanded[1 : number + 1] for path in paths]
        sees = [[path[: len(key)] == key for key in keys] for path in expanded]
        inputs = [path[: depth - size + n + 1] for path in expanded for n in range(size)]
        drawn = _numbered(key for part in self._rounds[number - 1] for key in part)
        first = self._starts[next(iter(drawn))]
        return Pass(
            depth=depth,
            scratch=size * (len(keys) - len(expanded)),
            parents=torch.tensor([before[path[: depth - size]] for path in expanded]),
            blocks=torch.tensor([self._place(path) - first for path in inputs]),
            features=torch.tensor([drawn[self._distribution(p[:-1])] for p in inputs]),
            visible=torch.tensor(sees).repeat_interleave(size, 0).repeat_interleave(size, 1),
            rounds=rounds,
        )

    def _plan_rounds(self, number: int) -> tuple[Round, ...]:
        """The rounds of a pass."""
        parts, expanded = self._rounds[number], _numbered(self._expanded[number])
        planned = []
        for earlier, part in zip([None, *parts], parts, strict=False):
            slots = torch.tensor([len(rest) if self.coupled else rest for _, rest in part])
            blocks = torch.tensor([expanded[path] for path, _ in part])
            before = tokens = None
            if earlier is not None:
                numbers, nodes = _numbered(earlier), [path + rest for path, rest in part]
                parents = [numbers[self._distribution(node[:-1])] for node in nodes]
                places = [self._place(node) - self._starts[earlier[0]] for node in nodes]
                before, tokens = torch.tensor(parents), torch.tensor(places)
            depths = number * self.block_size + slots + 1
            places, least = blocks * self.block_size + slots, int(depths.min())
            planned.append(Round(least, places, depths, before, tokens, self._width(part)))
        return tuple(planned)


def _numbered(keys: Iterable) -> dict:
    """The place of each key."""
    return {key: number for number, key in enumerate(keys)}
