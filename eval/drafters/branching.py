"""Trees of given branching factors, drawn with a draft LM: RSD-C, SpecInfer, SpecTr.

A node at depth l has b_l children. How they are drawn follows from the rule they are drawn for: for
"recursive" without replacement, by Gumbel-top-k (RSD-C, arXiv 2402.14160), for "multistep" and
"kseq" i.i.d. (SpecInfer, arXiv 2305.09781). K i.i.d. chains, as SpecTr drafts them (arXiv
2310.15141), are the factors (K, 1, 1, ..). Without noise, the children are the b_l best.

Where several i.i.d. siblings are the same token, the walk goes on below the first. Merged, that one
has the children of all: chains that begin alike stay candidates together, as K-SEQ has it, and
nothing is read twice. Kept apart, each has its own, and those of all but the first are in vain.

Shapes: D open nodes of a row, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import prod

import torch
from torch import Tensor

from specdraft.eval.drafters.drawing import REJECTION_RULES
from specdraft.eval.drafters.level import Growth, LevelDrafter, Open
from specdraft.eval.engine.transfer import download
from specdraft.models.target import Target


@dataclass
class SampledGrowth(Growth):
    """A tree whose nodes know how many of their siblings, themselves included, they stand for."""

    samples: dict[int, int] = field(default_factory=lambda: {0: 1})


class Branching(LevelDrafter):
    """Draft trees with `branching[l]` children below every node at depth l."""

    rules = REJECTION_RULES - {"block"}

    def __init__(
        self,
        student: Target,
        rows: int,
        capacity: int,
        branching: Sequence[int],
        merged: bool = True,
    ):
        if not branching or min(branching) < 1:
            raise ValueError(f"branching is {list(branching)}; give factors of at least 1")
        nodes = sum(prod(branching[: depth + 1]) for depth in range(len(branching)))
        super().__init__(student, rows, capacity, len(branching), nodes)
        self.branching, self.merged = branching, merged

    def plant(self, row: int) -> SampledGrowth:
        return SampledGrowth(self.memory[row].tokens[-1:])

    def expand(self, growths: dict[int, Growth], opened: Open, logits: Tensor, depth: int) -> Open:
        parts = logits.split([len(nodes) for nodes in opened.values()])
        drawn, possible = [], []
        for (row, nodes), part in zip(opened.items(), parts, strict=True):
            most = max(growths[row].samples[node] for node in nodes)
            tokens, law = self.draw(row, part, depth, most * self.branching[depth - 1])
            growths[row].drawn_from(nodes, law)
            drawn.append(tokens)
            # With top-k and top-p, fewer tokens may be possible than are wanted.
            possible.append(torch.ones_like(tokens) if law is None else law.gather(1, tokens) > 0)
        host = [part.tolist() for part in download(*drawn, *possible)]
        return {
            row: self._add(growths[row], nodes, depth, tokens, allowed)
            for (row, nodes), tokens, allowed in zip(
                opened.items(), host[: len(drawn)], host[len(drawn) :], strict=True
            )
        }

    def _add(
        self,
        growth: SampledGrowth,
        nodes: list[int],
        depth: int,
        tokens: list[list[int]],
        possible: list[list[bool]],
    ) -> list[int]:
        """Add what was drawn behind each node; return the children that have children in turn."""
        opened = []
        for node, siblings, allowed in zip(nodes, tokens, possible, strict=True):
            count, firsts = growth.samples[node] * self.branching[depth - 1], {}
            for token in compress(siblings[:count], allowed):
                child = growth.add(node, token)
                first = firsts.setdefault(token if self.merged else child, child)
                growth.samples[first] = growth.samples.get(first, 0) + 1
            opened += firsts.values()
        return opened
