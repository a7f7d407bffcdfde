"""Prompt lookup: copy what followed the last tokens when they occurred before (LLMA, PLD).

A match of `match` tokens is looked for in the prompt and in what has been generated; the `copy`
tokens after its most recent occurrence are the draft, a chain. No occurrence, no draft.
"""

import torch
from torch import Tensor

from specdraft.eval.decoder import Request
from specdraft.eval.transfer import upload
from specdraft.eval.tree import Tree, chain


class PromptLookup:
    """Draft by copying, at no cost: a hash of every gram, updated as tokens come."""

    rules: frozenset[str] = frozenset()  # its drafts are candidates, not samples

    def __init__(self, match: int, copy: int, rows: int, device: torch.device | str = "cpu"):
        if match < 1 or copy < 1:
            raise ValueError(f"match ({match}) and copy ({copy}) must be at least 1")
        self.match, self.copy, self.device = match, copy, device
        self.forwards, self.seconds, self.max_nodes = 0, 0.0, copy
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        # Gram -> where it ended before its latest occurrence, which is often the suffix itself.
        self.latest: list[dict[tuple, int]] = [{} for _ in range(rows)]

    def start(self, row: int, request: Request) -> None:
        self.tokens[row], self.latest[row] = list(request.prompt[:1]), {}

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        known, latest = self.tokens[row], self.latest[row]
        for token in tokens:
            # The gram that ended at the newest token becomes findable when a token follows it.
            if len(known) >= self.match:
                latest[tuple(known[-self.match :])] = len(known)
            known.append(token)

    def draft(self, rows: list[int]) -> list[Tree]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: int) -> Tree:
        known = self.tokens[row]
        start = self.latest[row].get(tuple(known[-self.match :]))
        copied = known[start : start + self.copy] if start is not None else []
        return Tree(chain(len(copied)), upload(copied, self.device))
