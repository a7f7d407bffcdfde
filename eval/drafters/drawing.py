"""Which tokens a drafter proposes from its distributions, so that the acceptance rule is exact.

Greedy requests and the rule "walk" take the most probable tokens. The shared-Gumbel walk wants them
ranked by log q + G, with the noise that the target's choice will see. The rules that reject want
samples, and q with them: without replacement by Gumbel-top-k (RSD, section 3.1), or i.i.d. Their
noise is fresh at every step.

Shapes: D distributions, V vocabulary, W width.
"""

import torch
from torch import Tensor

from specdraft.eval.accept import RULES
from specdraft.eval.decoder import GUMBEL, Request
from specdraft.eval.sampling import derive, gumbel, warp

DRAFTS = 1  # the stream of `SeededChance` and `derive` that belongs to drafters
DRAWN = frozenset(name for name, entry in RULES.items() if entry.drafts != "any")


def is_ranked(request: Request) -> bool:
    """Whether the most probable tokens are wanted, without noise."""
    return request.temperature == 0 or request.rule == "walk"


def draw(
    scores: Tensor, request: Request, positions: Tensor, step: tuple[int, ...], width: int
) -> tuple[Tensor, Tensor | None]:
    """Choose W candidates from each distribution, in draft order.

    scores: logits [D, V]. positions: [D], absolute, of the tokens drafted. step: counters that no
    other draw of the request shares, the number of committed tokens among them. Returns tokens
    [D, W] and, where they are samples, the probabilities [D, V] that they were drawn from.
    """
    if is_ranked(request):
        return scores.topk(width).indices, None
    size = scores.shape[-1]
    if request.rule == GUMBEL:
        noise = gumbel(request.seed, positions, size)
        return (scores / request.temperature + noise).topk(width).indices, None
    logs = warp(scores, request.temperature, request.top_k, request.top_p).double()
    seed, count = derive(request.seed, DRAFTS, *step), len(scores)
    if RULES[request.rule].drafts == "iid":
        places = torch.arange(count * width, device=scores.device).view(count, width)
        tokens = (logs[:, None] + gumbel(seed, places, size)).argmax(-1)
    else:
        places = torch.arange(count, device=scores.device)
        tokens = (logs + gumbel(seed, places, size)).topk(width).indices
    return tokens, logs.softmax(-1)
