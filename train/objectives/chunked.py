"""A loss on logits of which only a chunk exists at a time: its slopes are taken with its value.

    L = sum over passes r and positions n of c_rn * l(lm_head_r h_rn, lm_head' f_n, t_n)

(each lm_head with what its model does after it, models/families/finish.py; mostly one for all
passes, and all counts c are 1).

l is a `Formula`, with its slope in the logits in closed form. Chunk by chunk over the positions
that slope is carried to the hidden states h and to lm_head at once, so neither [N, V] logits nor a
graph through them is ever kept. What a formula makes of the target's logits serves all passes.

Shapes: R passes, N positions, n of a chunk, H hidden (the target's may differ), V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdraft.models.families.finish import PLAIN, Finish


class Formula(Protocol):
    """A loss of a position: a weighted sum of parts."""

    def weights(self) -> dict[str, float]:
        """Return the parts by name, in their order."""

    def of_target(self, logits: Tensor) -> Any:
        """Return what is needed of the target's logits [n, V]."""

    def __call__(self, logits: Tensor, target: Any, tokens: Tensor) -> tuple[list, Tensor, Tensor]:
        """Return the parts of a chunk [n], the weighted sum's slope in the logits [n, V], and
        where their argmax is right [n]. target: as `of_target` gave it, or None."""


class Teacher(NamedTuple):
    """What the target's logits of every position are made of."""

    features: Tensor  # [N, H']
    lm_head: Tensor  # [V, H']
    finish: Finish = PLAIN  # what comes after it


# Of the parts by name [R, N]: how much the loss of each position counts [R, N].
Weigh = Callable[[dict[str, Tensor]], Tensor]


def chunked_loss(
    hidden: Tensor,  # [R, N, H]
    lm_head: Tensor,  # [V, H], or one for every pass [R, V, H]
    tokens: Tensor,  # [N]
    teacher: Teacher | None,  # None: the formula needs none
    formula: Formula,
    *,
    size: int,
    dtype: torch.dtype,
    counts: Tensor | None = None,  # [R, 1] or [R, N]
    weigh: Weigh | None = None,
    finish: Finish = PLAIN,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return a loss summed over passes and positions, its parts [R, N], and where the argmax is
    right [R, N]. The loss is differentiable in hidden states and lm_head.

    finish: what comes after lm_head. size: positions of a chunk. dtype: of the products with
    lm_head; sums are float32 or wider.
    counts: how much positions count in the loss, its parts are as they were. weigh: the same where
    the parts decide it; for a frozen lm_head, whose slope would be summed before they are known.
    """
    assert weigh is None or not lm_head.requires_grad
    if counts is None:
        counts = torch.ones_like(hidden[:, :1, 0])
    inputs = hidden, lm_head, tokens, teacher, counts.expand(hidden.shape[:2])
    total, parts, right = _ChunkedLoss.apply(*inputs, formula, max(1, size), dtype, weigh, finish)
    return total, dict(zip(formula.weights(), parts.unbind(), strict=True)), right


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, tokens, teacher, counts, formula, size, dtype, weigh, finish):
        wide, weights = torch.promote_types(hidden.dtype, torch.float32), formula.weights()
        slopes = [
            torch.zeros_like(tensor, dtype=wide) if needed else None
            for tensor, needed in zip((hidden, lm_head), ctx.needs_input_grad, strict=False)
        ]
        parts = hidden.new_zeros(len(weights), *hidden.shape[:2], dtype=wide)
        right = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        passes = len(hidden), -1, -1  # one lm_head is that of all passes, and so is its slope
        with torch.autocast(hidden.device.type, enabled=False):
            matrices = lm_head.to(dtype).expand(passes)
            for start in range(0, len(tokens), size):
                chunk, known = slice(start, start + size), None
                if teacher is not None:
                    features = teacher.features[chunk].to(teacher.lm_head.dtype)
                    logits = (features @ teacher.lm_head.T).to(wide)
                    known = formula.of_target(teacher.finish(logits))
                for r, states in enumerate(hidden[:, chunk].to(dtype)):
                    logits = finish((states @ matrices[r].T).to(wide))
                    values, slope, right[r, chunk] = formula(logits, known, tokens[chunk])
                    parts[:, r, chunk] = torch.stack(values)
                    slope, count = finish.back(slope, logits).to(dtype), counts[r, chunk, None]
                    if slopes[0] is not None:
                        slopes[0][r, chunk] = (slope @ matrices[r]).to(wide) * count
                    if slopes[1] is not None:
                        slopes[1].expand(passes)[r].add_(slope.T @ (states * count.to(dtype)))
        if weigh is not None:
            more = weigh(dict(zip(weights, parts, strict=True)))
            counts = counts * more
            if slopes[0] is not None:
                slopes[0] *= more.unsqueeze(-1)
        ctx.save_for_backward(*slopes)
        ctx.dtypes = hidden.dtype, lm_head.dtype
        ctx.mark_non_differentiable(parts, right)
        weighted = zip(weights.values(), (parts * counts).sum((1, 2)), strict=True)
        return sum(weight * part for weight, part in weighted), parts, right

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        slopes = (
            None if slope is None else (grad_total * slope).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *slopes, *[None] * 8
