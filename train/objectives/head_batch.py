"""Micro-batches of a head: position i reads (t_(i+1), f_i) and answers f_(i+k), in blocks of k.

Shapes: B rows, T tokens (longest row), L = T - 1 input positions, H hidden, k block size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdraft.models.sar.blocks import block_index, block_offsets
from specdraft.train.fit.batches import Batch, Key, keyed_generator, padded


@dataclass(frozen=True)
class HeadBatch(Batch):
    """One micro-batch of a head, right-padded."""

    tokens: Tensor  # [B, T] int64
    features: Tensor  # [B, T, H], wide with data.feature_layers
    blocks: Tensor  # [B, L] int64, the block each position belongs to
    offsets: Tensor  # [B, L] int64, its place within that block, 0..k-1
    valid: Tensor  # [B, L] bool
    supervised: Tensor  # [B, L] bool, position i has an answer that counts
    block_size: int
    alignments: int = 1  # how many times every row comes, each with other blocks

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) // self.alignments

    def generators(self, purpose: str, device: torch.device | str = "cpu") -> Iterator:
        """Yield one generator per row, keyed by the row's place in training."""
        return (keyed_generator(*key, purpose, device=device) for key in self.keys)

    def noise(self, amplitude: float, hidden: int) -> Tensor:
        """Draw U(-amplitude, amplitude) noise for the input features, [B, L, H] float32; layers of
        the target beside them have none, for drafting feeds back none of them."""
        device, (rows, width, whole) = self.features.device, self.features[:, 1:].shape
        noise = torch.zeros(rows, width, hidden, device=device)
        generators = self.generators("noise", device)
        for row, length, generator in zip(noise, self.lengths, generators, strict=True):
            row[: length - 1].uniform_(-amplitude, amplitude, generator=generator)
        return nn.functional.pad(noise, (0, whole - hidden))


def collate(
    rows: list[dict], keys: list[Key], block_size: int, all_alignments: bool = False
) -> HeadBatch:
    """Pad rows {"input_ids", "loss_mask", "features"} to one micro-batch.

    Drafting meets every alignment of blocks: the size of each row's first block is drawn from 1..k
    or, with `all_alignments`, every row comes k times, once with each.
    """
    phases = [range(1, block_size + 1)] * len(rows)
    if not all_alignments:
        phases = [[_drawn_phase(key, block_size)] for key in keys]
    rows, keys = (
        [one for one, own in zip(each, phases, strict=True) for _ in own] for each in (rows, keys)
    )
    lengths = [len(row["input_ids"]) for row in rows]
    width = max(lengths) - 1
    blocks = [block_index(width, block_size, phase) for own in phases for phase in own]
    # Position i drafts t_(i+k+1), so its mask is the mask of that token.
    answered = nn.functional.pad(padded(rows, "loss_mask"), (0, block_size))[:, block_size + 1 :]
    blocks = torch.stack(blocks)
    return HeadBatch(
        lengths,
        keys,
        tokens=padded(rows, "input_ids"),
        features=padded(rows, "features"),
        blocks=blocks,
        offsets=torch.stack([block_offsets(b) for b in blocks]),
        valid=torch.arange(width) < torch.tensor(lengths)[:, None] - 1,
        # Drafting goes on from whole blocks alone: a short first one has nothing to learn.
        supervised=answered.bool() & ((blocks > 0) | ((blocks == 0).sum(1, True) == block_size)),
        block_size=block_size,
        alignments=block_size if all_alignments else 1,
    )


def _drawn_phase(key: Key, block_size: int) -> int:
    generator = keyed_generator(*key, "phase")
    return int(torch.randint(1, block_size + 1, (), generator=generator))
