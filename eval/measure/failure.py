"""A method that fails on a prompt is recorded as failed, and goes on with the next one.

A drafter that raises fails no request: each is finished by plain decoding, with the same output
(eval/engine/decoder.py). Its figures are hardly the drafter's, though, so it is recorded, too.
"""

from collections.abc import Callable, Iterable, Sequence

from specdraft.data.prompts import Prompt
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.outcome import DecodingMethod, Outcome
from specdraft.recipes.errors import UserError, in_a_line


class FaultTolerant:
    """A method whose failures are outcomes. One that cannot be built, or fails on the first batch
    (which warms it up), is not asked again. Bad input is no failure before that, but raised."""

    def __init__(self, make: Callable[[], DecodingMethod]):
        self.warm, self.broken = False, None
        try:
            self.method = make()
        except UserError:
            raise
        except Exception as error:
            self.broken = _failed(error)

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        if self.broken:
            return self.broken
        try:
            outcome = self.method(requests)
        except Exception as error:
            if self.warm:
                return _failed(error)
            if isinstance(error, UserError):
                raise
            self.broken = _failed(error)
            return self.broken
        self.warm = True
        return outcome


def _failed(error: Exception) -> Outcome:
    return Outcome([], 0.0, Timing(), failure=in_a_line(error, kind=True))


def failures_of(parts: Iterable[tuple[Sequence[Prompt], Outcome]]) -> dict:
    """Count and list the prompts that a method failed on, and those that its drafter gave up."""
    found = [
        {"prompt": prompt.id, "turn": prompt.turn, "error": error, "fallback": not part.failure}
        for prompts, part in parts
        for prompt, error in _errors(prompts, part)
    ]
    fallbacks = sum(one["fallback"] for one in found)
    return {"failed": len(found) - fallbacks, "fallbacks": fallbacks, "failures": found}


def _errors(prompts: Sequence[Prompt], part: Outcome) -> list[tuple[Prompt, str]]:
    if part.failure:
        return [(prompt, part.failure) for prompt in prompts]
    pairs = zip(prompts, part.completions, strict=True)
    return [(prompt, done.fallback) for prompt, done in pairs if done.fallback]
