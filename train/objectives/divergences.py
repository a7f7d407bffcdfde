"""The objectives of distillation, as sums over positions, and their gradients in closed form.

p is the target's next-token distribution, q the student's, both at temperature T; t is the token of
the text, which enters at temperature 1. With weights w a mixture is the sum of

    forward_kl        KL(p || q)
    reverse_kl        KL(q || p)
    jsd               beta * KL(p || m) + (1 - beta) * KL(q || m),  m = beta * p + (1 - beta) * q
    total_variation   sum |p - q| / 2, one minus the chance that a draft sampled from q is accepted
    lk                -log sum min(p, q), of that chance (LK losses, arXiv 2602.23881)
    cross_entropy     -log q(t)

(DistillSpec, arXiv 2310.08461, section 3; the JSD is that of GKD, arXiv 2306.13649, eq. 1.) A
divergence with the slope g in q has the slope q * (g - sum q g) / T in the student's logits.

Shapes: N supervised positions, n of a chunk, H hidden (the student's may differ), V vocabulary.
"""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.eval.engine.sampling import most_probable
from specdraft.models.families.finish import PLAIN, Finish
from specdraft.recipes.schema import DistillSection
from specdraft.train.objectives.chunked import Teacher, chunked_loss


@dataclass(frozen=True)
class Mixture:
    """The weights of the objectives, with the JSD's beta and the temperature of p and q.

    A `Formula`; the target may be missing where cross-entropy alone counts.
    """

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    total_variation: float = 0.0
    lk: float = 0.0
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

    def of_target(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target's choice [n], p and its logarithm [n, V]."""
        return most_probable(logits), *_softmax(logits, self.temperature)

    def __call__(self, logits: Tensor, target: tuple | None, tokens: Tensor) -> tuple:
        q, q_log = drafted = _softmax(logits, self.temperature)
        wanted, p, p_log = target or (tokens, None, None)
        parts, slope = [], torch.zeros_like(logits)
        for name, weight in self.weights().items():
            if name == "cross_entropy":
                at_one = drafted if self.temperature == 1.0 else _softmax(logits, 1.0)
                value, gradient = cross_entropy(*at_one, tokens)
            else:
                value, gradient = DIVERGENCES[name](p, q, p_log, q_log, self.beta)
                weight = weight / self.temperature
            parts.append(value)
            slope.add_(gradient, alpha=weight)
        return parts, slope, most_probable(logits) == wanted


class ObjectiveSums(NamedTuple):
    """Sums over positions; divide by the global count of positions. A tuple: ZeRO-3 has weights
    back for what it finds in one, in backward."""

    total: Tensor  # scalar, carries the gradient
    parts: dict[str, Tensor]  # [] or [R], each objective of the mixture, unweighted
    agreed: Tensor  # [] or [R], where the argmax of q is that of p, or, without a target, t


def objective_sums(
    hidden: Tensor,  # [N, H], the student's, or of several passes [R, N, H]
    lm_head: Tensor,  # [V, H], the student's, or one for every pass [R, V, H]
    tokens: Tensor,  # [N]
    mixture: Mixture,
    teacher: Teacher | None = None,  # the target; None where cross-entropy alone counts
    *,
    counts: Tensor | None = None,  # [R, N]
    finish: Finish = PLAIN,  # the student's
    elements: int | None = None,
) -> ObjectiveSums:
    """Return a mixture of objectives summed over positions, differentiable in the first two.

    counts: how much positions count in the total; those of 0 are not there. `elements` bounds
    chunk * V.
    """
    kind, dtype = hidden.device.type, lm_head.dtype
    if elements is None:  # a CPU's caches want small chunks, a GPU large ones
        elements = 1 << 19 if kind == "cpu" else 1 << 24
    if torch.is_autocast_enabled(kind):  # the product with lm_head follows it
        dtype = torch.get_autocast_dtype(kind)
    total, parts, agreed = chunked_loss(
        hidden if hidden.ndim == 3 else hidden[None],
        lm_head,
        tokens,
        teacher,
        mixture,
        size=elements // lm_head.shape[-2],
        dtype=dtype,
        counts=counts,
        finish=finish,
    )

    def summed(values: Tensor) -> Tensor:
        there = values if counts is None else values * (counts > 0)
        return there.sum(-1, dtype=total.dtype).reshape(hidden.shape[:-2])

    by_name = {name: summed(part) for name, part in parts.items()}
    return ObjectiveSums(total, by_name, summed(agreed))


# Each takes p and q of a chunk [n, V], their logarithms and beta. It returns its values [n] and its
# slope [n, V] in the student's logits / T.
Divergence = tuple[Tensor, Tensor]


def forward_kl(p: Tensor, q: Tensor, p_log: Tensor, q_log: Tensor, _: float) -> Divergence:
    """KL(p || q)."""
    return (p * (p_log - q_log)).sum(-1), q - p


def reverse_kl(p: Tensor, q: Tensor, p_log: Tensor, q_log: Tensor, _: float) -> Divergence:
    """KL(q || p)."""
    ratio = q_log - p_log
    return (q * ratio).sum(-1), _through_softmax(q, ratio)


def jsd(p: Tensor, q: Tensor, p_log: Tensor, q_log: Tensor, beta: float) -> Divergence:
    """Generalised Jensen-Shannon divergence: close to beta * KL(p || q) for a small beta."""
    mean = torch.logaddexp(p_log + math.log(beta), q_log + math.log1p(-beta))
    ratio = q_log - mean
    value = beta * p * (p_log - mean) + (1.0 - beta) * q * ratio
    return value.sum(-1), _through_softmax(q, (1.0 - beta) * ratio)


def total_variation(p: Tensor, q: Tensor, *_: Tensor | float) -> Divergence:
    """Half the L1 distance of p and q."""
    gap = q - p
    return 0.5 * gap.abs().sum(-1), _through_softmax(q, 0.5 * gap.sign())


def lk(p: Tensor, q: Tensor, *_: Tensor | float) -> Divergence:
    """-log sum min(p, q), finite where nothing is shared."""
    shared = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    falling = torch.where(q < p, q, 0.0).div_(shared)  # min(p, q) is q there
    return -shared.log().squeeze(-1), (q * falling.sum(-1, keepdim=True)).sub_(falling)


def cross_entropy(q: Tensor, q_log: Tensor, tokens: Tensor) -> Divergence:
    """-log q(t), of q at temperature 1."""
    chosen = tokens.unsqueeze(1)
    slope = q.scatter_add(1, chosen, q.new_full(chosen.shape, -1.0))
    return -q_log.gather(1, chosen).squeeze(1), slope


DIVERGENCES = {term.__name__: term for term in (forward_kl, reverse_kl, jsd, total_variation, lk)}


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """Carry a slope in q [n, V] to the logits that q is the softmax of."""
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def _softmax(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The distribution of logits [n, V] at a temperature, and its logarithm."""
    logarithm = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
    return logarithm.exp(), logarithm
