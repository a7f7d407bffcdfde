"""A tiny random model of every family of transformers that can be a target.

A family is a model type with a causal LM, or an encoder-decoder. Its own configuration is made
small by the names that sizes have, with at least one layer of every kind.
"""

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from specdraft.eval.families.support import KINDS
from specdraft.models.target_files import auto_class

MOST = 2e7  # parameters of a model that is tiny
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
VOCAB, WINDOW = 40, 6  # tokens, of which so many are seen
# Sizes by the names that families give them; a name that a configuration lacks is left out.
SIZES = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "num_experts_per_token"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "state_size", "query_pre_attn_scalar"), 8),
    "word_embed_proj_dim": 32,
    "mamba_n_heads": 8,
    "attention_types": [[["global", "local"], 1]],
    "qk_rope_head_dim": 4,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "tie_word_embeddings": False,
}
SOURCED = {  # of encoder-decoders
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    "d_kv": 8,
}
# How families are told to have layers of all kinds, and sizes of the recurrent ones.
LAYERS = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 8, "mamba_chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        **{"n_group": 1, "topk_group": 1, "linear_head_dim": 8, "linear_num_heads": 4},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": {
        "layer_types": ["linear_attention", "mlp", "full_attention"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8},
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        **{"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8},
        "num_mem_blocks": 1,
    },
}


def families() -> list[str]:
    """The model types with a causal LM, or an encoder besides, as this version of transformers
    names them."""
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    return sorted(names & set(CONFIG_MAPPING.keys()))


def tiny_model(family: str) -> PreTrainedModel:
    """A random model of a family. Raises whatever its code raises for sizes that do not fit."""
    kind = CONFIG_MAPPING[family]
    names = kind().to_dict()
    sizes = SIZES | (SOURCED if names.get("is_encoder_decoder") else {})
    sizes = {name: size for name, size in sizes.items() if name in names}
    if "kv_lora_rank" in names:  # every head has keys of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    sizes |= LAYERS.get(family) or _kinds(kind())
    config = _cut(kind(**sizes, **{name: names[name] and 1 for name in ENDS if name in names}))
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 2
    with torch.device("meta"):  # what has more parts than a text model stays large
        count = auto_class(config).from_config(config).num_parameters()
    if count > MOST:
        raise ValueError(f"its smallest model here has {count / 1e6:,.0f} million parameters")
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() or parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.get_output_embeddings().weight.mul_(4.0)  # far from near-ties
    # All are of one length, and say what they like.
    for name in ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id"):
        setattr(model.generation_config, name, None)
    return model


def _kinds(config: PretrainedConfig) -> dict:
    """One layer of every kind that a configuration has."""
    kinds = [*dict.fromkeys(getattr(config, "layer_types", None) or ())]
    if len(kinds) < 2 or not {*kinds} <= KINDS:
        return {}
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _cut(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with lists of layers as long as there are layers, of both kinds."""
    layers = config.to_dict().get("layer_types")
    if layers and len(layers) != config.num_hidden_layers:
        config.layer_types = [*dict.fromkeys(layers), *layers][: config.num_hidden_layers]
    return config
