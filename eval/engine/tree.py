"""Draft trees: what every drafter returns and every verifier reads.

Node 0 is the root: the last committed token, which the target has not read yet, so that the bonus
token costs no forward of its own. A `Topology` is the shape alone (parents first) and is shared by
all drafts of a static tree; a `Tree` adds the tokens.

Shapes: N nodes, the root included; V vocabulary; D distributions that children were drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Topology:
    """The shape of a tree: parent of every node, parents before children, siblings in draft order.

    `parents[0]` is -1. Raises ValueError when a parent does not come before its child.

    >>> Topology([-1, 0, 0, 1]).depths, Topology([-1, 0, 0, 1]).children[0]
    ((0, 1, 1, 2), (1, 2))
    """

    def __init__(self, parents: Sequence[int]):
        self.parents = tuple(parents)
        if not self.parents or self.parents[0] != -1:
            raise ValueError("node 0 must be the root, with parent -1")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents come first")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Distance of the deepest node from the root."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in draft order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to a node, which is the last."""
        return path_to(node, self.parents)

    @cached_property
    def rank_paths(self) -> tuple[tuple[int, ...], ...]:
        """The path of sibling ranks that leads from the root to each node; () for the root."""
        paths: list[tuple[int, ...]] = [()] * len(self)
        for parent, children in enumerate(self.children):
            for rank, child in enumerate(children):
                paths[child] = (*paths[parent], rank)
        return tuple(paths)

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool [N, N]: ancestors[i, j] when j is i or one of its ancestors."""
        rows = [bytearray(len(self))]  # bytes: a tensor operation per node would take ten times
        rows[0][0] = 1
        for node, parent in enumerate(self.parents[1:], start=1):
            rows.append(rows[parent][:])
            rows[node][node] = 1
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(self), -1)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from below the root to a node, which is the last; parents: of all nodes."""
    path = []
    while node:
        path.append(node)
        node = parents[node]
    return path[::-1]


@lru_cache(maxsize=512)
def chain(length: int) -> Topology:
    """A root and `length` drafted tokens in a row."""
    return Topology(range(-1, length))


@lru_cache(maxsize=2048)
def shape(parents: tuple[int, ...]) -> Topology:
    """A topology; the same object again for the same shape, so that masks made of it are kept."""
    straight = chain(len(parents) - 1)
    return straight if parents == straight.parents else Topology(parents)


def after_chain(count: int, topology: Topology) -> Topology:
    """A chain of `count` tokens with a topology after it; the same object after none.

    >>> after_chain(2, Topology([-1, 0, 0])).parents
    (-1, 0, 1, 2, 2)
    """
    if not count:
        return topology
    if len(topology) == 1:
        return chain(count)
    return Topology([*range(-1, count - 1), *(parent + count for parent in topology.parents)])


class TreeBias:
    """Additive masks of one topology behind any number of cached tokens, without allocating.

    One row-major tensor [T, C + T] holds zeros (the whole prefix is visible) and then the tree;
    the mask behind `start` cached tokens is the view of its last start + T columns.
    """

    def __init__(self, visible: Tensor, capacity: int, dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        bias = torch.zeros(len(visible), capacity + visible.shape[1], dtype=dtype)
        bias[:, capacity:].masked_fill_(~visible, float("-inf"))
        self.full = bias.to(device)

    def after(self, start: int) -> Tensor:
        """The mask [T, start + T]."""
        return self.full[:, self.capacity - start :]


def view_from(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Who of T tokens sees whom, wherever they stand: additive [T, N + 2], of visible [T, N]. The
    first column is of what is cached, which all of them see, the last of what is behind them."""
    view = torch.full((len(visible), visible.shape[1] + 2), -torch.inf, dtype=dtype)
    view[:, 0] = 0.0
    view[:, 1:-1].masked_fill_(visible, 0.0)
    return view


def columns_of(slots: Tensor, starts: Tensor, count: int) -> Tensor:
    """The column of such a view of `count` tokens that each slot [L] is for rows whose first token
    is written to `starts` [R]: [R, L]."""
    return (slots - starts[:, None]).clamp_(-1, count) + 1


@dataclass(frozen=True)
class Draws:
    """How the tokens of a tree were drawn, and from what: what rejection rules divide by.

    `source[node]` is the row of `probs` that the children of the node were drawn from, in draft
    order; -1 for a leaf. Nodes may share a row. The tokens must not have been looked at since: a
    sample that was dropped or moved for its value is no sample of `probs` any more.
    """

    how: Literal["without_replacement", "iid"]
    probs: Tensor  # [D, V]; need not sum to one to the last digit
    source: Sequence[int]  # of all N nodes

    def after(self, node: int) -> Tensor:
        """The distribution [V], float64, that the children of a node were drawn from.

        Raises ValueError for a node that has none.
        """
        row = self.source[node]
        if not 0 <= row < len(self.probs):
            raise ValueError(
                f"children of node {node} come from row {row} of {len(self.probs)} distributions; "
                "give every node with drawn children the row they were drawn from"
            )
        probs = self.probs[row].double()
        return probs / probs.sum()


class Tree(NamedTuple):
    """A draft of one row: a topology and the tokens of its nodes after the root, [N - 1].

    Tokens stay on the drafter's device; the decoder brings them to the host once per step,
    together with the target's choices. `draws` is None for deterministic candidates (top-k, lookup,
    copies), which no probability belongs to. The last `copies` nodes were copied from elsewhere in
    the draft (unmerged graphs).
    """

    topology: Topology
    tokens: Tensor
    draws: Draws | None = None
    copies: int = 0

    @classmethod
    def empty(cls, device: torch.device) -> "Tree":
        """A root alone: nothing was drafted."""
        return cls(chain(0), torch.empty(0, dtype=torch.long, device=device))
