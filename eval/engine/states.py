"""What recurrent layers remember of every row, and how a rejected draft is taken back.

A state cannot be cut as a cache can. So it lags behind: it has read what was committed before a
draft. The draft is read from a copy of it, and what the layer was given at the drafted nodes is
kept; the accepted ones are read once more, for good, before the next step's root. A row whose last
draft (a b c) was accepted up to b, with a root r and a draft (d e) now, is read as

    for good, from the state         a b r        the state moves on
    for now, from a copy of it       d e          of a tree, every path in a row of its own

Drafting reads these layers twice a step (no others); plain decoding once. Of a drafted node there
is kept what a layer was given, not its state: 0.15 MB of Qwen3-Next 80B instead of 78. To read one
level after the other and keep states at all nodes is exact, too. Of a small Qwen3-Next on one busy
core, where a plain step takes 15 ms, a chain of 5 adds 30 ms (28 in that way), a tree of 10 nodes
to depth 5 adds 71 (58); but then layers whose weights take the time are read once for every level.

Shapes: N packed tokens, M drafted nodes among them, S rows, P paths, T tokens of each, H hidden.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology
from specdraft.eval.families.recurrent import Recurrent


class Advance(NamedTuple):
    """Rows that read equally much for good."""

    rows: slice | Tensor  # S of them
    accepted: Tensor  # [S, A], nodes of the last drafts
    places: Tensor  # [S, K], among the packed tokens


class Drafts(NamedTuple):
    """What is read for now, path by path; the shorter ones end in what nobody looks at."""

    rows: Tensor  # [P]
    paths: Tensor  # [P, T], places among the packed tokens
    nodes: Tensor  # [M], places
    cells: Tensor  # [M], where they stand among the P * T


class States:
    """The states of R rows, in place of those of a copied target's recurrent layers.

    `begin` announces a forward, in whose course the layers call `read`; `keep` says what of it is
    accepted.
    """

    def __init__(self, layers: Sequence[Recurrent], rows: int):
        self.layers = [_of_rows(layer.states, rows) for layer in layers]
        self.inputs: list[Tensor | None] = [None] * len(layers)  # [M, H], of the last drafts
        self.accepted: list[list[int]] = [[] for _ in range(rows)]  # of them, to be read for good
        self.drafted: dict[int, tuple[int, int]] = {}  # by row: tokens before its draft, first node
        self.advances: list[Advance] = []
        self.drafts: Drafts | None = None
        for place, layer in enumerate(layers):
            layer.module.forward = _Reader(self, place, layer)

    def begin(self, segments: Sequence, device: torch.device) -> None:
        """Plan how the tokens of packed segments are read."""
        known, first, self.drafted = {}, 0, {}
        rows, paths, nodes, cells = [], [], [], []
        for segment in segments:
            row, count = segment.row, segment.known
            if segment.start == 0:
                self._forget(row)
            known[row] = [*range(first, first + count)]
            if segment.count > count:
                self.drafted[row] = (count, len(nodes))
                found, where = leaf_paths(segment.topology, count)
                cells += [(len(paths) + path, depth) for path, depth in where]
                paths += [[first + node for node in path] for path in found]
                rows += [row] * len(found)
                nodes += range(first + count, first + segment.count)
            first += segment.count
        self.advances, self.drafts = self._advances(known, device), None
        if nodes:
            length = max(map(len, paths))
            places = [place for path in paths for place in path + path[:1] * (length - len(path))]
            where = [path * length + depth for path, depth in cells]
            rows, places, nodes, where = (upload(x, device) for x in (rows, places, nodes, where))
            self.drafts = Drafts(rows, places.view(-1, length), nodes, where)

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Note which of the tokens that a row has just read are accepted, ascending."""
        if row in self.drafted:
            count, first = self.drafted[row]
            self.accepted[row] = [first + node - count for node in path if node >= count]

    def move(self, row: int, to: int) -> None:
        """Put a row's states into another, which forgets its own."""
        self.accepted[to], self.accepted[row] = self.accepted[row], []
        for layer in self.layers:
            for state in _tensors(layer):
                state[to].copy_(state[row])

    def read(self, place: int, layer: Recurrent, given: Tensor) -> Tensor:
        """What a layer answers to what it is given, [N, H] both."""
        answer, states, device = torch.empty_like(given), self.layers[place], given.device
        for rows, *both in self.advances:
            accepted, places = (x.to(device) for x in both)
            tokens, again = given[places], accepted.shape[1]
            if again:
                tokens = torch.cat((self.inputs[place][accepted], tokens), 1)
            part = _part(states, rows)
            answer[places] = _run(layer, tokens, part)[:, again:]
            if isinstance(rows, Tensor):  # not a view
                _put(states, rows, part)
        if self.drafts:
            rows, paths, nodes, cells = (x.to(device) for x in self.drafts)
            answers = _run(layer, given[paths], _part(states, rows))
            answer[nodes] = answers.flatten(0, 1)[cells]
            self.inputs[place] = given[nodes]
        return answer

    def _advances(self, known: Mapping[int, list[int]], device: torch.device) -> list[Advance]:
        """Rows with what they read for good, grouped by how much it is."""
        groups: dict[tuple[int, int], list[int]] = {}
        # A row that sits out is read on, too, for what was given at its draft is about to go.
        for row, accepted in enumerate(self.accepted):
            if accepted or row in known:
                groups.setdefault((len(accepted), len(known.get(row, ()))), []).append(row)
        advances = []
        for (again, count), rows in groups.items():
            together = rows[-1] - rows[0] < len(rows)
            which = slice(rows[0], rows[-1] + 1) if together else upload(rows, device)
            accepted = upload([node for row in rows for node in self.accepted[row]], device)
            places = upload([place for row in rows for place in known.get(row, ())], device)
            sizes = (len(rows), again), (len(rows), count)
            advances.append(Advance(which, accepted.view(sizes[0]), places.view(sizes[1])))
        self.accepted = [[] for _ in self.accepted]
        return advances

    def _forget(self, row: int) -> None:
        self.accepted[row] = []
        for layer in self.layers:
            for state in _tensors(layer):
                state[row].zero_()


