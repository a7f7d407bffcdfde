"""Whether an output is token-identical to plain decoding, and if not, whether a near-tie did it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdraft.data.prompts import Prompt
from specdraft.models.target import Target

# A forward of one token and one of many sum in different orders. Two logits closer than this many
# units of rounding of the largest logit may change places; anything wider is a fault.
ROUNDING_UNITS = 16


@dataclass(frozen=True)
class Difference:
    """The first token at which an output leaves plain decoding, and the two logits' gap there."""

    position: int  # in the new tokens
    plain: int | None
    ours: int | None
    gap: float
    near_tie: bool


def first_difference(
    target: Target, prompt: Prompt, plain: list[int], ours: list[int]
) -> Difference | None:
    """Compare an output with plain decoding's; None when they are identical."""
    if plain == ours:
        return None
    shared = next(
        (n for n, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b),
        min(len(plain), len(ours)),
    )
    if shared in (len(plain), len(ours)):  # one stops where the other goes on: never a near-tie
        return Difference(shared, None, None, float("inf"), False)
    ids = torch.tensor([prompt.input_ids + plain[:shared]], device=target.device)
    source = torch.tensor([prompt.source], device=target.device) if prompt.source else None
    logits = target.logits(target.features(ids, source=source)[0, -1]).float()
    gap = float((logits[plain[shared]] - logits[ours[shared]]).abs())
    limit = ROUNDING_UNITS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return Difference(shared, plain[shared], ours[shared], gap, gap <= limit)


def differences(
    target: Target, prompts: Sequence[Prompt], plain: Sequence[list[int]], ours: Sequence[list[int]]
) -> list[tuple[Prompt, Difference]]:
    """Return every prompt whose output is not plain decoding's, with where it leaves it."""
    found = [
        (prompt, first_difference(target, prompt, a, b))
        for prompt, a, b in zip(prompts, plain, ours, strict=True)
    ]
    return [(prompt, difference) for prompt, difference in found if difference]
