"""Max-Gram and prompt lookup: copy what followed the end of the text when it occurred before.

Max-Gram (CS Drafting, arXiv 2312.11462) copies what followed the first occurrence of the longest
suffix that occurs earlier in prompt or generation; where the copy runs out, or nothing occurs
again, a bigram table goes on. Prompt lookup (LLMA, PLD) bounds the suffix and has no table: no
occurrence, no draft. Drafts are deterministic: no distribution stands behind them. The source of an
encoder-decoder is a part of its prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from specdraft.eval.engine.request import Request
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology, Tree, chain
from specdraft.eval.lookup.suffix import (
    FirstSuffixes,
    FrequentSuffixes,
    RecentSuffixes,
    Suffixes,
)

CONTINUATIONS: dict[str, Callable[[], Suffixes]] = {
    "first": FirstSuffixes,
    "recent": RecentSuffixes,
    "frequent": FrequentSuffixes,
}


class MaxGramDrafter:
    """A `Drafter` without a model: up to `count` tokens along each of `branches` continuations.

    Suffixes of fewer than `shortest` tokens are not copied from. With `next_id`, the token that
    most often follows each token, every branch is completed to `count` tokens.
    """

    rules: frozenset[str] = frozenset()  # its drafts are candidates, not samples
    from_tokens = True

    def __init__(
        self,
        suffixes: Callable[[], Suffixes],
        count: int,
        shortest: int = 1,
        branches: int = 1,
        next_id: Sequence[int] | None = None,
        rows: int = 1,
        device: torch.device | str = "cpu",
    ):
        if min(count, shortest, branches) < 1:
            raise ValueError(
                f"tokens copied ({count}), shortest match ({shortest}) and branches ({branches}) "
                "must be at least 1"
            )
        self.suffixes, self.count = suffixes, count
        self.shortest, self.branches = shortest, branches
        self.next_id, self.device = next_id, torch.device(device)
        self.forwards, self.seconds, self.max_nodes = 0, 0.0, count * branches
        self.memory: list[Suffixes] = [suffixes() for _ in range(rows)]

    def start(self, row: int, request: Request) -> None:
        self.memory[row] = self.suffixes()
        self.memory[row].extend([*request.source, *request.prompt])

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        self.memory[row].extend(tokens)

    def move(self, row: int, to: int) -> None:
        self.memory[to] = self.memory[row]

    def draft(self, rows: list[int]) -> list[Tree]:
        return [self._draft(self.memory[row]) for row in rows]

    def continuation(self, row: int, ahead: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that go on behind a row's known tokens and those `ahead` of
        them, which others have drafted; with a table, exactly as many."""
        known = self.memory[row]
        copied = next(known.continuations(count, self.shortest, ahead), [])
        return self._complete(copied, [*known.tokens[-1:], *ahead][-1], count)

    def copied(self, row: int, shortest: int) -> list[int]:
        """Return what followed a row's longest suffix of at least `shortest` tokens where it had
        occurred before, completed as a draft is; none where it had not."""
        known = self.memory[row]
        copied = next(known.continuations(self.count, shortest), [])
        return self._complete(copied, known.tokens[-1], self.count) if copied else []

    def _draft(self, known: Suffixes) -> Tree:
        copies = known.continuations(self.count, self.shortest)
        if self.branches == 1:
            tokens = self._complete(next(copies, []), known.tokens[-1], self.count)
            topology = chain(len(tokens))
        else:
            topology, tokens = self._trie(copies, known.tokens[-1])
        return Tree(topology, upload(tokens, self.device))

    def _complete(self, copied: list[int], last: int, count: int) -> list[int]:
        """Go on from a copy, or from the last known token, to `count` tokens with bigrams."""
        if self.next_id is None:
            return copied
        for _ in range(count - len(copied)):
            last = self.next_id[copied[-1] if copied else last]
            copied.append(last)
        return copied

    def _trie(self, copies: Iterable[list[int]], last: int) -> tuple[Topology, list[int]]:
        """Merge the first `branches` continuations that differ; with a table there is always one.

        A copy that another one begins with adds nothing, and bigrams complete the others.
        """
        nodes: dict[tuple[int, ...], int] = {(): 0}  # by their paths
        branches = 0
        for copied in copies:
            if branches == self.branches:
                break
            if not branches or tuple(copied) not in nodes:
                branches += 1
                self._insert(nodes, self._complete(copied, last, self.count))
        if not branches:
            self._insert(nodes, self._complete([], last, self.count))
        _, *paths = nodes
        return Topology([-1, *(nodes[path[:-1]] for path in paths)]), [path[-1] for path in paths]

    @staticmethod
    def _insert(nodes: dict[tuple[int, ...], int], path: list[int]) -> None:
        for end in range(1, len(path) + 1):
            nodes.setdefault(tuple(path[:end]), len(nodes))


class PromptLookup(MaxGramDrafter):
    """Draft the `copy` tokens after the most recent occurrence of the last `match` tokens."""

    def __init__(self, match: int, copy: int, rows: int, device: torch.device | str = "cpu"):
        suffixes = partial(RecentSuffixes, longest=match)
        super().__init__(suffixes, copy, shortest=match, rows=rows, device=device)
