"""The draft head: a few decoder layers on the target's features."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import Draft, Few, Section, Width


@dataclass(frozen=True, kw_only=True)
class HeadSection(Section):
    """The shape of a Falcon head (Gao et al., AAAI 2025); with `block_size: 1`,
    `fusion: linear` and `input_norm: false` it is the head of EAGLE-1 (arXiv 2401.15077)."""

    block_size: Draft = 2  # k: tokens drafted per pass
    fusion: Literal["lstm", "linear"] = "lstm"  # of token and feature
    layers: Few = 1  # decoder layers
    heads: Few | None = None  # null: as the target, for these three
    kv_heads: Few | None = None
    intermediate: Width | None = None  # width of the MLP
    input_norm: bool = True  # of the first decoder layer; EAGLE-1 and its serving format: false

    def conflicts(self) -> Iterator[str]:
        """Query heads share key/value heads evenly."""
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            yield self.complaint("kv_heads", f"must divide head.heads ({self.heads})")
