"""How the published figures of a prompt set are made, and where a measurement departs from that.

A figure is worth something beside others only where temperature, length, turns and what is counted
agree. Tokens per step count the bonus token, here and in all of these; that the forward of the
prompt is a step, too, is ours alone, and one step an answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from specdraft.recipes.sections.evaluation import EvalSection


@dataclass(frozen=True)
class Protocol:
    """How the figures of a paper or a benchmark are measured. None: that is left open."""

    name: str
    temperatures: tuple[float, ...]
    max_new_tokens: int
    batch_size: int | None = 1
    chains: bool = False  # whether its figures are of chains alone
    first_turns: bool = False  # whether a second turn is never asked

    def __str__(self) -> str:
        rows = f"batch {self.batch_size}" if self.batch_size else "any batch"
        drafts = "chains" if self.chains else "chains or trees"
        turns = "first turns" if self.first_turns else "all turns"
        return (
            f"{self.name}: temperature {self._allowed()}, up to {self.max_new_tokens} new tokens, "
            f"{rows}, {drafts}, {turns}, bonus token counted"
        )

    def _allowed(self) -> str:
        return " or ".join(f"{temperature:g}" for temperature in self.temperatures)

    def departures(self, settings: EvalSection, trees: bool, turns: int) -> Iterator[str]:
        """Yield where a measurement departs, a phrase each.

        trees: whether its drafts branch; turns: the most that a question of it has.
        """
        if settings.temperature not in self.temperatures:
            yield f"temperature {settings.temperature:g}, not {self._allowed()}"
        if settings.temperature > 0:  # what is cut off is never sampled, and need not be foreseen
            if settings.top_k > 0:
                yield f"the likeliest {settings.top_k} tokens, not all"
            if settings.top_p < 1:
                yield f"the likeliest tokens up to {settings.top_p:g} of the probability, not all"
        if settings.max_new_tokens != self.max_new_tokens:
            yield f"up to {settings.max_new_tokens} new tokens, not {self.max_new_tokens}"
        if settings.spread > 1:
            yield "lengths spread, and no end token ends an answer"
        if self.batch_size not in (None, settings.batch_size):
            yield f"batch {settings.batch_size}, not {self.batch_size}"
        if self.chains and trees:
            yield "trees, not chains"
        if self.first_turns and turns > 1:
            yield "second turns, too"


SPEC_BENCH = Protocol("Spec-Bench (arXiv 2401.07851)", (0.0,), 1024)
MT_BENCH = Protocol("EAGLE's papers", (0.0, 1.0), 1024)
DRAFT_LMS = Protocol("papers on draft LMs (GSD, RSD)", (0.0, 1.0), 128)
DEEPSPEC = Protocol("DeepSpec", (1.0,), 2048, chains=True, first_turns=True)
SPEED_BENCH = Protocol("SPEED-Bench (arXiv 2604.09557)", (0.0,), 4096, None, chains=True)
