"""The bytes that drafting with a head reads from memory: its cost where one row is decoded.

A pass reads every weight of the head once, the coupling once per slot after the first; the lm_head
is read at every depth, at once for uncoupled slots. At long drafts these bytes, and the number of
passes that wait for each other, are a drafter's price (EAGLE-1, arXiv 2401.15077, and the LSTM of
Falcon's paper are what it is compared with).

Shapes: V vocabulary, H hidden, K block size.
"""

from dataclasses import dataclass, replace

import torch

from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.falcon import FalconConfig, FalconHead

STATE_BYTES = 4  # of a weight where the fusion carries a state: it is read in float32


@dataclass(frozen=True)
class DraftCost:
    """Bytes read per pass; a pass drafts `depths` tokens of every path."""

    head: int
    lm_head: int
    depths: int

    @classmethod
    def of(
        cls, config: FalconConfig | Eagle3Config, head_bytes: int, lm_head_bytes: int
    ) -> "DraftCost":
        """The cost of a head that drafts in so many bytes per weight, with an lm_head of so many;
        one that carries a state reads its own weights in float32."""
        tokens = config.draft_vocab or config.vocab_size
        if isinstance(config, Eagle3Config):
            with torch.device("meta"):
                weights = sum(p.numel() for p in Eagle3Head(config).parameters())
            own = tokens * config.hidden_size
            return cls(head_bytes * (weights - own), lm_head_bytes * own, 1)
        with torch.device("meta"):
            head = FalconHead(config)
        coupling = sum(p.numel() for p in head.coupling.parameters()) if head.coupling else 0
        weights = sum(p.numel() for p in head.parameters())
        weights += (config.block_size - 2) * coupling if coupling else 0
        rounds = config.block_size if head.coupling else 1
        lm_head = rounds * tokens * config.hidden_size * lm_head_bytes
        per_weight = STATE_BYTES if config.fusion == "lstm" else head_bytes
        return cls(per_weight * weights, lm_head, config.block_size)

    def __str__(self) -> str:
        pass_, token = self.head + self.lm_head, (self.head + self.lm_head) / self.depths
        return (
            f"{_mb(pass_)} MB (head {_mb(self.head)}, lm_head "
            f"{_mb(self.lm_head)}), {_mb(token)} MB per drafted token"
        )


def _mb(count: float) -> str:
    """Megabytes, of a small head not rounded to none."""
    return f"{count / 1e6:,.0f}" if count >= 1e7 else f"{count / 1e6:.2g}"


def compared(
    config: FalconConfig | Eagle3Config, head_bytes: int, lm_head_bytes: int
) -> dict[str, DraftCost]:
    """A head's cost, and that of EAGLE-1 and of the paper's head for the same target."""
    paper = {"fusion": "lstm", "reads": "own", "coupling": "none", "draft_vocab": None}
    eagle = paper | {"fusion": "linear", "block_size": 1, "input_norm": False}
    base = config
    if isinstance(config, Eagle3Config):
        # Its attention heads need not divide the width, as those of the others must.
        fits = config.hidden_size % (2 * config.heads) == 0
        attention = (config.heads, config.kv_heads) if fits else (1, 1)
        sizes = {"heads": attention[0], "kv_heads": attention[1]}
        same = ("hidden_size", "vocab_size", "intermediate_size")
        base = FalconConfig(**sizes, **{key: getattr(config, key) for key in same})
    heads = {
        "draft pass": config,
        "EAGLE-1 pass": replace(base, **eagle),
        "LSTM pass": replace(base, **paper | {"block_size": max(2, config.block_size)}),
    }
    return {name: DraftCost.of(each, head_bytes, lm_head_bytes) for name, each in heads.items()}
