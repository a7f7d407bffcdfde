"""How far queries look back, where a drafter has a window of its own.

A query at position p sees what lies less than `window` positions before it. Queries may be fewer
than what a plan wrote, and at other positions than the slots they end at, so these are handed in.
"""

from collections.abc import Sequence
from itertools import islice

import torch

from specdraft.eval.engine.packed import Plan, Segment, hide_later
from specdraft.eval.engine.transfer import upload


def within(plan: Plan, window: int | None, positions: Sequence[int]) -> Plan:
    """The plan for queries at these positions; itself while they see all.

    The positions of what is written are noted in the pool (`Plan.place`), queries before them.
    """
    if window is None or max(positions) < window:
        return plan
    at = iter(positions)
    segments = [
        narrowed(plan, segment, list(islice(at, segment.count)), window)
        for segment in plan.segments
    ]
    return Plan(plan.pool, segments, plan.device)


def narrowed(plan: Plan, segment: Segment, at: Sequence[int], window: int) -> Segment:
    """The segment without what is out of sight of its queries."""
    row, bias = segment.row, segment.bias
    # What is committed lies at the slots of its positions, and all drafts behind it.
    first = min(max(min(at) + 1 - window, 0), plan.pool.lengths[row])
    distance = upload([*at], plan.device)[:, None] - plan.pool.positions[row, first : segment.stop]
    if bias is None:
        bias = torch.zeros(distance.shape, device=plan.device)
        if segment.is_causal:
            hide_later(bias)
    else:
        bias = bias[:, first:]
    return segment._replace(first=first, bias=bias.masked_fill(distance >= window, -torch.inf))
