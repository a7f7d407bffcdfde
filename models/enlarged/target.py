"""A target that writes what a small one writes, at the cost of a large one.

How a machine runs a 7B target can so be measured where none can be downloaded: the text, and with
it how many tokens are accepted, is that of a model which has learned to write. A Llama is put into
a Llama of a larger shape (places.py), alone or as a student. Layers that the small one lacks have
random weights, real numbers to multiply, and add nothing: their last matrices, of attention and of
the MLP, are zero. A token that it lacks has the logit of its padding token, which it never writes
greedily; sampled without top-p or top-k, one of many thousand may come.

Shapes: h, H hidden, V vocabulary.
"""

import copy
from dataclasses import astuple, replace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from specdraft.models.enlarged.places import Growth, Layer, Sizes, fill, in_blocks, repeat_row
from specdraft.models.shapes import TargetShape, llama_config
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import RecipeError

ENLARGED = " at the size of "  # between the names of a target and of a shape


def enlarged_target(
    target: Target,
    shape: TargetShape,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    prepacked: PrepackedWeights | None = None,
) -> Target:
    """Return the target called `name`, of a shape, that says what a small one says: its features
    are those of the small one and H - h zeros. Its weights are made on the device.

    Raises RecipeError as `enlarged_config`.
    """
    config = enlarged_config(target, shape, name)
    growth = Growth(name, small_sizes(target.config), Sizes.of(shape))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False)
    _fill(model, target.model, growth)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    large = Target(model.to(device), target.tokenizer, name, prepacked=prepacked)
    large.is_enlarged = True
    large.identify(f"{target.identity()['weights']} in {astuple(shape)}", config)
    return large


def enlarged_config(target: Target, shape: TargetShape, name: str) -> LlamaConfig:
    """Return the config of a target of a shape that says what a small one says.

    Raises RecipeError for a target that is no Llama, and a shape that it does not go into.
    """
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    plain = rope.get("rope_type", "default") == "default"
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or not plain:
        raise RecipeError(
            f"{name}: {target.name} is a {config.model_type}; only a Llama without biases, with "
            "plain rotary positions, can be enlarged"
        )
    growth = Growth(name, small_sizes(config), Sizes.of(shape))
    least = {"layers": config.num_hidden_layers, "vocab_size": config.vocab_size}
    for what, count in least.items():
        if (found := getattr(shape, what)) < count:
            raise RecipeError(
                f"{name}: {target.name} has {what} = {count}, and the shape {found}; take a larger "
                "shape"
            )
    own = replace(
        shape,
        rope_theta=rope.get("rope_theta", 10000.0),
        norm_eps=config.rms_norm_eps * growth.of_norms**2,
        tied=shape.tied and config.tie_word_embeddings,
    )
    return llama_config(own, target.context or 2048, config)


def small_sizes(config: PretrainedConfig) -> Sizes:
    """The sizes of a Llama's layers."""
    return replace(Sizes.of(TargetShape.of(config)), dim=config.head_dim)


def spare_row(config: PretrainedConfig) -> int:
    """Return the token whose logit stands for all that the small target lacks: its padding, which
    it never writes greedily, else its first."""
    return config.pad_token_id or 0


def _fill(large: LlamaForCausalLM, small: LlamaForCausalLM, growth: Growth) -> None:
    """Write a small model into a large one."""
    tokens, width = small.config.vocab_size, growth.width()
    rows = in_blocks(1, tokens, large.config.vocab_size)
    row = spare_row(small.config)
    fill(large.model.embed_tokens.weight, small.model.embed_tokens.weight, rows, width)
    if not large.config.tie_word_embeddings:
        fill(large.lm_head.weight, small.lm_head.weight, rows, width)
    repeat_row(large.lm_head.weight, tokens, row)
    fill(large.model.norm.weight, small.model.norm.weight, width, factor=growth.of_norms)
    count = len(small.model.layers)
    for layer, own in zip(large.model.layers, small.model.layers, strict=False):
        growth.fill_layer(_parts(layer), _parts(own))
    for layer in large.model.layers[count:]:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(last.weight)


def _parts(layer: nn.Module) -> Layer:
    """The weights of a Llama's layer."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    matrices = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    matrices += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return Layer(*(part.weight for part in norms + matrices))
