"""The blocks of training rows as short sequences: how they are read, and what they see.

A head in training runs over whole rows, and then over their blocks again, each going on from what
its row was before it. For that, `BlockLayout` lays blocks of K slots side by side: all of a row's,
or the few that are asked for.

    K = 2, a row of five positions whose first block has one:

    position   0 | 1 2 | 3 4             laid out, all of them   0 _ | 1 2 | 3 4
    block      0 | 1 1 | 2 2             where 4 is touched      3 4
    each goes on from the state after                            nothing, 0 and 2; after 2

Shapes: B rows, T time, H hidden, K block size, C blocks laid out of each row, S = C * K slots,
L layers of a fusion's state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.models.sar.fusion import Fusion, State
from specdraft.models.sar.layer import Attend

# Of every layer, keys and values [B, kv_heads, T, D] of the passes so far.
Seen = list[tuple[tuple[Tensor, Tensor], ...]]


def block_index(length: int, block_size: int, phase: int) -> Tensor:
    """Number the blocks of a sequence [T] whose first block has `phase` (1..K) positions."""
    return (torch.arange(length) + block_size - phase) // block_size


def block_offsets(blocks: Tensor) -> Tensor:
    """Return each position's place within its block, 0..K-1: [T] from block indices [T]."""
    sizes = blocks.bincount()
    return torch.arange(len(blocks), device=blocks.device) - (sizes.cumsum(0) - sizes)[blocks]


class BlockLayout:
    """Where blocks of each row are, to run all of them at once as short sequences."""

    def __init__(self, blocks: Tensor, block_size: int, touched: Tensor | None = None):
        """Lay out the blocks [B, T] of every row; with `touched` [B, T], those touched.

        Where a row has fewer of these than another, it is filled up with some that are not.
        """
        offsets, rows, numbers = (
            torch.arange(size, device=blocks.device)
            for size in (block_size, len(blocks), int(blocks.max()) + 1)
        )
        numbers = numbers.expand(len(rows), -1)
        none = torch.zeros_like(numbers)
        sizes = none.scatter_add(1, blocks, torch.ones_like(blocks))
        if touched is not None:
            asked = (none.scatter_add(1, blocks, touched.long()) > 0).byte()
            most = int(asked.sum(1).max())
            numbers = asked.argsort(dim=1, descending=True, stable=True)[:, :most]
        self.size, self.rows = block_size, rows[:, None]
        # Of every position: whether the block before its own is whole, as any that drafting
        # goes on from. [B, T]
        self.has_parent = (blocks > 0) & (sizes.gather(1, (blocks - 1).clamp(min=0)) == block_size)
        self.first = (sizes.cumsum(1) - sizes).gather(1, numbers)  # [B, C], positions
        self.blocks = numbers.repeat_interleave(block_size, 1)  # [B, S]
        # A row's first block, and its last, may leave slots empty.
        self.filled = (offsets < sizes.gather(1, numbers)[..., None]).flatten(1)  # [B, S]
        self.row, self.slot = self.filled.nonzero(as_tuple=True)  # in the order of positions
        # Empty slots hold some position, too: no output of theirs is used.
        self.positions = (self.first[..., None] + offsets).flatten(1).clamp(max=blocks.shape[1] - 1)

    def inherited(self, output: Tensor, features: Tensor, keep: Tensor | None) -> Tensor:
        """Features of the next pass: the prediction made K positions before, if any."""
        shifted = F.pad(output, (0, 0, self.size, 0))[:, : features.shape[1]]
        use = self.has_parent if keep is None else self.has_parent & ~keep
        return torch.where(use[..., None], shifted, features)

    def gather(self, x: Tensor) -> Tensor:
        """Take from x [B, T, H] what the slots hold: [B, S, H]."""
        return x[self.rows, self.positions]

    def scatter(self, x: Tensor, laid_out: Tensor) -> Tensor:
        """Return x [B, T, H] with the blocks that are laid out as in [B, S, H]."""
        values = laid_out[self.row, self.slot]
        return x.index_put((self.row, self.positions[self.row, self.slot]), values)

    def in_order(self, laid_out: Tensor) -> Tensor:
        """Bring what is laid out of all blocks, [.., B, S, H], to its place: [.., B, T, H]."""
        rows = laid_out.shape[-3]
        return laid_out[..., self.row, self.slot, :].unflatten(-2, (rows, -1))

    def fuse(self, fusion: Fusion, laid_out: Tensor, states: State) -> tuple[Tensor, State]:
        """Read every block from the state its parent block ended in.

        Inputs [B, S, 2H] and the states after every position, each [L, B, T, H]; returns what is
        fused [B, S, H] and the states after every slot, each [L, B, S, H].
        """
        alive = (self.first > 0)[..., None]
        parent = (self.first - 1).clamp(min=0)
        start = tuple((s[:, self.rows, parent] * alive).flatten(1, 2) for s in states)
        each = laid_out.reshape(-1, self.size, laid_out.shape[-1])  # [B * C, K, 2H]
        fused, after = fusion(each, start)
        shape = self.first.shape  # B, C
        fused = fused.unflatten(0, shape).flatten(1, 2)
        return fused, tuple(s.unflatten(1, shape).flatten(2, 3) for s in after)

    def mask(self, blocks: Tensor, valid: Tensor | None, window: int | None = None) -> Tensor:
        """Let a block see its row before it, and itself as it is laid out: [B, 1, S, T + S]."""
        block, filled = self.blocks[..., None], self.filled
        before, itself = blocks[:, None] < block, self.blocks[:, None] == block
        if window is not None:
            every = torch.arange(blocks.shape[1], device=blocks.device)
            before &= self.positions[..., None] - every < window
            itself &= self.positions[..., None] - self.positions[:, None] < window
        if valid is not None:  # before a block there is no padding, at its end there may be
            filled = filled & valid[self.rows, self.positions]
        # An empty slot still sees itself: a row of the mask without a True is NaN.
        own = torch.eye(filled.shape[1], dtype=torch.bool, device=filled.device)
        return torch.cat((before, itself & filled[:, None] | own), -1)[:, None]


def rollout_mask(
    blocks: Tensor, valid: Tensor | None, number: int, window: int | None = None
) -> Tensor:
    """Who sees whom in pass `number` (from 0), over the keys of all passes so far: [B, 1, T, nT].

    A block sees itself in this pass, its j-th ancestor in the j-th pass before, and everything
    older as pass 0 read it; of all this what lies less than `window` positions before.
    """
    behind = blocks[:, :, None] - blocks[:, None, :]  # [B, query, key], in blocks
    if window is not None:
        every = torch.arange(blocks.shape[1], device=blocks.device)
        behind = behind.masked_fill(every[:, None] - every >= window, -1)  # as what is still ahead
    parts = [behind >= number] + [behind == number - n for n in range(1, number + 1)]
    mask = torch.cat(parts, -1)
    if valid is not None:
        # A padded query still sees itself: a row of the mask without a True is NaN.
        itself = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
        itself = F.pad(itself, (number * blocks.shape[1], 0))
        mask = mask & valid.repeat(1, number + 1)[:, None, :] | itself
    return mask[:, None]


def attending(seen: Seen, after: Seen, mask: Tensor) -> Attend:
    """Attend behind what was `seen`, and note in `after` what is seen then."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        after.append((*seen[layer], (key, value)))
        keys, values = (torch.cat(parts, 2) for parts in zip(*after[layer], strict=True))
        gqa = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=gqa)

    return attend
