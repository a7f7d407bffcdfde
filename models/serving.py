"""Heads in the layouts that serving engines load: EAGLE for vLLM and SGLang, Medusa for vLLM.

EAGLE-1 there is a Llama decoder behind `fc [H, 2H]` on cat(e(t_{i+1}), f_i), without the first
layer's input norm; embedding and lm_head are the target's and stay out of the file. Our head
works in units of its two scales, s_e of embeddings and s_f of features. They fold into the weights:
with x' = s_f x everywhere in the residual stream,

    fc         [s_f / s_e W_e, W_f]         q, k, v of a layer without input norm   W / s_f
    o, down    s_f W                        every norm                              eps' = s_f^2 eps

A first layer that normalises its input cannot be folded, and is refused.

EAGLE-3 there is one such layer behind `fc` over the target's layers, with norms for the token and
the state that its attention reads, and a `norm` and an lm_head of N tokens behind it. Token n has
the id n + d2t[n], and t2d marks the ids. Our head has no scales: it is the same by other names.

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

from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.medusa import MedusaHeads
from specdraft.models.sar.layer import DecoderLayer
from specdraft.models.saved import share_weights
from specdraft.recipes.errors import HeadError

ENGINES = ("vllm", "sglang")
# What each engine finds its EAGLE-1 implementation by; vLLM puts "Eagle" before the name.
EAGLE_ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # of the target, which EAGLE-3 reads


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
        share_weights(writing)
        for path in [*writing.iterdir(), writing]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        writing.rename(folder)


def serve_eagle(
    head: FalconHead,
    engine: str,
    positions: int | None,
    dtype: torch.dtype = torch.float32,
    token_scale: float = 1.0,
) -> Served:
    """Convert an EAGLE-1 head for an engine.

    positions: the target's context, if it has an end. token_scale: what the target multiplies its
    embeddings by (models/embeddings.py); the layout reads them as they lie in its file. Raises
    HeadError for a head that the layout cannot hold, with the reason.
    """
    config, tensors = head.config, {}
    _check_eagle(config)
    for name, tensor in eagle_tensors(head).items():
        tensors[name] = tensor.double() * _scale(name, config)
    # fc for inputs that have not been divided by their scales, [H, 2H].
    embed, feature = tensors["fc.weight"].chunk(2, 1)
    embed = embed * (config.feature_scale / config.embed_scale * token_scale)
    tensors["fc.weight"] = torch.cat((embed, feature), 1)
    if engine == "sglang":  # its `fc` has a bias, which would stay as it was initialised
        tensors["fc.bias"] = torch.zeros(config.hidden_size)
    content = {
        "architectures": [EAGLE_ARCHITECTURES[engine]],
        **_llama_config(config, positions),
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps * config.feature_scale**2,
    }
    return _served(content, tensors, dtype)


def serve_eagle3(
    head: Eagle3Head, engine: str, positions: int | None, dtype: torch.dtype = torch.float32
) -> Served:
    """Convert an EAGLE-3 head for an engine.

    positions: the target's context, if it has an end. Raises HeadError for what the engine lacks.
    """
    config, tensors = head.config, eagle3_tensors(head)
    if engine == "sglang" and (config.norm_residual or config.layer_norms == "joint"):
        raise HeadError("this head has no serving format: sglang lacks norms that it has")
    if config.window is not None:
        raise HeadError(
            f"this head has no serving format: it sees {config.window} tokens, the layout's all: "
            "train one with head.window=null"
        )
    content = {
        "architectures": [EAGLE3_ARCHITECTURE],
        **_llama_config(config, positions),
        "draft_vocab_size": config.draft_vocab or config.vocab_size,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if config.rope["rope_type"] == "default" else config.rope,
        "rms_norm_eps": config.norm_eps,
        "fc_norm": config.layer_norms == "each",
        "norm_before_fc": config.layer_norms == "joint",
        "norm_before_residual": config.norm_residual,
        "norm_output": config.norm_output,
        **_layers_read(config.feature_layers, engine),
    }
    served = _served(content, tensors, dtype)
    if head.draft_ids is not None:
        places = torch.arange(len(head.draft_ids))
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        drafted[head.draft_ids] = True
        served.tensors.update(d2t=head.draft_ids - places, t2d=drafted)
    return served


def _layers_read(layers: tuple[int, ...], engine: str) -> dict:
    """How an engine is told which layers of the target a head reads: vLLM counts them as we do,
    SGLang from 0."""
    if engine == "sglang":
        from_zero = [layer - 1 for layer in layers]
        return {"eagle_config": {"use_aux_hidden_state": True, AUX_LAYERS: from_zero}}
    return {AUX_LAYERS: list(layers)}


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
    elif config.window is not None:
        reason = f"it sees {config.window} tokens, a head of the layout all: train one "
        reason += "with head.window=null"
    elif config.draft_vocab is not None:
        reason = f"it drafts among {config.draft_vocab} tokens, the layout's with all of lm_head: "
        reason += "train one with head.draft_vocab=null"
    else:
        return
    raise HeadError(f"this head has no serving format: {reason}")


def eagle_tensors(head: FalconHead) -> dict[str, Tensor]:
    """The tensors of an EAGLE-1 head by the layout's names, as they are: views of its own."""
    tensors = {f"fc.{name}": tensor for name, tensor in head.fuse.named_parameters()}
    for number, layer in enumerate(head.layers):
        norm = {} if layer.attention_norm is None else {"input_layernorm": layer.attention_norm}
        for name, tensor in {**_llama_layer(layer), **norm}.items():
            tensors[f"layers.{number}.{name}.weight"] = tensor
    return tensors


def eagle3_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """The same of an EAGLE-3 head, without its draft vocabulary."""
    layer, norms = head.layer, {}
    if head.config.layer_norms == "each":
        parts = head.layer_norms.chunk(len(head.config.feature_layers))
        norms = {f"fc_norm.{number}": part for number, part in enumerate(parts)}
    elif head.config.layer_norms == "joint":
        norms = {"input_norm": head.layer_norms}
    inner = {"input_layernorm": layer.embedding_norm, "hidden_norm": layer.attention_norm}
    tensors = {
        **norms,
        "fc": head.fc.weight,
        **{f"midlayer.{name}": part for name, part in {**_llama_layer(layer), **inner}.items()},
        "norm": head.norm,
        "lm_head": head.lm_head,
    }
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def _llama_layer(layer: DecoderLayer) -> dict[str, Tensor]:
    """A decoder layer by Llama's names, without the norms before its attention."""
    query, key, value = layer.qkv.weight.split([layer.dim * count for count in layer.heads])
    gate, up = layer.gate_up.weight.chunk(2)
    return {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": layer.out.weight,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down.weight,
    }


def _scale(name: str, config: FalconConfig) -> float:
    """What an EAGLE-1 head's tensor is multiplied by, in the residual stream times
    `feature_scale`."""
    if name.endswith((".o_proj.weight", ".down_proj.weight")):
        return config.feature_scale
    unnormed = name.startswith("layers.0.") and not config.input_norm
    projected = name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight"))
    return 1.0 / config.feature_scale if unnormed and projected else 1.0


def _llama_config(config: FalconConfig | Eagle3Config, positions: int | None) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        **({"max_position_embeddings": positions} if positions else {}),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _served(config: dict, tensors: dict[str, Tensor], dtype: torch.dtype) -> Served:
    cast = {name: t.detach().to("cpu", dtype).contiguous().clone() for name, t in tensors.items()}
    return Served(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, cast)
