"""Heads in the layouts that serving engines load: EAGLE-1 for vLLM and SGLang, Medusa for vLLM.

EAGLE-1 there is a Llama decoder behind `fc [H, 2H]` on cat(e(t_{i+1}), f_i), without the first
layer's input norm; embedding and lm_head are the target's and stay out of the file. Our head
works in units of its two scales, s_e of embeddings and s_f of features. They fold into the weights:
with x' = s_f x everywhere in the residual stream,

    fc         [s_f / s_e W_e, W_f]         q, k, v of a layer without input norm   W / s_f
    o, down    s_f W                        every norm                              eps' = s_f^2 eps

A first layer that normalises its input cannot be folded, and is refused.

Medusa there is `blocks.{h}.layers.{l}` and `lm_heads.{h}`: our heads, cut from their stack. Names
that an engine does not know it ignores silently: tests hold the keys to be exactly those.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.medusa import MedusaHeads
from specdraft.models.sar.layer import DecoderLayer
from specdraft.recipes.errors import HeadError

ENGINES = ("vllm", "sglang")
# What each engine finds its EAGLE-1 implementation by; vLLM puts "Eagle" before the name.
EAGLE_ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


@dataclass(frozen=True)
class Served:
    """A head as an engine wants it: config.json and the tensors of model.safetensors."""

    config: dict
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write both files, or none; HeadError when the folder already exists."""
        if folder.exists():
            raise HeadError(f"{folder} already exists; give another --out, or delete it")
        writing = folder.with_name(f".writing-{folder.name}")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        (writing / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        save_file(self.tensors, writing / "model.safetensors", metadata={"format": "pt"})
        for path in [*writing.iterdir(), writing]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        writing.rename(folder)


def serve_eagle(
    head: FalconHead, engine: str, positions: int | None, dtype: torch.dtype = torch.float32
) -> Served:
    """Convert an EAGLE-1 head for an engine.

    positions: the target's context, if it has an end. Raises HeadError for a head that the layout
    cannot hold, with the reason.
    """
    config = head.config
    _check_eagle(config)
    # fc for inputs that have not been divided by their scales, [H, 2H].
    embed, feature = head.fuse.weight.double().chunk(2, 1)
    fused = torch.cat((embed * (config.feature_scale / config.embed_scale), feature), 1)
    tensors = {"fc.weight": fused}
    for number, layer in enumerate(head.layers):
        for name, tensor in _llama_layer(layer, config).items():
            tensors[f"layers.{number}.{name}.weight"] = tensor
    if engine == "sglang":  # its `fc` has a bias, which would stay as it was initialised
        tensors["fc.bias"] = torch.zeros(config.hidden_size)
    return _served(_eagle_config(config, engine, positions), tensors, dtype)


def serve_medusa(
    heads: MedusaHeads,
    engine: str,
    lm_head: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Served:
    """Convert Medusa heads for an engine.

    lm_head: the target's [V, H], wanted where the heads share it. Raises HeadError for an engine
    without Medusa.
    """
    if engine != "vllm":
        raise HeadError(f"{engine} loads no Medusa heads; engines that do: vllm")
    config, own = heads.config, heads.lm_heads is not None
    tensors = {}
    for h in range(config.heads):
        for number in range(config.layers):
            name = f"blocks.{h}.layers.{number}"
            tensors[f"{name}.weight"] = heads.weight[number, h]
            tensors[f"{name}.bias"] = heads.bias[number, h]
        if own:
            tensors[f"lm_heads.{h}.weight"] = heads.lm_heads[h]
    if not own:
        tensors["lm_head.weight"] = lm_head
    content = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "medusa_fc_bias": True,
        "original_lm_head": not own,  # one lm_head for all
    }
    return _served(content, tensors, dtype)


def _check_eagle(config: FalconConfig) -> None:
    """Raise HeadError unless the engines' EAGLE-1 layout can hold a head."""
    if config.block_size > 1:
        reason = f"it drafts {config.block_size} tokens per pass, engines one"
    elif config.fusion != "linear":
        reason = f"its fusion is {config.fusion!r}, the layout's one linear layer"
    elif config.input_norm:
        reason = "its first layer normalises its input, the layout's does not, and a norm is not "
        reason += "linear: train one with head.input_norm=false"
    elif config.feature_layers:
        reason = f"it reads layers {list(config.feature_layers)} of the target, the layout's none: "
        reason += "train one with data.feature_layers=[]"
    elif config.draft_vocab is not None:
        reason = f"it drafts among {config.draft_vocab} tokens, the layout's with all of lm_head: "
        reason += "train one with head.draft_vocab=null"
    else:
        return
    raise HeadError(f"this head has no serving format: {reason}")


def _llama_layer(layer: DecoderLayer, config: FalconConfig) -> dict[str, Tensor]:
    """A decoder layer by Llama's names, in the residual stream times `feature_scale`."""
    scale, normed = config.feature_scale, layer.attention_norm is not None
    qkv = layer.qkv.weight.double() / (1.0 if normed else scale)
    query, key, value = qkv.split([layer.dim * count for count in layer.heads])
    gate, up = layer.gate_up.weight.chunk(2)
    tensors = {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": layer.out.weight.double() * scale,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down.weight.double() * scale,
    }
    return tensors | ({"input_layernorm": layer.attention_norm} if normed else {})


def _eagle_config(config: FalconConfig, engine: str, positions: int | None) -> dict:
    return {
        "architectures": [EAGLE_ARCHITECTURES[engine]],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden_size // config.heads,
        "vocab_size": config.vocab_size,
        **({"max_position_embeddings": positions} if positions else {}),
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps * config.feature_scale**2,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _served(config: dict, tensors: dict[str, Tensor], dtype: torch.dtype) -> Served:
    cast = {name: t.detach().to("cpu", dtype).contiguous().clone() for name, t in tensors.items()}
    return Served(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, cast)
