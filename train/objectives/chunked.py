"""A loss on logits of which only a chunk exists at a time: its slopes are taken with its value.

    L = sum over passes r and positions n of l(lm_head h_rn, lm_head' f_n, t_n)

l is a `Formula`, with its slope in the logits in closed form. Chunk by chunk over the positions
that slope is carried to the hidden states h and to lm_head at once, so neither [N, V] logits nor a
graph through them is ever kept. What a formula makes of the target's logits serves all passes.

Shapes: R passes, N positions, n of a chunk, H hidden (the target's may differ), V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Formula(Protocol):
    """A loss of a position: a weighted sum of parts."""

    def weights(self) -> dict[str, float]:
        """Return the parts by name, in their order."""

    def of_target(self, logits: Tensor) -> Any:
        """Return what is needed of the target's logits [n, V]."""

    def __call__(self, logits: Tensor, target: Any, tokens: Tensor) -> tuple[list, Tensor, Tensor]:
        """Return the parts' sums over a chunk, the weighted sum's slope in the logits [n, V], and
        where their argmax is right [n]. target: as `of_target` gave it, or None."""


def chunked_loss(
    hidden: Tensor,  # [R, N, H]
    lm_head: Tensor,  # [V, H]
    tokens: Tensor,  # [N]
    target: tuple[Tensor, Tensor] | None,  # features [N, H'] and lm_head [V, H']
    formula: Formula,
    *,
    size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return a loss and its parts, summed over passes and positions, and where the argmax is right
    [R, N]. The loss is differentiable in hidden states and lm_head.

    size: positions of a chunk. dtype: of the products with lm_head; sums are float32 or wider.
    """
    inputs = (hidden, lm_head, tokens, target)
    total, parts, right = _ChunkedLoss.apply(*inputs, formula, max(1, size), dtype)
    return total, dict(zip(formula.weights(), parts.unbind(), strict=True)), right


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, tokens, target, formula, size, dtype):
        wide, weights = torch.promote_types(hidden.dtype, torch.float32), formula.weights()
        slopes = [
            torch.zeros_like(tensor, dtype=wide) if needed else None
            for tensor, needed in zip((hidden, lm_head), ctx.needs_input_grad, strict=False)
        ]
        parts = hidden.new_zeros(len(weights), dtype=wide)
        right = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = lm_head.to(dtype)
            for start in range(0, len(tokens), size):
                chunk, known = slice(start, start + size), None
                if target is not None:
                    features, head = target
                    known = formula.of_target((features[chunk].to(head.dtype) @ head.T).to(wide))
                for r, states in enumerate(hidden[:, chunk].to(dtype)):
                    logits = (states @ matrix.T).to(wide)
                    values, slope, right[r, chunk] = formula(logits, known, tokens[chunk])
                    parts += torch.stack(values)
                    slope = slope.to(dtype)
                    if slopes[0] is not None:
                        slopes[0][r, chunk] = (slope @ matrix).to(wide)
                    if slopes[1] is not None:
                        slopes[1] += slope.T @ states
        ctx.save_for_backward(*slopes)
        ctx.dtypes = hidden.dtype, lm_head.dtype
        ctx.mark_non_differentiable(parts, right)
        total = sum(weight * part for weight, part in zip(weights.values(), parts, strict=True))
        return total, parts, right

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        slopes = (
            None if slope is None else (grad_total * slope).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *slopes, *[None] * 5
