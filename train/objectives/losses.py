"""The loss of a drafting head, as sums over supervised positions.

    L = w_f * SmoothL1(f, f^) + w_d * (alpha * KL(p || p^) + (1 - alpha) * CE(t, p^))

p = softmax(lm_head(f)) is the target's distribution, p^ = softmax(lm_head(f^)) the drafter's;
SmoothL1 is taken in units of the target's feature scale and averaged over H, or its weight would
mean something else for every target (source: Falcon, section "Training").

lm_head is frozen, so the gradient of the second part with respect to f^ has a closed form:
dL/dlogits^ = p^ - alpha * p - (1 - alpha) * onehot(t). It is computed with the value, chunk by
chunk over the positions, and neither [N, V] logits nor a graph through them is ever kept.

Shapes: R passes (rollouts), N supervised positions, H hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import smooth_l1_loss


@dataclass(frozen=True)
class LossSums:
    """Sums over positions, averaged over passes; divide by the global count of positions."""

    total: Tensor  # scalar, carries the gradient
    feature: Tensor  # scalar, SmoothL1
    soft: Tensor  # scalar, KL(p || p^)
    hard: Tensor  # scalar, CE(t, p^)
    correct: Tensor  # [R, N] bool, argmax p^ equals the token


def head_loss(
    predicted: Tensor,  # [R, N, H]
    features: Tensor,  # [N, H]
    tokens: Tensor,  # [N]
    lm_head: Tensor,  # [V, H]
    *,
    feature_scale: float,
    feature_weight: float,
    distill_weight: float,
    soft_weight: float,
    elements: int | None = None,
) -> LossSums:
    """Return the loss of the predicted features, summed over positions, averaged over passes.

    `elements` bounds chunk * V * (R + 1), the logits that are in work at one time.
    """
    passes, _, hidden = predicted.shape
    if elements is None:  # a CPU's caches want small chunks, a GPU large ones
        elements = 1 << 20 if predicted.device.type == "cpu" else 1 << 25
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    target = features.to(predicted.dtype).expand_as(predicted)
    feature = smooth_l1_loss(predicted / feature_scale, target / feature_scale, reduction="sum") / (
        hidden * passes
    )
    distill, soft, hard, correct = ChunkedDistillation.apply(
        predicted, features, tokens, lm_head, soft_weight, elements
    )
    return LossSums(
        total=feature_weight * feature + distill_weight * distill / passes,
        feature=feature.detach(),
        soft=soft / passes,
        hard=hard / passes,
        correct=correct,
    )


class ChunkedDistillation(torch.autograd.Function):
    """Sum of alpha * KL(p || p^) + (1 - alpha) * CE(t, p^), differentiable in the predictions."""

    @staticmethod
    def forward(ctx, predicted, features, tokens, lm_head, soft_weight, elements):
        passes, count, _ = predicted.shape
        chunk = max(1, elements // (lm_head.shape[0] * (passes + 1)))
        gradient = torch.zeros_like(predicted) if ctx.needs_input_grad[0] else None
        correct = torch.zeros(passes, count, dtype=torch.bool, device=predicted.device)
        soft, hard = predicted.new_zeros(()), predicted.new_zeros(())
        with torch.autocast(predicted.device.type, enabled=False):
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                target_log = _log_softmax(features[part], lm_head, predicted.dtype)
                target = target_log.exp()
                chosen = tokens[part].unsqueeze(1)
                for r in range(passes):
                    draft_log = _log_softmax(predicted[r, part], lm_head, predicted.dtype)
                    correct[r, part] = draft_log.argmax(-1) == tokens[part]
                    hard -= draft_log.gather(1, chosen).sum()
                    soft += (target * (target_log - draft_log)).sum()
                    if gradient is not None:
                        slope = draft_log.exp_().sub_(target, alpha=soft_weight)
                        slope.scatter_add_(
                            1, chosen, slope.new_full(chosen.shape, soft_weight - 1.0)
                        )
                        gradient[r, part] = slope.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(soft, hard, correct)
        return soft_weight * soft + (1.0 - soft_weight) * hard, soft, hard, correct

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        (gradient,) = ctx.saved_tensors
        return grad_total * gradient, None, None, None, None, None


def _log_softmax(features: Tensor, lm_head: Tensor, dtype: torch.dtype) -> Tensor:
    # [chunk, V]; the product in lm_head's dtype as the target does it, the softmax wider.
    return (features.to(lm_head.dtype) @ lm_head.T).to(dtype).log_softmax(-1)
