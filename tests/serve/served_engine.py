"""A small engine like vLLM: its own batch, rows that move, chunked prompts, cached prefixes.

It decodes greedily with a `Target`, without a KV cache: every row runs again at each step. It gives
a proposer the same information as vLLM.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from specdraft.eval.serve.rows import RowStep, ServedRows
from specdraft.models.target import Target


@dataclass
class Running:
    """A running request."""

    number: int
    tokens: list[int]
    length: int  # tokens when finished
    read: int = 0  # tokens read, or found in the cache
    draft: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


class SmallEngine:
    """Decodes prompts with drafts from `rows`: `chunk` prompt tokens per step, at most `batch` rows
    at once, of which `rng` makes some wait, preempts or aborts them; `layers` of the target are
    shown in addition to its features."""

    def __init__(
        self,
        target: Target,
        rows: ServedRows,
        chunk: int,
        batch: int,
        seed: int,
        layers: tuple[int, ...] = (),
    ):
        self.target, self.rows, self.chunk, self.batch = target, rows, chunk, batch
        self.layers = layers
        self.rng = random.Random(seed)
        self.cached: list[list[int]] = []  # prefixes of finished requests
        self.finished: dict[int, Running] = {}
        self.held: list[int] = []  # rows held after every step

    def run(self, prompts: list[list[int]], length: int, unrest: float = 0.0) -> dict[int, list]:
        """Return the final tokens of each prompt, without aborted ones."""
        waiting = [Running(n, list(p), len(p) + length) for n, p in enumerate(prompts)]
        running: list[Running] = []
        while waiting or running:
            while waiting and len(running) < self.batch:
                running.append(self._admit(waiting.pop(0)))
            self._disturb(running, waiting, unrest)
            scheduled = [row for row in running if self.rng.random() >= unrest] or running[:1]
            self.rng.shuffle(scheduled)
            self._step(scheduled)
            for row in [row for row in running if len(row.tokens) >= row.length]:
                running.remove(row)
                del row.tokens[row.length :]
                self.finished[row.number] = row
                self.cached.append(row.tokens)
        return {number: row.tokens for number, row in self.finished.items()}

    def _admit(self, row: Running) -> Running:
        """Start after the longest cached prefix of complete blocks."""
        for known in self.cached:
            same = 0
            while same < min(len(known), len(row.tokens) - 1) and known[same] == row.tokens[same]:
                same += 1
            row.read = max(row.read, same // 16 * 16)
        return row

    def _disturb(self, running: list[Running], waiting: list[Running], unrest: float) -> None:
        if len(running) > 1 and self.rng.random() < unrest:
            row = running.pop(self.rng.randrange(len(running)))
            if self.rng.random() < 0.7:  # preempted: read again
                row.read, row.draft = 0, []
                waiting.insert(0, row)

    def _step(self, scheduled: list[Running]) -> None:
        steps = [self._read(row) for row in scheduled]
        drafts = self.rows.step(steps)
        self.held.append(len(self.rows))
        for row, draft in zip(scheduled, drafts, strict=True):
            row.draft = draft

    def _read(self, row: Running) -> RowStep:
        start, known = row.read, len(row.tokens)
        end = min(start + self.chunk, known) if known - start > 1 else known
        ids = row.tokens[:end] + (row.draft if end == known else [])
        features = self.target.features(torch.tensor([ids]), layers=self.layers)[0]
        sampled = end == known
        if sampled:
            last = features[known - 1 :, : self.target.hidden_size]
            best = self.target.logits(last).argmax(-1).tolist()
            fresh = []
            for token, guess in zip(best, [*row.draft, -1], strict=True):
                fresh.append(token)
                if token != guess:
                    break
            row.tokens += fresh
            row.steps.append(len(fresh))
            end = len(row.tokens) - 1
        row.read = end
        tokens = np.array(row.tokens, dtype=np.int32)
        return RowStep(tokens, start, features[start:end].clone(), sampled)
