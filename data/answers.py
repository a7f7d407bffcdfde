"""Questions to the target, its answers, and the files that keep them: `answers-<rank>.jsonl`.

A line holds the slot that an answer fills, which means something in its own cache alone, and a hash
of who was asked what. By that an answer is found again where another cache of the same folder wants
it: with more rows, rows in another order, more samples or longer answers, no question is asked
twice but where an answer had to stop.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from specdraft.data import fingerprint

FILES = "answers-*.jsonl"  # of a rank each
Slot = tuple[int, int, int]  # conversation, sample, turn (number of the answer)


@dataclass(frozen=True)
class Ask:
    """One answer wanted of the target."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    source: list[int] = field(default_factory=list)  # what an encoder reads

    def key(self, target: dict[str, Any]) -> str:
        """A hash of the question and of the target it is put to, however long the answer may be;
        a greedy one has no seed."""
        asked = vars(self) | {"seed": self.seed if self.temperature else None}
        del asked["max_new_tokens"]
        return fingerprint.of_settings(asked | {"of": target}, digits=32)


@dataclass(frozen=True)
class Answer:
    """What came of an ask: new tokens with the end-of-turn token, or the reason for none."""

    tokens: list[int]
    ended: bool  # came to an end of its own within max_new_tokens
    failure: str | None = None

    def within(self, most: int) -> "Answer | None":
        """The same answer where it may have so many tokens; None where it would have gone on."""
        if len(self.tokens) > most:
            return Answer(self.tokens[:most], ended=False)
        return self if self.ended or len(self.tokens) == most else None


# Answers as (index into the asks, answer), in any order.
Generate = Callable[[list[Ask]], Iterator[tuple[int, Answer]]]


class KeptAnswer(NamedTuple):
    """A line of a file."""

    slot: Slot
    key: str | None  # of the question; lines of earlier versions have none
    answer: Answer

    def to_line(self) -> str:
        row = {"slot": self.slot, "ask": self.key, **dataclasses.asdict(self.answer)}
        return json.dumps(row) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self | None:
        """None where it is damaged, or no answer of token ids."""
        try:
            row = json.loads(line)
            kept = cls(tuple(row.pop("slot")), row.pop("ask", None), Answer(**row))
            whole = [*kept.slot, *kept.answer.tokens]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
        numbers = len(kept.slot) == 3 and all(type(n) is int and n >= 0 for n in whole)
        told = isinstance(kept.answer.ended, bool) and isinstance(kept.key, str | None)
        return kept if numbers and told and isinstance(kept.answer.failure, str | None) else None


def kept_lines(folder: Path) -> Iterator[bytes]:
    """The lines of a folder's files. One without an end is torn, or just being written."""
    for path in sorted(folder.glob(FILES)):
        whole = path.read_bytes().splitlines(keepends=True)
        yield from (line for line in whole if line.endswith(b"\n"))


class NearbyAnswers:
    """Answers that caches beside one hold, found by key; how many were found is counted. They are
    held as lines, which take a fraction of the memory of lists of tokens."""

    def __init__(self, own: Path):
        self.found = 0
        self._lines: dict[str, tuple[int, bytes]] = {}  # by key, behind how many tokens it has
        for folder in sorted(own.parent.glob("tokens-*")):
            if folder != own:
                self._add(folder)

    def _add(self, folder: Path) -> None:
        try:
            for line in kept_lines(folder):
                kept = KeptAnswer.from_line(line)
                if kept and kept.key and kept.answer.failure is None:
                    one = len(kept.answer.tokens), line
                    # Of two, one may have had to stop earlier.
                    self._lines[kept.key] = max(one, self._lines.get(kept.key, one))
        except OSError:  # somebody else's, who lets nobody read it
            return

    def get(self, key: str, most: int) -> Answer | None:
        """The answer to a question with this key, in so many tokens, if there is one."""
        if key not in self._lines:
            return None
        answer = KeptAnswer.from_line(self._lines[key][1]).answer.within(most)
        self.found += answer is not None
        return answer
