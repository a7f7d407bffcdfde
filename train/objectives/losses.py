"""The loss of a drafting head, as sums over supervised positions.

    L = w_f * SmoothL1(f, f^) + w_d * w * (alpha * soft + (1 - alpha) * CE(t, p^))
    soft = (1 - beta) * KL(p || p^) - beta * log sum min(p, p^)

p = softmax(lm_head(f)) is the target's distribution, p^ = softmax(lm_head(f^)) the drafter's;
SmoothL1 is taken in units of the target's feature scale and averaged over H, or its weight would
mean something else for every target (source: Falcon, section "Training", where beta is 0 and w 1).
The second part of `soft` is the LK loss (arXiv 2602.23881): minus the logarithm of the chance that
a draft sampled from p^ is accepted. w is what a prediction counts by its depth, see `depth.py`.

Shapes: R passes (rollouts), N supervised positions, n of a chunk, H hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from specdraft.eval.engine.sampling import most_probable
from specdraft.models.families.finish import PLAIN, Finish
from specdraft.train.objectives.chunked import Teacher, Weigh, chunked_loss
from specdraft.train.objectives.divergences import lk


@dataclass(frozen=True)
class LossSums:
    """Sums over positions, averaged over passes; divide by the global count of positions."""

    total: Tensor  # scalar, carries the gradient
    feature: Tensor  # scalar, SmoothL1
    soft: Tensor  # scalar, KL(p || p^) and LK, not weighed by depth
    hard: Tensor  # scalar, CE(t, p^), not weighed either
    correct: Tensor  # [R, N] bool, argmax p^ equals the token


def head_loss(
    predicted: Tensor,  # [R, N, H]
    features: Tensor,  # [N, H]
    tokens: Tensor,  # [N], or with `partial` -1 where lm_head has no row of the token
    lm_head: Tensor,  # [V, H]
    finish: Finish = PLAIN,  # what comes after it
    *,
    feature_scale: float,
    feature_weight: float,
    distill_weight: float,
    soft_weight: float,
    lk_weight: float = 0.0,
    weigh: Weigh | None = None,
    partial: bool = False,
    elements: int | None = None,
) -> LossSums:
    """Return the loss of the predicted features, summed over positions, averaged over passes.

    With `partial`, V is a draft vocabulary: p is what it is among its tokens, and a position whose
    token is none of them has no CE. `elements` bounds chunk * V * (R + 1), the logits that are in
    work at one time.
    """
    passes, _, hidden = predicted.shape
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    target = features.to(predicted.dtype).expand_as(predicted)
    feature = smooth_l1_loss(predicted / feature_scale, target / feature_scale, reduction="sum") / (
        hidden * passes
    )
    distill, parts, correct = chunked_loss(
        predicted,
        lm_head,
        tokens,
        Teacher(features, lm_head, finish),
        DistilledTokens(soft_weight, lk_weight, partial),
        size=chunk_size(lm_head, passes, elements),
        dtype=lm_head.dtype,  # the product as the target does it
        weigh=weigh,
        finish=finish,
    )
    return LossSums(
        total=feature_weight * feature + distill_weight * distill / passes,
        feature=feature.detach(),
        soft=parts["soft"].sum() / passes,
        hard=parts["hard"].sum() / passes,
        correct=correct,
    )


def chunk_size(lm_head: Tensor, passes: int, elements: int | None = None) -> int:
    """Return how many positions are in work at one time, given how many logits of an lm_head [V, H]
    may be: by default few on a CPU, whose caches want small chunks, and many on a GPU."""
    if elements is None:
        elements = 1 << 20 if lm_head.device.type == "cpu" else 1 << 25
    return elements // (lm_head.shape[0] * (passes + 1))


@dataclass(frozen=True)
class DistilledTokens:
    """alpha * soft + (1 - alpha) * CE(t, p^), a `Formula`; without LK, the slope in the logits is
    p^ - alpha * p - (1 - alpha) * onehot(t)."""

    alpha: float
    lk: float = 0.0  # beta
    partial: bool = False  # tokens may be -1

    def weights(self) -> dict[str, float]:
        return {"soft": self.alpha, "hard": 1.0 - self.alpha}

    def of_target(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """p and its logarithm, [n, V] each."""
        p_log = logits.log_softmax(-1)
        return p_log.exp(), p_log

    def __call__(self, logits: Tensor, target: tuple[Tensor, Tensor], tokens: Tensor) -> tuple:
        (p, p_log), draft_log = target, logits.log_softmax(-1)
        known, chosen = tokens.unsqueeze(1) >= 0, tokens.unsqueeze(1).clamp(min=0)
        right = most_probable(draft_log) == tokens
        hard = -(draft_log.gather(1, chosen) * known).squeeze(1)
        soft = (p * (p_log - draft_log)).sum(-1)
        slope, alpha = draft_log.exp_(), self.alpha
        given = (1.0 - alpha) * known.to(slope.dtype)  # what CE counts, [n, 1]
        if self.lk:
            shared, falling = lk(p, slope)
            soft = torch.lerp(soft, shared, self.lk)
            slope.mul_(alpha * (1.0 - self.lk) + given).add_(falling, alpha=alpha * self.lk)
        elif self.partial:
            slope.mul_(alpha + given)
        slope.sub_(p, alpha=alpha * (1.0 - self.lk)).scatter_add_(1, chosen, -given)
        return [soft, hard], slope, right
