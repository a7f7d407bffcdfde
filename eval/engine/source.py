"""Sources of encoder-decoders: what every row attends to besides its own tokens, written once.

The encoder reads a request's source when its row starts. With the row's first tokens the decoder
makes keys and values of what it said, layer by layer, and these stay; later forwards hand the
decoder nothing new. Every row sees its own source, the whole of it:

    row 0, a source of 3 tokens, reads 2,   slot       0 1 2            0 1 2
    row 1, a source of 2, reads one         token 0    v v v   row 1    . . .
    (v visible)                             token 1    v v v            . . .
                                            token 2    . . .            v v .

Shapes: S tokens of a source, N packed tokens, H hidden, D head dimension.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.eval.engine.kv import KVPool
from specdraft.models.target import Target

ROOM = 128  # slots by which sources get more room at a time


class Sight(NamedTuple):
    """What the tokens of one row see of its source: read as a `Segment` is."""

    row: int
    count: int
    stop: int  # tokens of the source
    first: int = 0
    bias: None = None
    is_causal: bool = False

    def on(self, device: torch.device) -> "Sight":
        return self


class Sources:
    """Keys and values of the sources of all rows."""

    def __init__(self, target: Target, make_pool: Callable[..., KVPool]):
        """make_pool: a pool for all rows, of some `capacity`."""
        self.target, self._make_pool = target, make_pool
        self.pool = make_pool(capacity=ROOM)
        self._waiting: dict[int, Tensor] = {}  # by row, what its encoder said [1, S, H]
        self._new: list[int] = []  # rows whose keys and values the running forward makes

    def start(self, row: int, source: Sequence[int], padding: Sequence[int] = ()) -> None:
        """Read the source of a row's new request, behind padding that is seen by its positions."""
        ids = torch.tensor([[*padding, *source]], device=self.target.device)
        mask = torch.ones_like(ids)
        mask[:, : len(padding)] = 0
        states = self.target.encode(ids, mask if padding else None)
        self._waiting[row] = states[:, len(padding) :]
        if len(source) > self.pool.capacity:
            self._grow(len(source))
        self.pool.lengths[row] = len(source)

    def move(self, row: int, to: int) -> None:
        """Put a row's source into another, which forgets its own."""
        self.pool.move(row, to)
        if row in self._waiting:
            self._waiting[to] = self._waiting.pop(row)

    def _grow(self, count: int) -> None:
        old, self.pool = self.pool, self._make_pool(capacity=-(-count // ROOM) * ROOM)
        self.pool.lengths = old.lengths
        for tensor, kept in zip(self.pool.tensors, old.tensors, strict=True):
            tensor[..., : old.capacity, :] = kept

    def states(self, rows: Sequence[int]) -> Tensor:
        """What the encoder said [1, S, H] for those of the rows that no forward has read yet; a
        zero that is not kept where there are none, for layers cannot reshape nothing."""
        self._new = [row for row in rows if row in self._waiting]
        fresh = [self._waiting.pop(row) for row in self._new]
        if not fresh:
            width = self.target.hidden_size
            return torch.zeros(1, 1, width, dtype=self.target.dtype, device=self.target.device)
        return torch.cat(fresh, 1) if len(fresh) > 1 else fresh[0]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep what a layer made of the states [1, heads, S, D]."""
        if not self._new:
            return
        counts = [self.pool.lengths[row] for row in self._new]
        parts = zip(self._new, key.split(counts, 2), value.split(counts, 2), strict=True)
        for row, keys, values in parts:
            self.pool.write(layer, row, 0, keys, values)

    def sights(self, segments: Sequence) -> list[Sight]:
        """What the tokens of each segment see."""
        return [Sight(s.row, s.count, self.pool.lengths[s.row]) for s in segments]
