"""Drafters of a small target, for the same target enlarged: they draft the same tokens.

What makes a head (its block, fusion, reading, coupling, layers, scales, window, draft vocabulary)
stays; its sizes become those that a recipe for a target of the large shape gives a head, where it
leaves them open. Vectors that lie in a row, as a token's embedding and a feature do, stay apart:
each takes the first channels of its own block of H. Zeros stay zeros through norms, a SiLU, and an
LSTM, whose cell adds up i tanh(0).

Shapes: h, H hidden.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from specdraft.models.enlarged.places import (
    Growth,
    Layer,
    Places,
    Sizes,
    fill,
    in_blocks,
    repeat_row,
)
from specdraft.models.enlarged.target import spare_row
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.sar.layer import DecoderLayer
from specdraft.models.saved import SavedHead
from specdraft.models.shapes import TargetShape
from specdraft.models.target import Target


def enlarged_falcon_config(
    config: FalconConfig, shape: TargetShape, identity: dict
) -> FalconConfig:
    """Return the config of a head, at the sizes of a target of a shape.

    Raises RecipeError where its attention heads or its MLP do not go into those of the shape.
    """
    _growth(config, shape)
    return replace(
        config,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        intermediate_size=shape.intermediate_size,
        norm_eps=config.norm_eps * config.hidden_size / shape.hidden_size,
        target=identity,
    )


def _growth(config: FalconConfig, shape: TargetShape) -> Growth:
    attention = (config.heads, config.kv_heads, config.head_dim)
    small = Sizes(config.hidden_size, *attention, config.intermediate_size)
    return Growth("the head", small, Sizes.of(shape))


def enlarged_head(head: FalconHead, target: Target) -> FalconHead:
    """Return the head of an enlarged target that drafts what a head of the small one drafts: its
    outputs are those of the small one and H - h zeros. Its weights are made on the target's device.

    Raises RecipeError as `enlarged_falcon_config`.
    """
    config, shape = head.config, TargetShape.of(target.config)
    growth = _growth(config, shape)
    with torch.device(target.device):
        large = FalconHead(enlarged_falcon_config(config, shape, target.identity()))
    large.requires_grad_(False)  # or parts of its parameters could not be written to
    sources = dict(head.named_parameters())
    for name, parameter in large.named_parameters():
        if not name.startswith("layers."):
            fill(parameter, sources[name], *_places(name, config, growth))
    if large.layer_fusion is not None:  # what it reads is normed without a weight to undo it
        with torch.no_grad():
            large.layer_fusion.mul_(growth.of_norms)
    for layer, own in zip(large.layers, head.layers, strict=True):
        growth.fill_layer(_parts(layer), _parts(own))
    if large.draft_ids is not None:
        large.draft_ids.copy_(head.draft_ids)
    return _finished(large, head)


def _places(name: str, config: FalconConfig, growth: Growth) -> tuple[Places, ...]:
    """Return the places of a parameter's rows and columns, outside of the decoder layers."""
    width, slots = growth.width, config.block_size
    low_rank = in_blocks(1, *(max(1, size.width // 4) for size in (growth.small, growth.large)))
    of_coupling = low_rank if config.coupling == "markov" else width()
    known = {
        "fuse.weight": (width(), width(2)),
        "fuse.bias": (width(),),
        "fuse.input.0.weight": (width(4), width(2)),
        "coupling.gate_up.weight": (width(2), width(3)),
        "coupling.down.weight": (of_coupling, width()),
        "coupling.up.weight": (width(), of_coupling),
        "layer_fusion": (width(), width(len(config.feature_layers))),
        "reading.weight": (
            (width(slots), width(2)) if config.reads == "both" else (width(slots - 1), width())
        ),
    }
    # What is left are an LSTM's biases and its other matrices.
    return known.get(name) or ((width(4),) if name.endswith("bias") else (width(4), width()))


def _parts(layer: DecoderLayer) -> Layer:
    """The weights of a head's layer, which has some of them in one matrix."""
    qkv = layer.qkv.weight.split([count * layer.dim for count in layer.heads])
    gate, up = layer.gate_up.weight.chunk(2)
    norms = (layer.attention_norm, layer.mlp_norm)
    return Layer(*norms, *qkv, layer.out.weight, gate, up, layer.down.weight)


def enlarged_medusa_config(
    config: MedusaConfig, shape: TargetShape, identity: dict
) -> MedusaConfig:
    """Return the config of Medusa heads, at the sizes of a target of a shape."""
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    return replace(config, **sizes, target=identity)


def enlarged_medusa(heads: MedusaHeads, target: Target) -> MedusaHeads:
    """Return the Medusa heads of an enlarged target that draft what those of the small one draft.
    Their weights are made on the target's device."""
    config, shape = heads.config, TargetShape.of(target.config)
    with torch.device(target.device):
        large = MedusaHeads(enlarged_medusa_config(config, shape, target.identity()))
    large.requires_grad_(False)
    width = in_blocks(1, config.hidden_size, shape.hidden_size)
    tokens = in_blocks(1, config.vocab_size, shape.vocab_size)
    blocks = zip(large.weight.flatten(0, 1), heads.weight.flatten(0, 1), strict=True)
    for matrix, own in blocks:
        fill(matrix, own, width, width)
    for bias, own in zip(large.bias.flatten(0, 1), heads.bias.flatten(0, 1), strict=True):
        fill(bias, own, width)
    if large.lm_heads is not None:
        for lm_head, own in zip(large.lm_heads, heads.lm_heads, strict=True):
            fill(lm_head, own, tokens, width)
            repeat_row(lm_head, config.vocab_size, spare_row(target.config))
    return _finished(large, heads)


def enlarged_table(table: MaxGramTable, vocab_size: int) -> MaxGramTable:
    """Return a Max-Gram table with tokens more, which are as those that were never seen."""
    large = MaxGramTable(replace(table.config, vocab_size=vocab_size))
    more, parts = vocab_size - table.config.vocab_size, table.state_dict()
    for name, value in {"next_id": table.config.fallback, "seen": 0, "agreed": 0}.items():
        parts[name] = F.pad(parts[name], (0, more), value=value)
    large.load_state_dict(parts)
    return large


def _finished(large: SavedHead, small: SavedHead) -> SavedHead:
    """Give a large head the hash of the small one, whose fitted tree serves both."""
    large.folder, large.enlarges = small.folder, small.hash()
    return large.eval()
