"""A row's pass with fixed shapes, so that a GPU replays it: a CUDA graph per number of inputs, of
slots in sight, and row.

A pass of a head has some eighty operations, each done sooner than the host launches the next one.
Where it begins and what it reads is written to tensors of its own; the graph does the rest.

Shapes: M inputs, S siblings, H hidden, n layers of the target.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdraft.models.passes.graphs import Replays, slots_in_sight
from specdraft.models.passes.row import Block, Cache, RowPass, go_on, read

MOST = 32  # inputs; more are a prompt, which is read once


class ReplayedPass(RowPass):
    """The passes of a head over a single row, replayed."""

    def __init__(self, *parts, **options):
        super().__init__(*parts, **options)
        self.replays = Replays(self.lm_head.device)
        self._given: dict[tuple, tuple[Tensor, ...]] = {}  # what is read, by key

    def read(self, tokens: Tensor, features: Tensor, caches: Sequence[Cache], start: int) -> Block:
        if len(tokens) > MOST:
            return super().read(tokens, features, caches, start)
        return self._replay(read, (tokens, features), caches, start)

    def go_on(self, block: Block, caches: Sequence[Cache], start: int) -> Block:
        return self._replay(go_on, (block.tokens, block.hidden), caches, start)

    def _replay(
        self, part: Callable, inputs: tuple[Tensor, ...], caches: Sequence[Cache], start: int
    ) -> Block:
        count, first = len(inputs[0]), caches[0][0]
        slots = slots_in_sight(start + count, first.shape[2])
        key = part, count, slots, first.data_ptr()  # the row's
        if key not in self._given:
            begin = torch.zeros(1, dtype=torch.long, device=first.device)
            self._given[key] = (*(each.clone() for each in inputs), begin)
        *given, begin = self._given[key]
        for held, each in zip(given, inputs, strict=True):
            held.copy_(each)
        begin.fill_(start)
        seen = [tuple(part.narrow(2, 0, slots) for part in cache) for cache in caches]
        found = self.replays.run(key, lambda: part(self, *given, seen, begin))
        # The next block of the same draft overwrites it.
        return Block(*(None if each is None else each.clone() for each in found))
