"""The two embeddings of a target without its layers: all that a head trains against.

On cached features nothing else of the target is needed, and these two matrices are read from its
weight files alone: a head for a 70B target trains on one small GPU.

At 128k tokens lm_head costs more than a small head. A head with a draft vocabulary works with the
rows of N tokens and never drafts the others. That changes which drafts are made, never what is
decoded: their probability q is zero, and the acceptance rules are given that q.

Shapes: H hidden, V vocabulary, N tokens drafted among.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from specdraft.models.families.finish import PLAIN, Finish, finish_of
from specdraft.models.target_files import auto_class, model_folder
from specdraft.models.weights.files import read_tensors
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import TargetError, in_a_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TargetEmbeddings:
    """The matrices of a target's input embedding and of its lm_head, [V, H] each, and what comes
    after it."""

    embedding: Tensor
    lm_head_weight: Tensor
    finish: Finish = PLAIN
    embed_scale: float = 1.0  # what the family's own module multiplies its embeddings by

    @classmethod
    def load(
        cls, name: str, revision: str | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> "TargetEmbeddings":
        """Read two tensors from the target's weight files and nothing else. Raises TargetError."""
        folder = model_folder(name, revision)
        empty = model_without_weights(folder, DTYPES[dtype])
        check_no_bias(empty.get_output_embeddings(), name)
        ends = (empty.get_input_embeddings(), empty.get_output_embeddings())
        matrices = [end.weight for end in ends]
        # A tied tensor has two names, and a file may hold it under either; or, in spite of the
        # config, a tensor under each (FLAN-T5): a name of its own goes first.
        named = [*empty.named_parameters(remove_duplicate=False)]
        own = [f"{n}.weight" for end in ends for n, m in empty.named_modules() if m is end]
        names = [{n for n, p in named if p is matrix} for matrix in matrices]
        tensors = read_tensors(folder, set.union(*names), _renaming(empty))
        if getattr(empty.config, "tie_word_embeddings", False):
            names = [set.union(*names)] * 2
        names = [[one, *sorted(alias - {one})] for one, alias in zip(own, names, strict=True)]
        found = [next((tensors[n] for n in alias if n in tensors), None) for alias in names]
        for alias, tensor in zip(names, found, strict=True):
            if tensor is None:
                wanted = " or ".join(sorted(alias))
                raise TargetError(f"{name}: no tensor named {wanted} in {folder}")
        for matrix, alias, tensor in zip(matrices, names, found, strict=True):
            if tensor.shape != matrix.shape or not tensor.isfinite().all():
                what = f"{list(tensor.shape)}, and its config.json says {list(matrix.shape)}"
                what = what if tensor.shape != matrix.shape else "no finite numbers"
                raise TargetError(f"{name}: {min(alias)} in {folder} is {what}")
        found = (tensor.to(device=device, dtype=DTYPES[dtype]) for tensor in found)
        return cls(*found, finish_of(empty), embed_scale_of(ends[0]))

    def embed(self, ids: Tensor) -> Tensor:
        """Input embedding: ids [..] to vectors [.., H]."""
        embedded = nn.functional.embedding(ids, self.embedding)
        if self.embed_scale == 1.0:
            return embedded
        return embedded * self.embedding.new_tensor(self.embed_scale)


class DraftVocabulary:
    """The N tokens that a head drafts among: their logits, and ids for their places 0..N-1.

    Without `ids` they are all of the target's V tokens, and a place is an id.
    """

    def __init__(self, ids: Tensor | None, target: Any, prepacked: PrepackedWeights | None = None):
        """ids: [N], ascending. target: a `Target`, or its `TargetEmbeddings`. Raises TargetError
        for a part of an lm_head that has a bias."""
        if ids is not None:
            check_no_bias(getattr(target, "lm_head", None), getattr(target, "name", ""))
            ids = ids.to(target.lm_head_weight.device)
        self.ids, self._target = ids, target
        self._linear = prepacked.linear if prepacked else nn.functional.linear

    @cached_property
    def lm_head(self) -> Tensor:
        """The rows of the target's lm_head for these tokens, [N, H]."""
        weight = self._target.lm_head_weight
        return weight if self.ids is None else weight[self.ids]

    def logits(self, features: Tensor) -> Tensor:
        """Features [.., H] to logits [.., N]; the target is a `Target`, not its embeddings."""
        features = features.to(self._target.dtype)
        if self.ids is None:
            return self._target.logits(features)
        return self._target.finish(self._linear(features, self.lm_head))

    def tokens(self, places: Tensor) -> Tensor:
        """Return the ids at places [..]."""
        return places if self.ids is None else self.ids[places]

    def places(self, tokens: Tensor) -> Tensor:
        """Return where ids [..] are; -1 for those that are never drafted."""
        if self.ids is None:
            return tokens
        places = torch.searchsorted(self.ids, tokens.contiguous()).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[places] == tokens, places, -1)

    def spread(self, probs: Tensor) -> Tensor:
        """Return probabilities [.., N] over the whole vocabulary, [.., V]."""
        if self.ids is None:
            return probs
        whole = probs.new_zeros(*probs.shape[:-1], self._target.vocab_size)
        return whole.index_copy_(-1, self.ids, probs)


def embed_scale_of(embedding: nn.Module) -> float:
    """Return what an input embedding multiplies its vectors by: sqrt(H) in Gemma and BART, else 1.
    Drafters read the products, so they have to be trained on them."""
    # Gemma has it as a buffer, too, which on the meta device is no number.
    names = ("scalar_embed_scale", "embed_scale")
    return float(next((getattr(embedding, n) for n in names if hasattr(embedding, n)), 1.0))


def check_no_bias(lm_head: nn.Module | None, name: str) -> None:
    """Raise TargetError for an lm_head that is more than a matrix."""
    if getattr(lm_head, "bias", None) is not None:
        raise TargetError(
            f"{name}: its lm_head has a bias, which training would leave out; "
            "drafters without training, like prompt lookup, work"
        )


def model_without_weights(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the structure of the model in a folder, its tensors on the meta device.

    Raises TargetError where the folder's configs make none.
    """
    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=dtype, **trust)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises what it likes for a file that is none
        raise TargetError(f"cannot load {folder}: {in_a_line(error)}") from error
    return model


def _renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """Return the function from a tensor's name in a weight file to its name in the model.

    As from_pretrained does it: files of a base model lack its prefix (GPT-2, OPT), and some
    families have changed names since (GPT-NeoX).
    """
    mapping, parameters = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    return lambda key: rename_source_key(key, renamings, converters, prefix, parameters)[0]
