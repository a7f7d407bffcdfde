"""Rows of features beside the sources that an encoder reads, for drafters that read them, too."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdraft.data.store.features import read_rows
from specdraft.data.store.tokens import TokenCache


class Sourced:
    """Rows of features, each with its "source_ids" [S] from the token cache it was made of."""

    def __init__(self, tokens: TokenCache, features: Sequence[dict[str, Tensor]]):
        self.tokens, self.features = tokens, features
        self.lengths, self.key = tokens.lengths, features.key

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"input_ids", "loss_mask", "features", "source_ids"}."""
        return self._joined(index, self.features[index])

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Return several rows, read as the features are best read."""
        found = read_rows(self.features, rows)
        return [self._joined(*pair) for pair in zip(rows, found, strict=True)]

    def _joined(self, index: int, row: dict[str, Tensor]) -> dict[str, Tensor]:
        return row | {"source_ids": self.tokens[index]["source_ids"]}
