"""Attention as families do it whose scores are more than scaled products.

    o = sum_j a_j v_j    a = softmax over j of (c tanh(s q.k_j / c) + mask_j), and a sink

A cap c (Gemma 2) bounds scores. A sink (gpt-oss) is one more score per head, learned, that takes
part in the softmax and brings no value. Where there is neither, it is torch's own attention.

Shapes: S rows, T queries of each, C keys, D head dimension.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8  # numbers; where CUDA's kernels want the rows of a mask to begin


class Scores(NamedTuple):
    """How a layer makes scores of products."""

    scale: float | None = None  # None: 1 / sqrt(D)
    cap: float | None = None
    sinks: Tensor | None = None  # [heads]


PLAIN = Scores()


def attention(
    query: Tensor,  # [S, heads, T, D]
    keys: Tensor,  # [S, kv_heads, C, D]
    values: Tensor,  # [S, kv_heads, C, D]
    # [T, C], of every head [heads, T, C], of rows [S, .., T, C] or as `fold_mask` gives it; added
    mask: Tensor | None,
    is_causal: bool,
    scores: Scores,
) -> Tensor:
    """Attend, [S, heads, T, D]."""
    if mask is not None and mask.dim() == 4 and folds(query, keys, scores):
        return _folded(query, keys, values, mask, scores.scale)
    grouped = query.shape[1] != keys.shape[1]
    if scores.cap is None and scores.sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=is_causal, scale=scores.scale, enable_gqa=grouped
        )
    if is_causal:
        count = query.shape[2]
        mask = query.new_full((count, count), -torch.inf).triu_(1)
    # Heads that share keys stand side by side: [S, kv_heads, heads / kv_heads * T, D].
    shared = query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    raw = (shared @ keys.mT * scale).view(*query.shape[:3], -1)  # [S, heads, T, C]
    if scores.cap is not None:
        raw = torch.tanh(raw / scores.cap) * scores.cap
    if mask is not None:
        raw = raw + mask
    if scores.sinks is not None:
        sinks = scores.sinks.to(raw.dtype).view(1, -1, 1, 1).expand(*raw.shape[:3], 1)
        raw = torch.cat((raw, sinks), -1)
    weights = raw.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[2]]
    return (weights.reshape(*shared.shape[:3], -1) @ values).view(*query.shape[:3], -1)


def folds(query: Tensor, keys: Tensor, scores: Scores) -> bool:
    """Whether heads that share keys are attended as more queries of a single head, where rows have
    masks of their own.

    A CPU multiplies few queries of a head almost as fast as one: with 24 rows of 2 or 3 queries
    and three heads to a key this takes 0.55 of the time, of 8 queries 0.85, of more 1.0.
    """
    plain = scores.cap is None and scores.sinks is None
    return plain and query.device.type == "cpu" and query.shape[1] != keys.shape[1]


def fold_mask(mask: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Masks of rows [S, 1 or heads, T, C] for heads that are queries of one, [S, .., heads /
    kv_heads * T, C]: what several layers of a forward have in common."""
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, heads // kv_heads, 1)
    return mask.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Attend where `folds` holds; mask: of rows, by `fold_mask` or not yet."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    shared = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    if mask.shape[2] != shared.shape[2]:
        mask = fold_mask(mask, heads, kv_heads)
    attended = F.scaled_dot_product_attention(shared, keys, values, mask, scale=scale)
    return attended.reshape(query.shape)


def aligned(width: int) -> int:
    """Round a mask's width up, so that each of its rows begins where CUDA's kernels want it."""
    return -(-width // ALIGNED) * ALIGNED
