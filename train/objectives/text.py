"""Micro-batches of text: position i reads t_i and answers t_(i+1).

Shapes: B rows, T tokens (longest row), L = T - 1 positions, S tokens of the longest source, H the
target's hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.data.store.features import pad_sources
from specdraft.train.fit.batches import Batch, Key, padded


@dataclass(frozen=True)
class TextBatch(Batch):
    """One micro-batch of a student, right-padded."""

    tokens: Tensor  # [B, T] int64
    features: Tensor | None  # [B, T, H], the target's; None where it has to be run
    supervised: Tensor  # [B, L] bool, the token that position i answers counts
    source: Tensor | None = None  # [B, S] int64, what an encoder reads
    source_mask: Tensor | None = None  # [B, S] int64, 1 where a source has a token
    written: int = 0  # rows whose answer the student wrote

    @property
    def encoder_inputs(self) -> dict[str, Tensor]:
        """What an encoder-decoder is given beside the tokens; nothing of other rows."""
        if self.source is None:
            return {}
        return {"source": self.source, "source_mask": self.source_mask}

    def row(self, number: int) -> dict[str, Tensor]:
        """Return one row as it was before padding, without features."""
        length = self.lengths[number]
        first = self.supervised.new_zeros(1)
        mask = torch.cat((first, self.supervised[number, : length - 1]))
        row = {"input_ids": self.tokens[number, :length], "loss_mask": mask}
        if self.source is not None:
            row["source_ids"] = self.source[number][self.source_mask[number].bool()]
        return row


def collate_text(rows: list[dict], keys: list[Key], written: int = 0) -> TextBatch:
    """Pad rows {"input_ids" [T], "loss_mask" [T], perhaps "features" [T, H] and "source_ids" [S]}
    to a micro-batch."""
    lengths = [len(row["input_ids"]) for row in rows]
    tokens, supervised = padded(rows, "input_ids"), padded(rows, "loss_mask")[:, 1:].bool()
    features = padded(rows, "features") if all("features" in row for row in rows) else None
    sourced = all("source_ids" in row for row in rows)
    sources = pad_sources([row["source_ids"] for row in rows]) if sourced else {}
    return TextBatch(lengths, keys, tokens, features, supervised, written=written, **sources)
