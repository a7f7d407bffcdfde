"""What one way of decoding made of one batch of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdraft.eval.engine.request import Completion, Request
from specdraft.eval.engine.timing import Timing


@dataclass(frozen=True)
class Outcome:
    """One batch of requests decoded by one method. `timing` has no tokens where it is not ours."""

    completions: list[Completion]
    seconds: float
    timing: Timing
    drafter_passes: tuple[int, ...] = ()  # forwards of each of the drafter's models
    drafter_seconds: float = 0.0
    tries: tuple[float, ...] = ()  # seconds of every repeat, in order; `seconds` is their median
    failure: str | None = None  # what was raised instead; then there is nothing else

    @property
    def drafter_forwards(self) -> int:
        return sum(self.drafter_passes)


class DecodingMethod(Protocol):
    """Decodes a batch of requests."""

    def __call__(self, requests: Sequence[Request]) -> Outcome: ...
