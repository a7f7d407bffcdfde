"""What drafts: a head of decoder layers or Medusa heads on the target, or a small LM."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import Draft, Few, Fraction, Natural, Positive, Section, Tokens, Width


@dataclass(frozen=True, kw_only=True)
class HeadSection(Section):
    """The shape of a Falcon head (Gao et al., AAAI 2025); with `block_size: 1`,
    `fusion: linear` and `input_norm: false` it is the head of EAGLE-1 (arXiv 2401.15077), with
    `block_size: 1` and `fusion: layers` that of EAGLE-3 (arXiv 2503.01840)."""

    block_size: Draft = 2  # k: tokens drafted per pass
    # Of token and feature; layers: of data.feature_layers alone, which the token stands beside.
    fusion: Literal["lstm", "linear", "layers"] = "lstm"
    reads: Literal["own", "both", "newest"] = "own"  # of a block's inputs, by each of its slots
    coupling: Literal["none", "markov", "recurrent"] = "none"  # of a slot with the token before it
    layers: Few = 1  # decoder layers
    # Of the target, from 2 on: the head's layer begins as it; null: at random.
    start_layer: Few | None = None
    heads: Few | None = None  # null: as the target, for these three
    kv_heads: Few | None = None
    intermediate: Width | None = None  # width of the MLP
    # Inputs that an input sees, itself included; null: all before it. Beyond the rows that it was
    # trained on, a head that sees all drafts worse with every token.
    window: Tokens | None = None
    input_norm: bool = True  # of the first decoder layer; EAGLE-1 and its serving format: false
    # Of fusion: layers. Each layer is normalised, and so is the state that is fed back: EAGLE-3.1.
    normed: bool = False
    # A trained head to measure in place of the run's: a folder or a Hub id, also one in the layout
    # of vLLM and SGLang, EAGLE-1's or EAGLE-3's. `head=..` is short for it.
    model: str | None = None
    # Drafted are only this many tokens, the most frequent of the training answers and the target's
    # eos; lm_head shrinks with it. null: all.
    draft_vocab: Tokens | None = None

    @property
    def kind(self) -> str:
        """The kind of head that has this shape: the name of its folder, and of its methods."""
        if self.fusion == "layers":
            return "eagle3"
        return "eagle" if self.block_size == 1 and self.fusion == "linear" else "falcon"

    def conflicts(self) -> Iterator[str]:
        """Yield keys that the block size, the fusion or the start layer rule out."""
        for key, alone in (("reads", "own"), ("coupling", "none")):
            if self.block_size == 1 and getattr(self, key) != alone:
                needed = f"needs head.block_size above 1; a block of one slot has {alone}"
                yield self.complaint(key, needed)
        if self.fusion == "layers":
            for key, wanted in (("block_size", 1), ("layers", 1), ("input_norm", True)):
                if getattr(self, key) != wanted:
                    needed = f"EAGLE-3 (head.fusion=layers) has {str(wanted).lower()}"
                    yield self.complaint(key, needed)
        elif self.normed:
            yield self.complaint("normed", "needs head.fusion=layers")
        if self.start_layer is not None:
            wanted = {"fusion": "linear", "heads": None, "kv_heads": None, "intermediate": None}
            for key, needed in wanted.items():
                if getattr(self, key) != needed:
                    named = needed or "null, the target's"
                    yield self.complaint(key, f"must be {named}, to begin as head.start_layer")
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
    model: str | None = None  # trained ones to measure in place of the run's: a folder or a Hub id

    @property
    def given(self) -> bool:
        """Whether the recipe has Medusa heads at all."""
        return self.heads is not None


@dataclass(frozen=True, kw_only=True)
class StudentSection(Section):
    """The draft LM. Exactly one of `model`, `keep_layers` and `layers` says where it comes from;
    LoRA (arXiv 2106.09685) trains low-rank adapters of weights that exist."""

    model: str | None = None  # a pretrained one: a directory or a Hub id
    revision: str | None = None  # Hub branch, tag or commit
    keep_layers: tuple[Natural, ...] | None = None  # pruned from the target: layers it copies
    embeddings: Literal["copied", "shared"] = "copied"  # of a pruned one; shared: not trained
    layers: Few | None = None  # a config of its own, like Llama
    hidden: Width | None = None  # null: as the target, for these four
    heads: Few | None = None
    kv_heads: Few | None = None
    intermediate: Width | None = None  # width of the MLP
    training: Literal["full", "lora", "none"] = "full"  # none: drafts as it is
    lora_rank: Width = 16
    lora_alpha: Positive = 32.0
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # linear layers

    @property
    def given(self) -> bool:
        """Whether the recipe has a student at all."""
        return not (self.model is None and self.keep_layers is None and self.layers is None)

    def conflicts(self) -> Iterator[str]:
        """Yield a second origin, and settings that the origin does not have."""
        origins = ("model", "keep_layers", "layers")
        given = [key for key in origins if getattr(self, key) is not None]
        if len(given) > 1:
            yield self.complaint(given, "set exactly one, the others to null")
            return
        keep = self.keep_layers
        if keep is not None and (not keep or list(keep) != sorted(set(keep))):
            needed = "must be layers of the target in ascending order, e.g. [0, 11]"
            yield self.complaint("keep_layers", needed)
        if self.layers is None:
            for key in ("hidden", "heads", "kv_heads", "intermediate"):
                if getattr(self, key) is not None:
                    yield self.complaint(key, "needs a config of its own: student.layers")
        if self.embeddings == "shared" and keep is None:
            yield self.complaint("embeddings", "needs student.keep_layers")
        if self.training == "none" and self.given and self.model is None:
            yield self.complaint("training", "needs a pretrained student: student.model")
        if self.training == "lora" and self.layers is not None:
            yield self.complaint("training", "adapts existing weights; set student.layers to null")
        if not self.lora_targets:
            yield self.complaint("lora_targets", "name at least one linear layer, e.g. q_proj")
