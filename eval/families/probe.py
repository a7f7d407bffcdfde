"""A target's layers, looked at: shapes, windows, and options of their attention.

A copy of the target reads two tokens with an attention function that only takes notes; of an
encoder-decoder the decoder does, behind a source of three, by which its two attentions are told
apart. Which earlier tokens a layer sees is asked of the mask that the model makes for it:
transformers hands the rule to whoever makes masks for an attention function, and ours, at the end
of a full row, looks how far back it goes.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specdraft.eval.families.support import refusal, refusing
from specdraft.models.families import alibi, encoder_decoder
from specdraft.models.families.alibi import attention_inputs, has_alibi, replace_attention
from specdraft.models.target import Target

PROBE = "specdraft_probe"
# What layers hand to their attention beside queries, keys and values that changes nothing here; a
# window is read off the mask, and sinks and caps are passed on.
HARMLESS = {
    *("is_causal", "position_ids", "dropout", "sliding_window", "s_aux", "softcap"),
    *("use_cache", "cache_position", "past_key_values"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
MEANING = {"attention_mask": "a mask of its own"}
SOURCE = 3  # tokens of a source
ALL, OTHER = 0, -1  # what stands for a window where all is seen; where it is no window


@dataclass(frozen=True)
class Geometry:
    """The shape of a KV cache, and how much of it each layer sees."""

    devices: tuple[torch.device, ...]  # that each layer runs on
    kv_heads: int
    head_dim: int
    value_dim: int
    # Tokens that each layer sees, the newest included; None: all that a row may have.
    windows: tuple[int | None, ...] = ()
    leaning: Tensor | None = None  # [heads, capacity], added to scores by distance
    numbers: tuple[int, ...] = ()  # of the layers that have attention


@dataclass(frozen=True)
class Call:
    """What one layer handed to its attention: shapes [1, heads, T, D], options that were set."""

    module: nn.Module
    layer: int | None
    device: torch.device
    key: torch.Size
    value: torch.Size
    window: int
    slopes: Tensor | None
    options: tuple[str, ...]


def measure(
    target: Target, view: nn.Module, capacity: int, others: Collection[int] = ()
) -> tuple[Geometry, Geometry | None]:
    """Run two tokens through a copy of the target's base and read the geometry off its attention
    calls: of what a row has decoded and, in an encoder-decoder, of its source.

    others: numbers of recurrent layers, where some have no attention. Sets the view's attention
    function, and marks what `reads_source`. Raises TargetError where layers differ, have no
    attention, or hand over options that the packed attention does not know.
    """
    leaning = encoder_decoder.leaning_of(view, capacity)
    if leaning is not None:
        encoder_decoder.drop_own_bias(view)
    calls = _attention_calls(target, view, capacity)
    if not calls and not others:
        raise refusal(target, "its layers pass no keyword arguments on to their attention")
    crossing = [call for call in calls if target.reads_source and call.key[2] == SOURCE]
    for call in calls:
        call.module.reads_source = call in crossing
    decoding = [call for call in calls if call not in crossing]
    options = {name for call in calls for name in call.options}
    options = sorted(options - {"position_bias"} if leaning is not None else options)
    if any(call.window == OTHER for call in decoding):
        options.append("attention_mask")
    if options:
        found = ", ".join(MEANING.get(name, f"the attention option {name!r}") for name in options)
        raise refusal(target, f"its attention uses {found}, which is not supported")
    if calls and calls[0].slopes is not None:
        leaning = alibi.leaning_of(calls[0].slopes, capacity)
    windows = tuple(call.window or None for call in decoding)
    geometry = _geometry(target, decoding, others, windows=windows, leaning=leaning)
    return geometry, _geometry(target, crossing) if crossing else None


def _attention_calls(target: Target, view: nn.Module, capacity: int) -> list[Call]:
    """Run two tokens through the view, and note what its layers hand to their attention."""
    calls: list[Call] = []
    AttentionInterface.register(PROBE, _attention)
    AttentionMaskInterface.register(PROBE, partial(window_mask, capacity))
    if has_alibi(view):
        replace_attention(view)
    else:
        view.config._attn_implementation = PROBE
    inputs = {"input_ids": torch.tensor([[0, 1]], device=target.device)}
    if target.reads_source:
        states = torch.zeros(1, SOURCE, target.hidden_size, dtype=target.dtype)
        inputs["encoder_hidden_states"] = states.to(target.device)
    with torch.inference_mode(), refusing(target, "its layers cannot be looked at"):
        # A bound method, for accelerate would hand a list on as a copy.
        inputs |= attention_inputs(view, _attention, probe=calls.append)
        view(use_cache=False, **inputs)
    return calls


def _geometry(target: Target, calls: list[Call], others: Collection[int] = (), **seen) -> Geometry:
    numbers = tuple(call.layer for call in calls)
    if [*numbers] != (sorted({*numbers}) if others else [*range(len(calls))]):
        raise refusal(target, "its layers do not each call attention once, in order")
    shapes = {(call.key[1], call.key[3], call.value[1], call.value[3]) for call in calls}
    kv_heads, key_dim, value_heads, value_dim = next(iter(shapes), (0, 0, 0, 0))
    if len(shapes) > 1 or value_heads != kv_heads:
        found = "; ".join(f"{k} x {d} and {v} x {e}" for k, d, v, e in sorted(shapes))
        raise refusal(target, f"layers must have keys and values of one shape, found {found}")
    devices = tuple(call.device for call in calls)
    return Geometry(devices, kv_heads, key_dim, value_dim, numbers=numbers, **seen)


def _attention(module, query, key, value, attention_mask, scaling=None, probe=None, **options):
    slopes = options.pop("slopes", None)
    if probe is not None:
        window = ALL
        if attention_mask is not None:
            ours = attention_mask.dtype == torch.long
            window = int(attention_mask.flatten()[0]) if ours else OTHER
        used = tuple(n for n, value in options.items() if n not in HARMLESS and value is not None)
        layer = getattr(module, "layer_idx", None)
        probe(Call(module, layer, key.device, key.shape, value.shape, window, slopes, used))
    # [1, T, heads, D], as an attention's output; its values are never looked at.
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def window_mask(
    capacity: int, q_length: int, kv_length: int, mask_function: Callable, device="cpu", **_
) -> Tensor:
    """What stands for a mask [1, 1, T, T]: its window, everywhere."""
    # At two places, for chunks would look like windows at one.
    last, beyond = (_seen(mask_function, place, device) for place in (capacity - 1, capacity))
    window = ALL if last == capacity else last if last == beyond else OTHER
    return torch.full((1, 1, q_length, kv_length), window, device=device)


def _seen(mask_function: Callable, position: int, device: torch.device | str) -> int:
    """How many tokens up to its own one at a position sees; or OTHER."""
    places = torch.arange(position + 2, device=device)
    first = places.new_zeros(())
    visible = mask_function(first, first, first + position, places).expand(len(places))
    count = int(visible.sum())
    if visible[-1] or not visible[position + 1 - count : -1].all():
        return OTHER
    return count
