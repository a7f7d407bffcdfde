"""The objectives of distillation, as sums over positions, and their gradients in closed form.

p is the target's next-token distribution, q the student's, both at temperature T; t is the token of
the text, which enters at temperature 1. With weights w a mixture is the sum of

    forward_kl        KL(p || q)
    reverse_kl        KL(q || p)
    jsd               beta * KL(p || m) + (1 - beta) * KL(q || m),  m = beta * p + (1 - beta) * q
    total_variation   sum |p - q| / 2, one minus the chance that a draft sampled from q is accepted
    cross_entropy     -log q(t)

(DistillSpec, arXiv 2310.08461, section 3; the JSD is that of GKD, arXiv 2306.13649, eq. 1.) A
divergence with the slope g in q has the slope q * (g - sum q g) / T in the student's logits. It is
taken with the value, chunk by chunk over the positions, and carried to the hidden states and to
lm_head at once, so neither [N, V] logits nor a graph through them is ever kept.

Shapes: N supervised positions, n of a chunk, H hidden (the student's may differ), V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdraft.recipes.schema import DistillSection


@dataclass(frozen=True)
class Mixture:
    """The weights of the objectives, with the JSD's beta and the temperature of p and q."""

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    total_variation: float = 0.0
    cross_entropy: float = 0.0
    beta: float = 0.5
    temperature: float = 1.0

    @classmethod
    def of(cls, section: DistillSection) -> "Mixture":
        """Read a recipe's mixture."""
        return cls(**{field.name: getattr(section, field.name) for field in fields(cls)})

    def weights(self) -> dict[str, float]:
        """The objectives that count, by name."""
        names = (*DIVERGENCES, "cross_entropy")
        return {name: getattr(self, name) for name in names if getattr(self, name) > 0}


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums over positions; divide by the global count of positions."""

    total: Tensor  # scalar, carries the gradient
    parts: dict[str, Tensor]  # each objective of the mixture, unweighted
    agreed: Tensor  # positions where the argmax of q is that of p, or, without a target, t


@dataclass(frozen=True)
class Pair:
    """p and q of a chunk, [n, V] each, and their logarithms."""

    p: Tensor
    q: Tensor
    p_log: Tensor
    q_log: Tensor


def objective_sums(
    hidden: Tensor,  # [N, H], the student's
    lm_head: Tensor,  # [V, H], the student's
    tokens: Tensor,  # [N]
    mixture: Mixture,
    target_features: Tensor | None = None,  # [N, H]
    target_lm_head: Tensor | None = None,  # [V, H]
    elements: int | None = None,
) -> ObjectiveSums:
    """Return a mixture of objectives summed over positions, differentiable in the first two.

    The target may be missing where cross-entropy alone counts. `elements` bounds chunk * V.
    """
    if elements is None:  # a CPU's caches want small chunks, a GPU large ones
        elements = 1 << 19 if hidden.device.type == "cpu" else 1 << 24
    target = None if target_features is None else (target_features, target_lm_head)
    total, agreed, *parts = ChunkedMixture.apply(hidden, lm_head, tokens, mixture, target, elements)
    return ObjectiveSums(total, dict(zip(mixture.weights(), parts, strict=True)), agreed)


class ChunkedMixture(torch.autograd.Function):
    """The mixture's sum, differentiable in hidden states and lm_head; then counts and parts."""

    @staticmethod
    def forward(ctx, hidden, lm_head, tokens, mixture, target, elements):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = _product_dtype(hidden, lm_head)
        slopes = [
            torch.zeros_like(tensor, dtype=wide) if needed else None
            for tensor, needed in zip((hidden, lm_head), ctx.needs_input_grad, strict=False)
        ]
        sums = hidden.new_zeros(2 + len(mixture.weights()), dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            weight = lm_head.to(narrow)
            for part in _chunks(len(hidden), elements // len(lm_head)):
                inputs = hidden[part].to(narrow)
                logits = (inputs @ weight.T).to(wide)
                target_logits = None
                if target is not None:
                    features, head = target
                    target_logits = (features[part].to(head.dtype) @ head.T).to(wide)
                values, slope = mixed(logits, target_logits, tokens[part], mixture)
                sums += values
                if slopes[0] is not None:
                    slopes[0][part] = slope.to(narrow) @ weight
                if slopes[1] is not None:
                    slopes[1] += slope.to(narrow).T @ inputs
        ctx.save_for_backward(*slopes)
        ctx.dtypes = hidden.dtype, lm_head.dtype
        results = sums.unbind()
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        slopes = (
            None if slope is None else (grad_total * slope).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *slopes, None, None, None, None


def mixed(
    logits: Tensor,  # [n, V], the student's
    target_logits: Tensor | None,  # [n, V]
    tokens: Tensor,  # [n]
    mixture: Mixture,
) -> tuple[Tensor, Tensor]:
    """Return [total, agreed, each part] summed over a chunk, and the total's slope [n, V]."""
    wanted = tokens if target_logits is None else target_logits.argmax(-1)
    agreed, parts = (logits.argmax(-1) == wanted).sum(), []
    total, slope, pair = logits.new_zeros(()), torch.zeros_like(logits), None
    for name, weight in mixture.weights().items():
        if name == "cross_entropy":
            value, gradient = cross_entropy(logits, tokens)
        else:
            pair = pair or _pair(logits, target_logits, mixture.temperature)
            value, gradient = DIVERGENCES[name](pair, mixture.beta)
            gradient = gradient / mixture.temperature
        parts.append(value)
        total = total + weight * value
        slope = slope.add_(gradient, alpha=weight)
    return torch.stack([total, agreed.to(total.dtype), *parts]), slope


# Each returns its sum over the chunk and its slope [n, V] in the student's logits / T.


def forward_kl(pair: Pair, _: float) -> tuple[Tensor, Tensor]:
    """KL(p || q)."""
    return (pair.p * (pair.p_log - pair.q_log)).sum(), pair.q - pair.p


def reverse_kl(pair: Pair, _: float) -> tuple[Tensor, Tensor]:
    """KL(q || p)."""
    ratio = pair.q_log - pair.p_log
    return (pair.q * ratio).sum(), _through_softmax(pair.q, ratio)


def jsd(pair: Pair, beta: float) -> tuple[Tensor, Tensor]:
    """Generalised Jensen-Shannon divergence: close to beta * KL(p || q) for a small beta."""
    mean = torch.logaddexp(pair.p_log + math.log(beta), pair.q_log + math.log1p(-beta))
    ratio = pair.q_log - mean
    value = beta * pair.p * (pair.p_log - mean) + (1.0 - beta) * pair.q * ratio
    return value.sum(), _through_softmax(pair.q, (1.0 - beta) * ratio)


def total_variation(pair: Pair, _: float) -> tuple[Tensor, Tensor]:
    """Half the L1 distance of p and q."""
    gap = pair.q - pair.p
    return 0.5 * gap.abs().sum(), _through_softmax(pair.q, 0.5 * gap.sign())


def cross_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(t) at temperature 1."""
    q_log, chosen = logits.log_softmax(-1), tokens.unsqueeze(1)
    value = -q_log.gather(1, chosen).sum()
    return value, q_log.exp_().scatter_add_(1, chosen, logits.new_full(chosen.shape, -1.0))


DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
}


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """Carry a slope in q [n, V] to the logits that q is the softmax of."""
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def _pair(logits: Tensor, target_logits: Tensor, temperature: float) -> Pair:
    p_log = (target_logits / temperature).log_softmax(-1)
    q_log = (logits / temperature).log_softmax(-1)
    return Pair(p_log.exp(), q_log.exp(), p_log, q_log)


def _product_dtype(hidden: Tensor, lm_head: Tensor) -> torch.dtype:
    """The dtype of the product with lm_head: as autocast has it, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else lm_head.dtype


def _chunks(count: int, size: int) -> Iterator[slice]:
    step = max(1, size)
    return (slice(start, start + step) for start in range(0, count, step))
