"""Medusa heads, which replace the draft head."""

from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import Draft, Few, Fraction, Section


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
