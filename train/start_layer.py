"""A head that begins as a layer of its target (`head.start_layer`), and not at random.

Layer n of the target reads the hidden states h of layer n - 1 and writes its own
(models/feature_layers.py). A head reads a token and the feature before it, and writes the feature
behind. So its fusion begins as the matrix that comes nearest to what layer n reads of that token,
a ridge regression over rows of training, and its decoder layer as layer n:

    fuse [e(t_(i+1)); f_i]  ~  m * h_(n-1), at i + 1        m = g / (rms(h_(n-1)) * s)

Features are f = g * h / rms(h), with g the final norm's weights and h of the last layer; a head
works on f / s. Hence m: what layer n writes is multiplied by it, and what its norms read divided.

Shapes: T tokens of a row, H hidden.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specdraft.data.store.feature_cache import Features
from specdraft.data.store.features import SAMPLE_TOKENS
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.families.encoder_decoder import decoder_layers
from specdraft.models.sar.layer import DecoderLayer
from specdraft.models.target import Target
from specdraft.models.weights.placement import is_kept_elsewhere
from specdraft.recipes.errors import RecipeError, TargetError

RIDGE = 1e-3  # of the inputs' mean square: no direction that hardly occurs decides
MOST = 20.0  # times a norm's weight may grow, where the final norm hides a dimension
# What becomes each part of a head's layer: of the target's, as Llama names them.
PARTS = {
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NAMES = {f"{part}.weight" for parts in PARTS.values() for part in parts}


def check_start_layer(first: int, config: FalconConfig, target: Target) -> None:
    """Raise RecipeError for a layer that the target does not have, or that no head's can begin as;
    TargetError where its layers are not loaded."""
    count, key = target.depth, f"head.start_layer = {first}"
    last = count - config.layers + 1
    if not 2 <= first <= last:
        raise RecipeError(
            f"{key}: must be from 2 to {last}, or null, for {target.name} has {count} decoder "
            "layers and the first reads embeddings"
        )
    target.check_runs()
    if is_kept_elsewhere(target.model):
        raise TargetError(
            f"{key}: copies a layer of {target.name}, and target.device_map keeps some on the CPU "
            "or on disk; load it where it fits, or set head.start_layer to null"
        )
    dim = config.head_dim
    keys = {f"self_attn.{part}_proj.weight": config.kv_heads * dim for part in "kv"}
    sizes = keys | {"self_attn.q_proj.weight": config.heads * dim}
    silu = getattr(target.config.get_text_config(), "hidden_act", None) == "silu"
    for layer in decoder_layers(target.base, count)[first - 1 :][: config.layers]:
        found = layer.state_dict()
        same = found.keys() == NAMES and all(len(found[k]) == size for k, size in sizes.items())
        if not (silu and same):
            raise RecipeError(
                f"{key}: a head's layer is Llama's, and {type(layer).__name__} of {target.name} is "
                "another; set it to null"
            )


@torch.no_grad()
def start_from_layer(head: FalconHead, target: Target, rows: Features, first: int) -> None:
    """Let a new head begin as the target's layers from the `first` on, counted from 1."""
    gain = target.base.norm.weight.detach().float().cpu()
    matrix, spread = _nearest(head, target, rows, first - 1)
    writes = gain / (spread * head.config.feature_scale)
    reads = (head.config.feature_scale / gain).clamp(-MOST, MOST)
    head.fuse.weight.copy_(matrix * writes[:, None])
    theirs = decoder_layers(target.base, target.depth)[first - 1 :]
    for own, layer in zip(head.layers, theirs, strict=False):
        _become(own, layer.state_dict(), writes, reads)


def _nearest(head: FalconHead, target: Target, rows: Features, layer: int) -> tuple[Tensor, float]:
    """The matrix [H, 2H] from what a head's fusion reads to what a layer of the target has written
    of the token ahead, and the spread of that."""
    width = head.config.hidden_size
    inner = torch.zeros(2 * width, 2 * width, dtype=torch.float64)
    outer = torch.zeros(2 * width, width, dtype=torch.float64)
    squares, tokens = 0.0, 0
    for ids in _sample(rows, target):
        known = target.features(ids[None], layers=(layer,))[0].float()
        read = head.inputs(target.embed(ids[1:]).float(), known[:-1, :width]).cpu().double()
        written = known[1:, width:].cpu().double()
        inner += read.T @ read
        outer += read.T @ written
        squares, tokens = squares + written.square().sum().item(), tokens + len(written)
    inner.diagonal().add_(RIDGE * tokens)  # inputs are at unit scale
    return torch.linalg.solve(inner, outer).T.float(), (squares / (tokens * width)) ** 0.5


def _sample(rows: Features, target: Target) -> Iterator[Tensor]:
    """Tokens [T] of every n-th row, where the target is: some ten thousand in all."""
    every = -(-sum(rows.lengths) // SAMPLE_TOKENS)
    return (rows[n]["input_ids"].to(target.device) for n in range(0, len(rows), every))


def _become(own: DecoderLayer, theirs: Mapping[str, Tensor], writes: Tensor, reads: Tensor) -> None:
    """Take over a layer of the target. writes: what it writes is multiplied by; reads: what its
    norms' weights are; [H] each."""
    part = {
        name: torch.cat([theirs[f"{one}.weight"].detach().float().cpu() for one in names])
        for name, names in PARTS.items()
    }
    normed = part["attention_norm"] * reads
    if own.attention_norm is None:  # EAGLE-1's first reads what is not normed
        part["qkv"] = part["qkv"] * normed
    else:
        own.attention_norm.copy_(normed)
    own.mlp_norm.copy_(part["mlp_norm"] * reads)
    own.qkv.weight.copy_(part["qkv"])
    own.gate_up.weight.copy_(part["gate_up"])
    own.out.weight.copy_(part["out"] * writes[:, None])
    own.down.weight.copy_(part["down"] * writes[:, None])
