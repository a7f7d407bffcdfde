"""What an engine and our decoder did with the same prompts, and how far apart they are."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from specdraft.eval.engine.request import Completion
from specdraft.eval.measure.metrics import ratio_variance


@dataclass(frozen=True)
class Side:
    """What one of the two did: tokens and steps of every prompt, and its drafts by position."""

    tokens: list[list[int]]
    steps: list[list[int]]  # tokens that each step brought
    drafts: int  # steps with a draft
    accepted: list[int]  # by position
    # The last two of every prompt by itself, where they are known.
    by_prompt: list[tuple[int, list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, done: Iterable[Completion]) -> "Side":
        """What our decoder has done."""
        done = list(done)
        depth = max((step.depth for one in done for step in one.steps), default=0)
        by_prompt = [
            (
                sum(step.depth > 0 for step in one.steps),
                [sum(step.accepted > place for step in one.steps) for place in range(depth)],
            )
            for one in done
        ]
        accepted = [sum(counts) for counts in zip(*(own for _, own in by_prompt), strict=True)]
        return cls(
            [one.tokens for one in done],
            [[step.emitted for step in one.steps] for one in done],
            sum(drafts for drafts, _ in by_prompt),
            accepted,
            by_prompt,
        )

    @property
    def tokens_per_step(self) -> float:
        return sum(map(sum, self.steps)) / sum(map(len, self.steps))

    @property
    def acceptance(self) -> list[float]:
        """Share of all drafts that were accepted at each position."""
        return [count / max(self.drafts, 1) for count in self.accepted]


def gaps_of(theirs: Side, ours: Side) -> list[dict]:
    """At every position, how far acceptance differs, and in how many standard errors."""
    gaps = []
    both = zip_longest(ours.acceptance, theirs.acceptance, fillvalue=0.0)
    for place, (mine, other) in enumerate(both):
        pooled = (mine * ours.drafts + other * theirs.drafts) / max(ours.drafts + theirs.drafts, 1)
        counts = 1 / max(ours.drafts, 1) + 1 / max(theirs.drafts, 1)
        error = math.sqrt(max(pooled * (1 - pooled) * counts, _variance(theirs, ours, place)))
        gap = abs(mine - other)
        gaps.append({"gap": gap, "errors": gap / error if error else 0.0 if gap == 0 else 99.0})
    return gaps


def _variance(theirs: Side, ours: Side, place: int) -> float:
    """The variance of the difference in acceptance at a position, were other prompts drawn: steps
    of one answer are alike. The engine, which counts no prompt by itself, is given ours."""
    known = len(ours.by_prompt) > 1 and place < len(ours.accepted)
    if not (known and theirs.drafts and ours.drafts):
        return 0.0
    variance = ratio_variance([(own[place], drafts) for drafts, own in ours.by_prompt])
    return variance * (1 + ours.drafts / theirs.drafts)


def first_step(ours: Side, theirs: Side) -> dict | None:
    """The first step, over prompts, that brought another number of tokens; None: there is none."""
    for prompt, (mine, other) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        for step, (a, b) in enumerate(zip_longest(mine, other, fillvalue=0)):
            if a != b:
                where = {"prompt": prompt, "step": step, "position": sum(mine[:step])}
                return where | {"ours": a, "engine": b}
    return None