class _Reader:
    """Stands for a recurrent layer's forward."""

    def __init__(self, states: States, place: int, layer: Recurrent):
        self.states, self.place, self.layer = states, place, layer

    def __call__(self, hidden_states: Tensor, *_, **__) -> Tensor:
        return self.states.read(self.place, self.layer, hidden_states[0])[None]


def _run(layer: Recurrent, tokens: Tensor, states: LinearAttentionLayer) -> Tensor:
    """A layer's own forward, from states that move on."""
    cache = Cache(layers=[states] * (layer.number + 1))
    return layer.forward(tokens, **{layer.argument: cache})


def _of_rows(states: LinearAttentionLayer, rows: int) -> LinearAttentionLayer:
    """Empty states of many rows, like those of one: zeros are what a row begins with."""
    return _changed(states, lambda state: state.new_zeros(rows, *state.shape[1:]))


def _part(states: LinearAttentionLayer, rows: slice | Tensor) -> LinearAttentionLayer:
    """States of some rows: views of a slice, copies of others."""
    return _changed(states, lambda state: state[rows])


def _put(states: LinearAttentionLayer, rows: Tensor, part: LinearAttentionLayer) -> None:
    for state, new in zip(_tensors(states), _tensors(part), strict=True):
        state[rows] = new


def _changed(states: LinearAttentionLayer, change: Callable) -> LinearAttentionLayer:
    changed = copy.copy(states)
    for name in ("conv_states", "recurrent_states"):
        kept = getattr(states, name).items()
        setattr(changed, name, {n: x if x is None else change(x) for n, x in kept})
    return changed


def _tensors(states: LinearAttentionLayer) -> list[Tensor]:
    both = [*states.conv_states.values(), *states.recurrent_states.values()]
    return [state for state in both if state is not None]


@lru_cache(maxsize=512)
def leaf_paths(topology: Topology, count: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The paths to all leaves, without the first `count` nodes, and where each node after those
    stands: the number of its first path, and its place on it.

    >>> leaf_paths(Topology([-1, 0, 1, 1]), 1)
    ([[1, 2], [1, 3]], [(0, 0), (0, 1), (1, 1)])
    """
    paths, where = [], {}
    for node in range(count, len(topology)):
        if not topology.children[node]:
            path = [step for step in topology.path(node) if step >= count]
            for depth, step in enumerate(path):
                where.setdefault(step, (len(paths), depth))
            paths.append(path)
    return paths, [where[node] for node in range(count, len(topology))]
