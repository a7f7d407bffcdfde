"""Questions to the target, its answers, and the files that keep them: `answers-<rank>.jsonl`.

A line holds the slot that an answer fills, which means something in its own cache alone, and a hash
of who was asked what. By that an answer is found again where another cache of the same folder wants
it: with more rows, rows in another order, more samples or longer answers, no question is asked
twice but where an answer had to stop.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def key(self, target: Mapping[str, Any]) -> str:
        """A hash of the question and of the target it is put to, however long the answer may be;
        a greedy one has no seed."""
        asked = vars(self) | {"seed": self.seed if self.temperature else None}
        del asked["max_new_tokens"]
        canonical = json.dumps([asked, dict(target)], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


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


def written(slot: Slot, key: str, answer: Answer) -> str:
    """The line that keeps an answer."""
    return json.dumps({"slot": slot, "ask": key, **dataclasses.asdict(answer)}) + "\n"


def parsed(line: bytes) -> tuple[Slot, str | None, Answer] | None:
    """Read a line: slot, key (older ones have none) and answer. None where it is damaged, or no
    answer of token ids."""
    try:
        row = json.loads(line)
        slot, key, answer = tuple(row.pop("slot")), row.pop("ask", None), Answer(**row)
        whole = [*slot, *answer.tokens]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    numbers = len(slot) == 3 and all(type(n) is int and n >= 0 for n in whole)
    told = isinstance(answer.ended, bool) and isinstance(answer.failure, str | None)
    told = told and isinstance(key, str | None)
    return (slot, key, answer) if numbers and told else None


def lines(folder: Path) -> Iterator[bytes]:
    """The lines of a folder's files. One without an end is torn, or just being written."""
    for path in sorted(folder.glob(FILES)):
        whole = path.read_bytes().splitlines(keepends=True)
        yield from (line for line in whole if line.endswith(b"\n"))


class Answered:
    """Answers that caches beside one hold, found by key; how many were found is counted. They are
    kept as lines, which take a fraction of the memory of lists of tokens."""

    def __init__(self, own: Path):
        self.found = 0
        self._lines: dict[str, tuple[int, bytes]] = {}  # by key, behind how many tokens it has
        for folder in sorted(own.parent.glob("tokens-*")):
            if folder != own:
                self._add(folder)

    def _add(self, folder: Path) -> None:
        try:
            for line in lines(folder):
                if (found := parsed(line)) and found[1] and found[2].failure is None:
                    one = len(found[2].tokens), line
                    # Of two, one may have had to stop earlier.
                    self._lines[found[1]] = max(one, self._lines.get(found[1], one))
        except OSError:  # somebody else's, who lets nobody read it
            return

    def get(self, ask: Ask, key: str) -> Answer | None:
        """The answer to a question with this key, if there is one."""
        if key not in self._lines:
            return None
        answer = parsed(self._lines[key][1])[2].within(ask.max_new_tokens)
        self.found += answer is not None
        return answer
