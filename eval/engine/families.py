"""Which model families the packed forward is right for, found out by asking the model.

Names in a configuration differ from family to family, and a family may do more in its attention
than a name tells. So a target is asked twice when a `PackedTarget` is built: `measure` runs two
tokens and looks at what every layer hands to its attention (shapes, and options that we would have
to honour), and `check_forward` compares a packed forward with the model's own. What neither can see
is refused by its configuration: sliding windows, layers without a KV cache, softcapping.

Tested token for token: Llama, Mistral, Qwen2, Qwen3, OPT, GPT-NeoX, GPT-2, Phi.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specdraft.models.feature_layers import Layers
from specdraft.models.target import Target
from specdraft.recipes.errors import TargetError, in_a_line

PROBE = "specdraft_probe"
PROBE_TOKENS = 4  # a forward of a large target on a CPU takes as long as it has tokens
# What layers hand to their attention beside queries, keys and values that changes nothing here.
HARMLESS = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
MEANING = {
    "attention_mask": "a mask of its own",
    "s_aux": "attention sinks",
    "sliding_window": "a sliding window",
    "softcap": "softcapping of attention scores",
}


@dataclass(frozen=True)
class Geometry:
    """The shape of a target's KV cache."""

    devices: tuple[torch.device, ...]  # that each layer runs on
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Call:
    """What one layer handed to its attention: shapes [1, heads, T, D], options that were set."""

    layer: int | None
    device: torch.device
    key: torch.Size
    value: torch.Size
    options: tuple[str, ...]


def check_supported(target: Target) -> None:
    """Raise TargetError, with the reason, for a target whose configuration rules it out."""
    if reason := _unsupported(target):
        raise _refusal(target, reason)


def _unsupported(target: Target) -> str | None:
    config, model = target.config.get_text_config(), target.model
    layers = set(getattr(config, "layer_types", None) or ())
    kinds = layers - {"full_attention"}
    window = None if layers else getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    if kinds or window:
        found = ", ".join(sorted(kinds)) or f"a window of {window}"
        return f"only full attention is supported, and this one has {found}"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot be taken back when a draft is rejected"
    if getattr(config, "attn_logit_softcapping", None):
        return "softcapping of attention scores is not supported"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention (MLA), where keys and values differ in size, is not supported"
    if hasattr(model.base_model, "build_alibi_tensor") or getattr(config, "alibi", False):
        return "it adds ALiBi in attention code of its own, which cannot be replaced"
    if not getattr(model, "_supports_attention_backend", False):
        return (
            "its attention cannot be replaced through transformers' AttentionInterface; "
            "families like Llama, Mistral, Qwen2/3, OPT, GPT-2 and GPT-NeoX can"
        )
    return None


def measure(target: Target, view: nn.Module) -> Geometry:
    """Run two tokens through a copy of the target and read the geometry off its attention calls.

    Sets the view's attention function. Raises TargetError where layers differ, have no attention,
    or hand over options that the packed attention does not know.
    """
    calls: list[Call] = []
    AttentionInterface.register(PROBE, _probe)
    view.config._attn_implementation = PROBE
    ids = torch.tensor([[0, 1]], device=target.device)
    with torch.inference_mode(), _refusing(target, "its layers cannot be looked at"):
        # A bound method, for accelerate would hand a list on as a copy.
        view.base_model(input_ids=ids, use_cache=False, probe=calls.append)
    if not calls:
        raise _refusal(target, "its layers pass no keyword arguments on to their attention")
    options = sorted({name for call in calls for name in call.options})
    if options:
        found = ", ".join(MEANING.get(name, f"the attention option {name!r}") for name in options)
        raise _refusal(target, f"its attention uses {found}, which is not supported")
    if [call.layer for call in calls] != list(range(len(calls))):
        raise _refusal(target, "its layers do not each call attention once, in order")
    shapes = {(call.key[1], call.key[3], call.value[1], call.value[3]) for call in calls}
    kv_heads, key_dim, *value = next(iter(shapes))
    if len(shapes) > 1 or value != [kv_heads, key_dim]:
        found = "; ".join(f"{k} x {d} and {v} x {e}" for k, d, v, e in sorted(shapes))
        raise _refusal(target, f"keys and values must be alike in all layers, found {found}")
    return Geometry(tuple(call.device for call in calls), kv_heads, key_dim)


def _probe(module, query, key, value, attention_mask, scaling=None, probe=None, **options):
    if probe is not None:
        options["attention_mask"] = attention_mask
        used = tuple(n for n, value in options.items() if n not in HARMLESS and value is not None)
        layer = getattr(module, "layer_idx", None)
        probe(Call(layer, key.device, key.shape, value.shape, used))
    # [1, T, heads, D], as an attention's output; its values are never looked at.
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def check_positions(target: Target, capacity: int) -> None:
    """Raise TargetError when rows of this capacity would outgrow the target's positions.

    A learned table ends; frequencies that change with the longest row ("dynamic", "longrope")
    would make a row's output depend on its neighbours. Other rotary positions have no end.
    """
    limit = position_limit(target)
    if limit is not None and capacity > limit:
        kind = "positions it has learned"
        if rope := getattr(target.config.get_text_config(), "rope_parameters", None):
            kind = f"positions before its {rope['rope_type']} rotary frequencies change"
        raise _refusal(
            target,
            f"a capacity of {capacity} tokens (prompt, new tokens and drafts) exceeds the {limit} "
            f"{kind}; shorten the prompt or max_new_tokens, or pass a smaller capacity",
        )


def position_limit(target: Target) -> int | None:
    """How many positions a target can be run at; None for rotary positions that have no end."""
    config = target.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return target.context
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return None
    return rope.get("original_max_position_embeddings") or target.context


def check_forward(
    target: Target, packed: Callable[[Tensor], Tensor], capacity: int, layers: Layers = ()
) -> None:
    """Compare features of a packed forward with the model's own, on the same few tokens.

    packed: ids [T] to features [T, H], wide with `layers`, by as many packed forwards as it likes.
    Raises TargetError when a token's features, or one of its layers, differ by more than rounding:
    sqrt(eps) of their length.
    """
    ids = _probe_ids(target, min(PROBE_TOKENS, capacity))
    expected = target.features(ids[None], layers=layers)[0].float()
    with _refusing(target, "a packed forward fails"):
        found = packed(ids).float()
    found, expected = (x.unflatten(-1, (1 + len(layers), -1)) for x in (found, expected))
    lengths = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = float(((found - expected).norm(dim=-1) / lengths).max())
    limit = torch.finfo(target.dtype).eps ** 0.5
    if not error <= limit:  # catches NaN, too
        raise _refusal(
            target,
            f"a packed forward differs from the model's own by {error:.1e} of a feature's length "
            f"(at most {limit:.1e} is rounding), so its attention or positions are not understood",
        )


def _probe_ids(target: Target, count: int) -> Tensor:
    """The first ids that are not embedded as zero, as a padding token is; others say nothing."""
    first = torch.arange(min(16 * count, target.vocab_size), device=target.device)
    told = first[target.embed(first).any(-1)]
    ids = told if len(told) else first
    return ids.repeat(-(-count // len(ids)))[:count]


@contextmanager
def _refusing(target: Target, what: str) -> Iterator[None]:
    """Say which target it was when modelling code that we do not know breaks."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _refusal(target, f"{what} ({in_a_line(error)})") from error


def _refusal(target: Target, reason: str) -> TargetError:
    return TargetError(f"{target.name} ({target.config.model_type}): {reason}")
