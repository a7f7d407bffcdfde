"""Encoder-decoders (T5, BART): an encoder reads a source once, a decoder attends to what it said.

    p(y_i | y_<i, x) = softmax(finish(lm_head(f_i)))    f = decoder(y_<i, encoder(x))

What is drafted for and verified is the decoder. It begins with a start token or two of its own; the
source x is the encoder's input.

T5 has no positions but adds a learned number per head to its scores, by the distance of the two
tokens. Others add positions to embeddings, counted from the length of the cache.
"""

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


def is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Whether a model of this config has an encoder to read a source with."""
    return bool(getattr(config, "is_encoder_decoder", False))


def base_of(model: PreTrainedModel) -> nn.Module:
    """Return what makes features: the model without its lm_head; an encoder-decoder's decoder."""
    return model.get_decoder() if is_encoder_decoder(model.config) else model.base_model


def decoder_depth(config: PretrainedConfig) -> tuple[str, int]:
    """Return the key of a text config that counts the decoder's layers, and their number; an
    encoder may have more or fewer."""
    keys = ("num_decoder_layers", "decoder_layers") if is_encoder_decoder(config) else ()
    key = next((key for key in keys if hasattr(config, key)), "num_hidden_layers")
    return key, getattr(config, key)


def decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    """Return the decoder layers of a model: its first list of `count` modules."""
    lists = (part for part in base.modules() if isinstance(part, nn.ModuleList))
    return next(part for part in lists if len(part) == count)


def start_ids(config: PretrainedConfig, generation: GenerationConfig) -> list[int]:
    """Return the ids that an encoder-decoder's every generation begins with; none of other models.

    The second, a language or BART's <s>, is the one that `generate` would force.
    """

    def setting(name: str) -> int | None:
        said = (getattr(part, name, None) for part in (generation, config))
        return next((token for token in said if token is not None), None)

    if not is_encoder_decoder(config):
        return []
    first = setting("decoder_start_token_id")
    first = setting("bos_token_id") if first is None else first
    return [token for token in (first, setting("forced_bos_token_id")) if token is not None]


class Places:
    """Stands for a cache that says how far each token of a packed forward is behind its number.

    Decoders count positions from the length of their cache; added to the number of each token, an
    offset for each gives its position. Keys and values are handed back as they come.
    """

    def __init__(self, positions: Tensor):
        self.offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_) -> Tensor:
        return self.offsets

    def update(self, key: Tensor, value: Tensor, *_) -> tuple[Tensor, Tensor]:
        return key, value


def leaning_of(base: nn.Module, capacity: int) -> Tensor | None:
    """What T5 adds to scores at distances 0 .. capacity - 1, [heads, capacity]; None for others.

    It is the first layer's, and handed on to the others.
    """
    for module in base.modules():
        if getattr(module, "has_relative_attention_bias", False):
            last = module.compute_bias(1, capacity, past_seen_tokens=capacity - 1)
            return last[0, :, 0].flip(-1).contiguous()
    return None


def drop_own_bias(view: nn.Module) -> None:
    """Keep a copy of a decoder from making its bias, of a packed forward's numbers, in vain."""
    for module in view.modules():
        if hasattr(module, "has_relative_attention_bias"):
            module.has_relative_attention_bias = False
