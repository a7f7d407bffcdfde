"""A drafter's rows inside somebody else's engine, which tells it of no request.

An engine's batch changes from step to step: rows move, come and go, are put off, preempted and
aborted, and prompts are read in parts. What a drafter holds of a row is a function of its tokens
alone. So a row is known by them: what the last step left off with tokens t_1..t_n goes on where a
row has read exactly these, whatever its place. What no row of a step goes on with is forgotten,
but for the features, which may come again (eval/serve/prefixes.py).

Drafting is greedy, whatever a request's sampling: an engine that verifies given tokens accepts each
with the target's own probability of it ("walk" of eval/engine/accept.py).

Shapes: N tokens known of a row, A newly read ones, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.request import Request
from specdraft.eval.serve.prefixes import BLOCK, Prefixes

KEPT = 1 << 14  # tokens whose features outlive their rows


class RowStep(NamedTuple):
    """What a step of the engine did to one row of its batch."""

    tokens: np.ndarray  # [N], int32, all that are known: those that the step has sampled, too
    start: int  # position of the first token that the step read
    features: Tensor | None  # [A, H], from `start` on; None where the drafter asks for none
    sampled: bool  # whether it goes on by a draft; else its prompt is not read to the end

    @property
    def known(self) -> np.ndarray:
        """The tokens that its next step begins behind, the last of them not yet read."""
        if self.features is None:
            return self.tokens
        return self.tokens[: self.start + len(self.features) + 1]


@dataclass
class Held:
    """What is held of a row: its slot in the drafter, and features that no block holds yet."""

    slot: int
    read: np.ndarray  # tokens up to the last whose feature is known
    tail: list[Tensor]  # parts of the features of the last of them


class ServedRows:
    """A drafter of chains, with a slot for each row of an engine's batch; rows that find none free
    are decoded without drafts."""

    def __init__(self, drafter: Drafter, slots: int):
        self.drafter = drafter
        self.prefixes = Prefixes(KEPT)
        self._free = [*reversed(range(slots))]
        self._held: dict[bytes, list[Held]] = {}  # by the tokens that go on with it

    def __len__(self) -> int:
        """How many rows are held: at most those of the last step."""
        return sum(map(len, self._held.values()))

    @torch.inference_mode()
    def step(self, rows: Sequence[RowStep]) -> list[list[int]]:
        """Take note of a step of the engine; return what to verify next, for every row of it."""
        found, numbers = self._find(rows), {}
        for number, (row, held) in enumerate(zip(rows, found, strict=True)):
            if held is None:
                continue
            self._observe(row, held)
            self._held.setdefault(row.known.tobytes(), []).append(held)
            if row.sampled:
                numbers[held.slot] = number
        slots, drafts = sorted(numbers), [[] for _ in rows]
        trees = self.drafter.draft(slots) if slots else ()
        for slot, tree in zip(slots, trees, strict=True):
            drafts[numbers[slot]] = tree.tokens.tolist()
        return drafts

    def _find(self, rows: Sequence[RowStep]) -> list[Held | None]:
        """For every row what is held of it, or a free slot, if there is one."""
        before, self._held = self._held, {}
        same = [before.get(row.tokens[: row.start + 1].tobytes()) for row in rows]
        found = [some.pop() if some else None for some in same]  # rows may be alike
        for gone in (held for some in before.values() for held in some):
            self.prefixes.keep(gone.read, gone.tail)
            self._free.append(gone.slot)
        for number, row in enumerate(rows):
            wanted = row.sampled or not self.drafter.from_tokens
            if found[number] is None and wanted and self._free:
                found[number] = self._start(row)
        return found

    def _start(self, row: RowStep) -> Held:
        """Let a row move in. Of a prefix that the engine had cached there are no new features:
        drafting begins behind it, but for those that were kept."""
        slot, read = self._free.pop(), row.tokens[: row.start]
        if self.drafter.from_tokens:
            self.drafter.start(slot, Request(row.tokens[: row.start + 1].tolist(), 1))
            return Held(slot, read, [])
        self.drafter.start(slot, Request((), 1))
        kept = self.prefixes.behind(read)
        if kept:
            features = torch.cat(kept)
            ahead = row.tokens[row.start + 1 - len(features) : row.start + 1]
            self.drafter.observe(slot, ahead.tolist(), features)
        return Held(slot, read, kept[-1:] if row.start % BLOCK else [])

    def _observe(self, row: RowStep, held: Held) -> None:
        """Show the drafter what a row has gained, and keep the features of whole blocks."""
        fresh = row.known[row.start + 1 :].tolist()
        self.drafter.observe(held.slot, fresh, row.features)
        if self.drafter.from_tokens:
            return
        held.read = row.known[:-1]
        held.tail.append(row.features)
        end = len(held.read) // BLOCK * BLOCK
        if end > row.start:
            features, rest = torch.cat(held.tail), len(held.read) - end
            cut = len(features) - rest
            self.prefixes.keep(held.read[:end], [features[:cut]])
            held.tail = [features[cut:]] if rest else []
