"""Where the features of a shard are put together before they are written.

The memory is used again for later shards. On a GPU it is pinned: rows come out of the device while
the next ones are computed, and pinned memory takes long to be made.

Shapes: M stored tokens of a row, H hidden, wide with layers, as in storage.py.
"""

import torch
from torch import Tensor


class ShardBuffer:
    """Rows one behind the other, in host memory."""

    def __init__(self, device: torch.device):
        self._device, self._used = device, 0
        self._memory: dict[str, Tensor] = {}

    def add(self, encoded: dict[str, Tensor], room: int) -> None:
        """Put a row of M tokens behind the others: {"features": [M, H], ..} as `Storage.encode`
        has them. room: tokens of the whole shard."""
        for name, tensor in encoded.items():
            if name not in self._memory or len(self._memory[name]) < room:
                self._memory[name] = self._new(tensor, room)
            place = self._memory[name][self._used :][: len(tensor)]
            place.copy_(tensor, non_blocking=True)
        self._used += len(encoded["features"])

    def take(self) -> dict[str, Tensor]:
        """The whole shard, which stands until rows are added again: those begin the next one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        used, self._used = self._used, 0
        return {name: memory[:used] for name, memory in self._memory.items()}

    def _new(self, like: Tensor, room: int) -> Tensor:
        """Memory for so many tokens, made when the first of a shard comes."""
        pinned = self._device.type == "cuda"
        return torch.empty(room, *like.shape[1:], dtype=like.dtype, pin_memory=pinned)
