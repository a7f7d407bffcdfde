"""ALiBi (arXiv 2108.12409): scores fall with the distance, by a slope of every head.

    softmax over j of (q.k_j * scale - slope * (i - j))    i, j: positions

BLOOM and MPT add it in attention code of their own, which transformers' attention interface cannot
replace and which is handed nothing but a cache. So on a structural copy their attention is replaced
module by module, and what an attention function needs comes in a stand-in for the cache. A family
is one row of `FAMILIES`.
"""

from collections.abc import Callable
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn


class CacheStandIn:
    """Stands for an empty cache on its way to the layers: an attention function, its options."""

    def __init__(self, attention: Callable, options: dict):
        self.attention, self.options = attention, options

    def get_seq_length(self, *_) -> int:
        return 0

    def get_query_offset(self, *_) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_) -> tuple[int, int]:
        return query_length, 0

    def attend(self, layer: nn.Module, heads: tuple[Tensor, ...], scale: float) -> Tensor:
        """Attend with query, key and value [1, heads, T, D]; [1, T, heads * D]."""
        options = {"scaling": scale, "slopes": layer.slopes, **self.options}
        return self.attention(layer, *heads, None, **options)[0].flatten(2)


def _bloom(self, hidden_states, residual, *_, layer_past: CacheStandIn, **__):
    heads = self._reshape(self.query_key_value(hidden_states))
    return residual + self.dense(layer_past.attend(self, heads, self.inv_norm_factor)), None


def _mpt(self, hidden_states, *_, past_key_values: CacheStandIn, **__):
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    heads = [part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, 2)]
    return self.out_proj(past_key_values.attend(self, tuple(heads), self.softmax_scale)), None


def _bloom_bias(base: nn.Module) -> Tensor:
    mask = torch.ones(1, 2, device=base.word_embeddings.weight.device)
    return base.build_alibi_tensor(mask, base.num_heads, torch.float32)


def _mpt_bias(base: nn.Module) -> Tensor:
    return base.build_mpt_alibi_tensor(base.num_heads, 2, device=base.wte.weight.device)


class Family(NamedTuple):
    attention: str  # the class of its attention modules
    forward: Callable  # that takes the place of theirs
    bias: Callable[[nn.Module], Tensor]  # what it adds at two neighbouring keys [heads, 1, 2]


FAMILIES = {
    "bloom": Family("BloomAttention", _bloom, _bloom_bias),
    "mpt": Family("MptAttention", _mpt, _mpt_bias),
}


def has_alibi(model: nn.Module) -> bool:
    """Whether a model is one whose attention is replaced here."""
    return model.config.model_type in FAMILIES


def replace_attention(view: nn.Module) -> None:
    """Replace the attention of a copy of a model by its family's function above."""
    family = FAMILIES[view.config.model_type]
    bias = family.bias(view.base_model)
    slopes = (bias[..., 1] - bias[..., 0]).flatten()
    for module in view.modules():
        if type(module).__name__ == family.attention:
            module.slopes = slopes
            module.forward = MethodType(family.forward, module)


def leaning_of(slopes: Tensor, capacity: int) -> Tensor:
    """What slopes [heads] add to scores at distances 0 .. capacity - 1, [heads, capacity]."""
    return -slopes[:, None] * torch.arange(capacity, device=slopes.device)


def attention_inputs(model: nn.Module, attention: Callable, **options) -> dict:
    """Return arguments of a forward by which the model's layers hand options to an attention."""
    return {"past_key_values": CacheStandIn(attention, options)} if has_alibi(model) else options
