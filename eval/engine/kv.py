"""One preallocated KV cache for many rows, each with its own length (EMS-SD's unpadded KV).

EMS-SD (arXiv 2405.07542), "unpad KV": every row writes at its own offset into its own region, so
rows that accepted different numbers of tokens need no padding between them.

A row of 3 tokens has read a tree of 4 nodes behind them; `keep(row, [0, 2, 3])` moves two slots:

    slot   0 1 2 3 4 5 6        0 1 2 3 4 5 6
    holds  c c c 0 1 2 3   ->   c c c 0 2 3 .     lengths[row] 3 -> 6

Shapes: R rows, C capacity, D head dimension, L layers of one device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.eval.engine.transfer import upload


class KVPool:
    """Keys and values of R rows, [2, R, kv_heads, C, D] per entry of `layers`; `lengths[r]` valid.

    devices: one per layer, where it runs. The layers of one device lie in one tensor. windows: how
    many tokens each layer sees, the newest included; None: all. leaning: what is added to scores
    of each head at each distance (ALiBi, T5), [heads, capacity]. Where there is either, positions
    of slots are kept, too. value_dim: of values, where it is not that of keys (latent attention).
    numbers: of the layers in their model, where some have no attention. spare: slots of a row
    behind its capacity.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        windows: Sequence[int | None] = (),
        leaning: Tensor | None = None,
        value_dim: int | None = None,
        numbers: Sequence[int] = (),
        spare: int = 0,
    ):
        self.value_dim = value_dim or head_dim
        self.numbers = {number: n for n, number in enumerate(numbers or range(len(devices)))}
        width = max(head_dim, self.value_dim)
        shape = (2, rows, kv_heads, capacity + spare, width)
        # Zeros, not empty: a masked slot still multiplies its value, and 0 * NaN is NaN.
        tensors = {
            device: torch.zeros((devices.count(device), *shape), dtype=dtype, device=device)
            for device in dict.fromkeys(devices)
        }
        self.tensors = [*tensors.values()]  # [L, 2, R, kv_heads, C, D] each
        unbound = {device: iter(tensor) for device, tensor in tensors.items()}
        self.layers = [next(unbound[device]) for device in devices]
        # Keys and values of every layer, [R, kv_heads, C, D] each, as wide as they are.
        self.kv = [
            (keys[..., :head_dim], values[..., : self.value_dim]) for keys, values in self.layers
        ]
        self.capacity, self.dtype = capacity, dtype
        self.lengths = [0] * rows
        self.pads = [0] * rows  # of these slots, those that hold no token
        self.windows = windows or [None] * len(devices)
        self.positions = None  # [R, C]
        self.leaning = leaning
        if leaning is not None or any(self.windows):
            self.positions = torch.zeros(rows, capacity, dtype=torch.long, device=devices[0])
        # Every row's keys and values, [1, kv_heads, C, D] each: making a view costs as much as
        # the work on it where a target is small.
        self._views = [
            [(keys[row, None], values[row, None]) for row in range(rows)]
            for keys, values in self.kv
        ]

    def write(self, layer: int, row: int, start: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values [1, kv_heads, T, D] at slots start .. start + T of a row."""
        for cached, fresh in zip(self._views[layer][row], (key, value), strict=True):
            cached.narrow(2, start, fresh.shape[2]).copy_(fresh)

    def read(self, layer: int, row: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values of a row's slots first .. stop, each [1, kv_heads, .., D]."""
        keys, values = self._views[layer][row]
        return keys.narrow(2, first, stop - first), values.narrow(2, first, stop - first)

    def read_rows(self, layer: int, rows: slice, slots: slice) -> tuple[Tensor, Tensor]:
        """Views of keys and values of neighbouring rows, each [rows, kv_heads, slots, D]."""
        keys, values = self.kv[layer]
        return keys[rows, :, slots], values[rows, :, slots]

    def move(self, row: int, to: int) -> None:
        """Put what a row holds into another, which forgets its own."""
        length = self.lengths[row]
        for each in (self.lengths, self.pads):
            each[to], each[row] = each[row], 0
        if self.positions is not None:
            self.positions[to, :length] = self.positions[row, :length]
        for tensor in self.tensors:
            held, place = (tensor.select(2, own).narrow(3, 0, length) for own in (row, to))
            place.copy_(held)

    def keep(self, row: int, path: list[int]) -> None:
        """Commit an accepted path: slots length + path[j] move to length + j, in all layers.

        `path` lists node numbers, ascending, the root first; what was not accepted is forgotten.
        """
        start = self.lengths[row]
        self.lengths[row] = start + len(path)
        if not path or path[-1] < len(path):  # a prefix of what was read
            return
        moved = next(j for j, node in enumerate(path) if node != j)
        if self.positions is not None:
            slots = upload([start + node for node in path[moved:]], self.positions.device)
            self.positions[row, start + moved : start + len(path)] = self.positions[row, slots]
        for tensor in self.tensors:
            source = upload([start + node for node in path[moved:]], tensor.device)
            cache = tensor.select(2, row)  # [L, 2, kv_heads, C, D]
            cache.narrow(3, start + moved, len(source)).copy_(cache.index_select(3, source))
