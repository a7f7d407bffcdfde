"""Where a pass writes and reads: slots of a cache, and as many positions, one behind the other.

A graph that is replayed has fixed shapes, so the number that its places begin at is data there.

Shapes: M places, C slots, D head dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.models.families.scores import aligned

Start = int | Tensor  # the first place; in a tensor [1] for `Anywhere`


def places_from(start: Start, count: int) -> "Place | Anywhere":
    """Return `count` places from one on."""
    if isinstance(start, Tensor):
        return Anywhere(start + torch.arange(count, device=start.device))
    return Place(start, count)


class Place(NamedTuple):
    """Places that begin at a number which the host knows: every part is a view."""

    start: int
    count: int

    def last(self, table: Tensor, count: int) -> Tensor:
        """The last rows of a table [1, 1, C, D] in these positions, [1, 1, count, D]."""
        return table.narrow(2, self.start + self.count - count, count)

    def write(self, cached: Tensor, fresh: Tensor) -> None:
        """Put [1, kv_heads, M, D] into the slots."""
        cached.narrow(2, self.start, self.count).copy_(fresh)

    def before(self, cached: Tensor) -> Tensor:
        """All slots up to the last of these."""
        return cached.narrow(2, 0, self.start + self.count)

    def mask(self, keys: Tensor) -> Tensor | None:
        """What hides slots behind these from a query."""
        return None


class Anywhere(NamedTuple):
    """Places that begin at a number in a tensor: whatever it is, all that is read has the same
    shape."""

    places: Tensor  # [M]

    def last(self, table: Tensor, count: int) -> Tensor:
        return table.index_select(2, self.places[-count:])

    def write(self, cached: Tensor, fresh: Tensor) -> None:
        cached.index_copy_(2, self.places, fresh)

    def before(self, cached: Tensor) -> Tensor:
        return cached

    def mask(self, keys: Tensor) -> Tensor:
        count = keys.shape[2]
        hidden = (torch.arange(aligned(count), device=keys.device) > self.places[-1:])[None]
        mask = torch.zeros_like(hidden, dtype=keys.dtype).masked_fill_(hidden, -torch.inf)
        return mask[:, :count]
