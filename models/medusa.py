"""Medusa heads: each drafts one token, further ahead than the one before, from the same feature.

Medusa (arXiv 2401.10774), section 2.1. Head h of 1..D reads the feature f_i, whose own lm_head
says t_{i+1}, and drafts t_{i+1+h}:

    x = f_i;  x <- x + SiLU(W x + b) for each of its L blocks;  q_h = softmax(lm_head_h x)

W and b start at zero and lm_head_h as the target's, so that an untrained head says t_{i+1}. The
paper trains an lm_head per head (Medusa-1), D * V * H parameters; shared ones are the target's own,
frozen. No head knows what another has drafted.

Shapes: D heads, L blocks of a head, N positions, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models.saved import SavedConfig, SavedHead, Vocabulary
from specdraft.recipes.fields import Draft, Few, Width


@dataclass(frozen=True)
class MedusaConfig(SavedConfig):
    """Everything the heads' shapes depend on; saved beside their weights.

    Raises ValueError for a value that no heads have.
    """

    hidden_size: Width
    vocab_size: Vocabulary
    heads: Draft = 4
    layers: Few = 1
    lm_heads: Literal["own", "shared"] = "own"
    target: dict = field(default_factory=dict)  # identity of the target they were trained for


class MedusaHeads(SavedHead, tags=["medusa"]):
    """All heads at once: their weights are stacked, and a pass is one batched product per block."""

    noun, trainers = "trained Medusa heads", ("medusa",)

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        count, width = config.heads, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(config.layers, count, width, width))
        self.bias = nn.Parameter(torch.zeros(config.layers, count, width))
        self.lm_heads = None  # the target's own
        if config.lm_heads == "own":
            # Not a number until it is set or loaded: a tensor that is missing must not go unseen.
            unset = torch.full((count, config.vocab_size, width), torch.nan)
            self.lm_heads = nn.Parameter(unset)

    @classmethod
    def of(cls, config: MedusaConfig, lm_head: Tensor) -> "MedusaHeads":
        """Make untrained heads for a target with this lm_head [V, H]."""
        heads = cls(config)
        if heads.lm_heads is not None:
            with torch.no_grad():
                heads.lm_heads.copy_(lm_head)
        return heads

    def hidden(self, features: Tensor, count: int | None = None) -> Tensor:
        """What the first `count` heads (None: all) give their lm_heads for features, which all of
        them read [N, H] or each its own [D, N, H].

        Returns [D, N, H].
        """
        count = self.config.heads if count is None else count
        x = features.expand(count, *features.shape[-2:])
        for weight, bias in zip(self.weight[:, :count], self.bias[:, :count], strict=True):
            x = x + F.silu(torch.baddbmm(bias[:, None], x, weight.mT))
        return x

    def forward(self, features: Tensor, loss: Callable[[Tensor, Tensor | None], Any]) -> Any:
        """Return loss(hidden [D, N, H], lm_heads [D, V, H]) for features [N, H] or [D, N, H].

        The lm_heads are None where they are shared. The loss is taken in here because launchers
        that shard weights have them whole within a forward only.
        """
        return loss(self.hidden(features), self.lm_heads)
