"""Which model families the packed forward is right for, found out by asking the model.

Names in a configuration differ from family to family, and a family may do more in its attention
than a name tells. So a target is asked twice when a `PackedTarget` is built: its layers are looked
at (probe.py), and `check_forward` compares a packed forward with the model's own. What neither can
see is refused by its configuration: layers without a KV cache, say.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specdraft.models.families.alibi import has_alibi
from specdraft.models.feature_layers import Layers
from specdraft.models.target import Target
from specdraft.recipes.errors import TargetError, in_a_line

RECURRENT = {"conv", "hybrid", "linear_attention"}  # kinds of layers that have a state
KINDS = RECURRENT | {"full_attention", "sliding_attention", "mlp", "moe"}
PROBE_TOKENS = 4  # a forward of a large target on a CPU takes as long as it has tokens


def check_supported(target: Target) -> None:
    """Raise TargetError, with the reason, for a target whose configuration rules it out."""
    if reason := _unsupported(target):
        raise refusal(target, reason)


def _unsupported(target: Target) -> str | None:
    config, model = target.config.get_text_config(), target.model
    if kinds := _kinds(model) - KINDS:
        found = ", ".join(sorted(kinds))
        return f"only {', '.join(sorted(KINDS))} layers are supported, and this one has {found}"
    if has_alibi(model):
        return None
    if hasattr(model.base_model, "build_alibi_tensor") or getattr(config, "alibi", False):
        return "it adds ALiBi in attention code of its own, which cannot be replaced"
    backend = target.reads_source or getattr(model, "_supports_attention_backend", False)
    if not (backend or is_recurrent(model)):  # of these two nothing is said
        return (
            "its attention cannot be replaced through transformers' AttentionInterface; "
            "families like Llama, Mistral, Qwen2/3, OPT, GPT-2 and GPT-NeoX can"
        )
    return None


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model says that some of its layers have a state (see recurrent.py)."""
    return bool(_kinds(model) & RECURRENT) or getattr(model, "_is_stateful", False)


def check_can_be_cut(target: Target, what: str) -> None:
    """Raise TargetError for a target that more than one draft a step is read and taken back of."""
    if is_recurrent(target.model):
        raise refusal(
            target, f"it has recurrent layers, whose state cannot be cut: it cannot be {what}"
        )


def _kinds(model: nn.Module) -> set[str]:
    return {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}


def check_positions(target: Target, capacity: int) -> None:
    """Raise TargetError when rows of this capacity would outgrow the target's positions.

    A learned table ends; frequencies that change with the longest row ("dynamic", "longrope")
    would make a row's output depend on its neighbours, as it does in the family's own `generate`;
    and a row that crosses that length is read anew by some (Phi-3) and by others goes on with keys
    of both kinds. Other rotary positions have no end.
    """
    limit = position_limit(target)
    if limit is not None and capacity > limit:
        kind = "positions it has learned"
        if rope := getattr(target.config.get_text_config(), "rope_parameters", None):
            kind = f"positions before its {rope['rope_type']} rotary frequencies change"
        raise refusal(
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
    target: Target, packed: Callable[[Tensor], Tensor], capacity: int, layers: Layers
) -> None:
    """Compare features of a packed forward with the model's own, on the same few tokens.

    packed: ids [T] to features [T, H], wide with `layers`, by as many packed forwards as it likes.
    Raises TargetError when a token's features, or one of its layers, differ by more than rounding:
    sqrt(eps) of their length.
    """
    ids = _probe_ids(target, min(PROBE_TOKENS, capacity))
    source = ids[None] if target.reads_source else None
    expected = target.features(ids[None], layers=layers, source=source)[0].float()
    with refusing(target, "a packed forward fails"):
        found = packed(ids).float()
    found, expected = (x.unflatten(-1, (1 + len(layers), -1)) for x in (found, expected))
    lengths = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = float(((found - expected).norm(dim=-1) / lengths).max())
    limit = torch.finfo(target.dtype).eps ** 0.5
    if not error <= limit:  # catches NaN, too
        raise refusal(
            target,
            f"a packed forward differs from the model's own by {error:.1e} of a feature's length "
            f"(at most {limit:.1e} is rounding), so its layers or positions are not understood",
        )


def _probe_ids(target: Target, count: int) -> Tensor:
    """The first ids that are not embedded as zero, as a padding token is; others say nothing."""
    first = torch.arange(min(16 * count, target.vocab_size), device=target.device)
    told = first[target.embed(first).any(-1)]
    ids = told if len(told) else first
    return ids.repeat(-(-count // len(ids)))[:count]


@contextmanager
def refusing(target: Target, what: str) -> Iterator[None]:
    """Say which target it was when modelling code that we do not know breaks."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise refusal(target, f"{what} ({in_a_line(error)})") from error


def refusal(target: Target, reason: str) -> TargetError:
    return TargetError(f"{target.name} ({target.config.model_type}): {reason}")
