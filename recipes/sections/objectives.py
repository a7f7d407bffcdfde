"""What training minimises: of a Falcon head (CSGD) `glance` and `loss`, of a student `distill`."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdraft.recipes.fields import (
    Fraction,
    NonNegative,
    Sampling,
    Section,
    Share,
    Temperature,
    Tokens,
)


@dataclass(frozen=True, kw_only=True)
class GlanceSection(Section):
    """Glancing (GLAT, arXiv 2008.07905, as Falcon uses it): a head that errs is shown a share of
    the right answers in its input, and less of them as training goes on."""

    enabled: bool = True
    start: Fraction = 0.4  # share of the Hamming distance that is revealed, first step
    end: Fraction = 0.0  # the same at the last step
    isolated: bool = False  # a revealed block's neighbours read it, and the LSTM, as it was
    supervise_revealed: bool = False  # loss also where the answer was put into the input


@dataclass(frozen=True, kw_only=True)
class LossSection(Section):
    """The loss of a Falcon or EAGLE-1 head: of the features it predicts, and of their tokens."""

    feature_weight: NonNegative = 1.0  # of SmoothL1 on features
    distill_weight: NonNegative = 0.1  # of the token loss (w_dist)
    soft_weight: Fraction = 0.9  # alpha: share of KL and LK in the token loss, the rest is CE
    lk_weight: Fraction = 0.0  # of these, share of LK, -log sum min(p, q) (arXiv 2602.23881)
    depth_decay: Share = 1.0  # a token at depth d of a draft counts depth_decay^(d - 1)
    pace_smoothing: Fraction | None = None  # or what it adds to its length (D-PACE: 0.5)
    feature_noise: NonNegative = 0.1  # U(-x, x) on input features, in their standard deviations

    @property
    def by_depth(self) -> bool:
        """Whether tokens of different depths count differently."""
        return self.depth_decay < 1 or self.pace_smoothing is not None

    def conflicts(self) -> Iterator[str]:
        """Yield weights that leave nothing to minimise, or that weigh something twice."""
        if self.feature_weight == self.distill_weight == 0:
            both = ("feature_weight", "distill_weight")
            yield self.complaint(both, "nothing to train on; one must be above 0")
        if self.lk_weight > 0 and self.soft_weight == 0:
            both = ("lk_weight", "soft_weight")
            yield self.complaint(both, "lk_weight is a share of soft_weight; set it above 0")
        if self.depth_decay < 1 and self.pace_smoothing is not None:
            both = ("depth_decay", "pace_smoothing")
            yield self.complaint(both, "both weigh by depth; set depth_decay=1.0 or the other null")


@dataclass(frozen=True, kw_only=True)
class DistillSection(Section):
    """What a student is trained on: weights of a mixture of objectives (DistillSpec, arXiv
    2310.08461; the JSD and `on_policy` of GKD, arXiv 2306.13649), and whose text."""

    forward_kl: NonNegative = 1.0  # KL(p || q), p the target's distribution, q the student's
    reverse_kl: NonNegative = 0.0  # KL(q || p)
    jsd: NonNegative = 0.0  # generalised Jensen-Shannon divergence
    beta: Fraction = 0.5  # its share of p in the mixture; 0 and 1 are excluded
    total_variation: NonNegative = 0.0  # 1 - the share of sampled drafts that is accepted
    lk: NonNegative = 0.0  # -log of that share (LK losses, arXiv 2602.23881)
    cross_entropy: NonNegative = 0.0  # on the tokens of the text
    temperature: Temperature = 1.0  # of p and q in the divergences
    on_policy: Fraction = 0.0  # lambda: share of rows whose answer the student writes
    sample_temperature: Sampling = 1.0  # of these answers
    max_new_tokens: Tokens = 128  # of these answers

    @property
    def divergences(self) -> bool:
        """Whether the target's distributions are needed, not just tokens."""
        weights = (self.forward_kl, self.reverse_kl, self.jsd, self.total_variation, self.lk)
        return max(weights) > 0

    def conflicts(self) -> Iterator[str]:
        """Yield weights that leave nothing to minimise, and a beta that mixes nothing."""
        if not 0 < self.beta < 1:
            yield self.complaint(
                "beta",
                "must be above 0 and below 1; for the divergences at its ends "
                "use distill.forward_kl or distill.reverse_kl",
            )
        if not self.divergences and self.cross_entropy == 0:
            yield (
                "distill.forward_kl, reverse_kl, jsd, total_variation, lk and cross_entropy are "
                "all 0: nothing to train on; one must be above 0"
            )
