"""Which tokens a drafter proposes from its distributions, so that the acceptance rule is exact.

Greedy requests and the rule "walk" take the most probable tokens. The shared-Gumbel walk wants them
ranked by log q + G, with the noise that the target's choice will see. The rules that reject want
samples, and q with them: without replacement by Gumbel-top-k (RSD, section 3.1), or i.i.d. Their
noise is fresh at every step.

Shapes: D distributions, V vocabulary, W width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.request import GUMBEL, Request
from specdraft.eval.engine.sampling import derive_seed, gumbel, warp
from specdraft.eval.engine.tree import Draws

DRAFTER_STREAM = 1  # of `derive_seed`; acceptance (`SeededChance`) has 0
REJECTION_RULES = frozenset(name for name, entry in RULES.items() if entry.drafts != "any")


def wants_best(request: Request) -> bool:
    """Whether the most probable tokens are wanted, without noise."""
    return request.temperature == 0 or request.rule == "walk"


def wants_samples(request: Request) -> bool:
    """Whether samples are wanted, for a rule that rejects."""
    return request.temperature > 0 and request.rule in REJECTION_RULES


def draws_of(request: Request, probs: Sequence[Tensor], source: Sequence[int]) -> Draws | None:
    """How a tree was drawn, from the distributions [.., V] of its passes; None: it was not."""
    return Draws(RULES[request.rule].drafts, torch.cat([*probs]), source) if probs else None


def ranking(
    scores: Tensor, request: Request, positions: Tensor, ids: Tensor | None = None
) -> Tensor:
    """What deterministic candidates are ranked by, [D, V], for logits [D, V]: log q at the
    request's temperature and, where the target's choice will see noise, the same noise.

    ids: of the tokens [V] that there are logits of; None: all, from 0.

    Their softmax says how likely each candidate is to be the target's choice, as far as the drafter
    can know: q itself or, the noise given, what is left of it.
    """
    if request.temperature == 0:
        return scores.float()
    scores = scores.float() / request.temperature
    if request.rule == GUMBEL:
        which = scores.shape[-1] if ids is None else ids
        scores = scores + gumbel(request.seed, positions, which)
    return scores


def draw(
    scores: Tensor,
    request: Request,
    positions: Tensor,
    step: tuple[int, ...],
    width: int,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Choose W candidates from each distribution, in draft order.

    scores: logits [D, V]. positions: [D], absolute, of the tokens drafted. step: counters that no
    other draw of the request shares, the number of committed tokens among them. ids: of the tokens
    [V] that there are logits of; None: all, from 0. Returns tokens, or their places among ids,
    [D, W] and, where they are samples, the probabilities [D, V] that they were drawn from. Where
    tokens differ, W is V at most; those of probability zero come last.
    """
    size = scores.shape[-1]
    different = min(width, size)
    if not wants_samples(request):
        return ranking(scores, request, positions, ids).topk(different).indices, None
    logs = warp(scores, request.temperature, request.top_k, request.top_p).double()
    seed, count = derive_seed(request.seed, DRAFTER_STREAM, *step), len(scores)
    which = size if ids is None else ids
    if RULES[request.rule].drafts == "iid":
        places = torch.arange(count * width, device=scores.device).view(count, width)
        tokens = (logs[:, None] + gumbel(seed, places, which)).argmax(-1)
    else:
        places = torch.arange(count, device=scores.device)
        tokens = (logs + gumbel(seed, places, which)).topk(different).indices
    return tokens, logs.softmax(-1)
