"""Whether an output is token-identical to plain decoding, and if not, whether a near-tie did it.

What is compared is what plain decoding takes the largest of: logits, or in sampling the warped ones
with the noise of their position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.eval.engine.request import Request
from specdraft.eval.engine.sampling import perturbed
from specdraft.models.target import Target

# A forward of one token and one of many sum in different orders. Two logits closer than this many
# units of rounding of the largest logit may change places; anything wider is a fault.
ROUNDING_UNITS = 16


@dataclass(frozen=True)
class Difference:
    """The first token at which an output leaves plain decoding, and how far apart the two are."""

    position: int  # in the new tokens
    plain: int | None
    ours: int | None
    gap: float | None  # in logits, at any temperature; None: one stops where the other goes on
    near_tie: bool


def first_difference(
    target: Target, request: Request, plain: list[int], ours: list[int]
) -> Difference | None:
    """Compare a request's output with plain decoding's; None when they are identical."""
    if plain == ours:
        return None
    shared = next(
        (n for n, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b),
        min(len(plain), len(ours)),
    )
    if shared in (len(plain), len(ours)):  # one stops where the other goes on: never a near-tie
        return Difference(shared, None, None, None, False)
    read = [*request.prompt, *plain[:shared]]
    ids = torch.tensor([read], device=target.device)
    source = torch.tensor([request.source], device=target.device) if request.source else None
    logits = target.logits(target.features(ids, source=source)[0, -1]).float()
    limit = ROUNDING_UNITS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    gap = _gap(logits, request, len(read), [plain[shared], ours[shared]])
    return Difference(shared, plain[shared], ours[shared], gap, gap <= limit)


def _gap(logits: Tensor, request: Request, position: int, pair: list[int]) -> float:
    """How much closer two tokens' logits [V] would have to be to change places; of one that top-k
    or top-p cuts, to stay."""
    temperature = request.temperature
    if temperature == 0:
        return float(logits[pair].diff().abs())
    warping = temperature, request.top_k, request.top_p
    scores = perturbed(logits, position, request.seed, *warping)
    if scores[pair].isfinite().all():
        return temperature * float(scores[pair].diff().abs())
    return float(logits[scores.isfinite()].min() - logits[pair].min())


def differences(
    target: Target,
    requests: Sequence[Request],
    plain: Sequence[list[int]],
    ours: Sequence[list[int]],
) -> list[tuple[int, Difference]]:
    """Return which outputs are not plain decoding's, by number, with where each leaves it."""
    pairs = enumerate(zip(requests, plain, ours, strict=True))
    found = [(number, first_difference(target, *three)) for number, three in pairs]
    return [(number, difference) for number, difference in found if difference]
