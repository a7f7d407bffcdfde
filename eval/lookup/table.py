"""What a table of contexts says of the texts in some rows: what comes next, and how likely.

Shapes: N tokens of the longest context.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.trust import Trust
from specdraft.models.maxgram import POWERS

Followers = Mapping[int, tuple[int, float]]  # hash of a context: its next token, how likely it is


class Chain(NamedTuple):
    """What a table says comes next."""

    tokens: list[int]
    chances: list[float]  # of each token: how likely all up to it are
    kinds: list[int]  # of each word: eval/lookup/trust.py


class Lookups:
    """What a table knows of the texts in some rows. known: of contexts of 1, 2, .. N tokens."""

    def __init__(self, known: Sequence[Followers], rows: int):
        self.known, self.longest, self.trust = known, len(known), Trust(len(known))
        self.ends: list[list[int]] = [[] for _ in range(rows)]  # the last N tokens
        self.lengths = [0] * rows
        self.foretold: list[Chain | None] = [None] * rows

    def start(self, row: int, request: Request) -> None:
        known = [*request.source, *request.prompt]
        self.ends[row], self.lengths[row] = known[-self.longest :], len(request.prompt)
        self.foretold[row] = None

    def move(self, row: int, to: int) -> None:
        self.ends[to], self.lengths[to] = self.ends[row], self.lengths[row]
        self.foretold[to] = self.foretold[row]

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        if foretold := self.foretold[row]:
            for token, said, kind in zip(tokens, foretold.tokens, foretold.kinds, strict=False):
                self.trust.note(kind, token == said)
                if token != said:
                    break
        self.foretold[row] = None
        self.ends[row] = (self.ends[row] + tokens)[-self.longest :]
        self.lengths[row] += len(tokens)

    def cached(self, rows: Sequence[int]) -> float:
        """How many tokens the rows have, on average."""
        return sum(self.lengths[row] for row in rows) / len(rows)

    def foretell(self, row: int, most: int, least: float) -> Chain:
        """What comes next in a row, which its next tokens are held against."""
        self.foretold[row] = ahead = self.behind(row, [], most, least)
        return ahead

    def behind(
        self, row: int, drafted: list[int], most: int, least: float, reach: float = 1.0
    ) -> Chain:
        """Up to `most` tokens behind those that were drafted for a row, as long as all up to each
        of them are at least so likely; reach: how likely the drafted ones are."""
        ahead, end = Chain([], [], []), (self.ends[row] + drafted)[-self.longest :]
        while len(ahead.tokens) < most and (found := self._follower(end)):
            token, chance, length = found
            kind = self.trust.kind(length, chance)
            reach *= self.trust.chance(kind, chance)
            if reach < least:
                break
            ahead.tokens.append(token)
            ahead.chances.append(reach)
            ahead.kinds.append(kind)
            end = [*end, token][-self.longest :]
        return ahead

    def _follower(self, end: Sequence[int]) -> tuple[int, float, int] | None:
        """What follows the longest context that is known, and its length; None where none is."""
        hashed, best, length = 0, None, 0
        for followers, power, token in zip(self.known, POWERS, reversed(end), strict=False):
            hashed = (hashed + (token + 1) * power) % 2**64
            # Of a context that was left out the longer ones were, too: they are no more frequent.
            if (found := followers.get(hashed)) is None:
                break
            best, length = found, length + 1
        return (*best, length) if best else None
