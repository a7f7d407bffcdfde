"""What is put on top of a target: a draft head of decoder layers, or Medusa heads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import Draft, Few, Fraction, Section, Width


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


@dataclass(frozen=True, kw_only=True)
class MedusaSection(Section):
    """Medusa heads (arXiv 2401.10774, section 2.1) and their loss: head h of a feature f_i drafts
    t_(i+1+h). They replace the `head` section."""

    heads: Draft | None = None  # tokens drafted, in one pass; null: no Medusa heads
    layers: Few = 1  # residual blocks of a head
    lm_heads: Literal["own", "shared"] = "own"  # own: trained, from the target's; shared: frozen
    soft_weight: Fraction = 0.0  # share of KL(p || q) in the loss, the rest is cross-entropy

    @property
    def given(self) -> bool:
        """Whether the recipe has Medusa heads at all."""
        return self.heads is not None
