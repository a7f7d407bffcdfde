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
    mask: Tensor | None,  # [T, C], of every head [heads, T, C] or of rows [S, .., T, C]; added
    is_causal: bool,
    scores: Scores,
) -> Tensor:
    """Attend, [S, heads, T, D]."""
    grouped = query.shape[1] != keys.shape[1]
    if scores.cap is None and scores.sinks is None:
        of_rows = mask is not None and mask.dim() == 4
        if grouped and of_rows and query.device.type == "cpu":
            return _folded(query, keys, values, mask, scores.scale)
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


def _folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """What `attention` does with masks of rows [S, .., T, C], the heads that share keys as queries
    of one head.

    A CPU multiplies few queries of a head almost as fast as one: with 24 rows of 2 or 3 queries
    and three heads to a key this takes 0.55 of the time, of 8 queries 0.85, of more 1.0.
    """
    count, kv_heads = query.shape[2], keys.shape[1]
    shared = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    heads = shared.shape[2] // count
    if mask.shape[1] == 1:
        mask = mask.repeat(1, 1, heads, 1)
    else:  # of every head
        mask = mask.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    attended = F.scaled_dot_product_attention(shared, keys, values, mask, scale=scale)
    return attended.reshape(query.shape)
