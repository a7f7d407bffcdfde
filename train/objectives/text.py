"""Micro-batches of text: position i reads t_i and answers t_(i+1).

Shapes: B rows, T tokens (longest row), L = T - 1 positions, H the target's hidden size.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from specdraft.train.fit.batches import Key


@dataclass(frozen=True)
class TextBatch:
    """One micro-batch of a student, right-padded."""

    tokens: Tensor  # [B, T] int64
    features: Tensor | None  # [B, T, H], the target's; None where it has to be run
    supervised: Tensor  # [B, L] bool, the token that position i answers counts
    lengths: list[int]  # tokens of each row
    keys: list[Key]
    written: int = 0  # rows whose answer the student wrote

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        return self._each(Tensor.pin_memory)

    def _each(self, change) -> Self:
        names = ("tokens", "features", "supervised")
        tensors = {name: getattr(self, name) for name in names}
        changed = {name: change(t) for name, t in tensors.items() if t is not None}
        return replace(self, **changed)

    def row(self, number: int) -> dict[str, Tensor]:
        """Return one row as it was before padding, without features."""
        length = self.lengths[number]
        first = self.supervised.new_zeros(1)
        mask = torch.cat((first, self.supervised[number, : length - 1]))
        return {"input_ids": self.tokens[number, :length], "loss_mask": mask}


def collate_text(rows: list[dict], keys: list[Key], written: int = 0) -> TextBatch:
    """Pad rows {"input_ids" [T], "loss_mask" [T], perhaps "features" [T, H]} to a micro-batch."""
    lengths = [len(row["input_ids"]) for row in rows]
    count, time = len(rows), max(max(lengths), 2)
    tokens = torch.zeros(count, time, dtype=torch.long)
    supervised = torch.zeros(count, time - 1, dtype=torch.bool)
    features = None
    if all("features" in row for row in rows):
        width = rows[0]["features"].shape[-1]
        features = rows[0]["features"].new_zeros(count, time, width)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[number, :length] = row["input_ids"]
        supervised[number, : length - 1] = row["loss_mask"][1:].bool()
        if features is not None:
            features[number, :length] = row["features"]
    return TextBatch(tokens, features, supervised, lengths, keys, written)
