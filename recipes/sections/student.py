"""The draft LM: a small model of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import Few, Natural, Positive, Section, Width


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
        """One origin, and only settings that this origin has."""
        origins = ("model", "keep_layers", "layers")
        given = [self.setting(key) for key in origins if getattr(self, key) is not None]
        if len(given) > 1:
            yield f"{' and '.join(given)}: set exactly one, the others to null"
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
            yield self.complaint("training", "adapts weights that exist; not with layers")
        if not self.lora_targets:
            yield self.complaint("lora_targets", "name at least one linear layer, e.g. q_proj")
