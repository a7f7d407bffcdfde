"""What decoding would take, replayed: answers that are known, drafts that are known, and costs.

Lossless decoding brings the tokens of plain decoding whatever is drafted, so where a step begins is
known from where the one before ended; greedily, a tree's tokens depend on that place alone. With
the rank of each true token (eval/costing/tree_growth.py) all steps of a tree are known without a
forward: no share is taken for independent of the one before it, an answer ends where it ends, and
rows of a batch end one after the other.

Shapes: T tokens of a text, D depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from specdraft.data.prompts import Prompt
from specdraft.eval.costing.tree_growth import Text, Texts
from specdraft.eval.drafters.static import Path
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.pricing.cost import CostModel
from specdraft.models.target import Target

T = TypeVar("T")
ROWS = 8  # answered at once
StepCost = Callable[[int], float]  # milliseconds of a step, by the rows that take part


@dataclass(frozen=True)
class Load:
    """Answers to decode, so many rows at once: each begins `rows` of them, and all end."""

    texts: Texts
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(text.ids) - text.start for text in self.texts)

    @property
    def cached(self) -> float:
        """Tokens that a row has cached in a step, on average: its prompt and half of its answer."""
        spans = ((text.start, len(text.ids)) for text in self.texts)
        return sum((end - start) * (end + start) / 2 for start, end in spans) / self.tokens

    def plain_ms(self, costs: CostModel) -> float:
        """Milliseconds without drafts: a prompt brings one token, and so does each step."""
        steps = [len(text.ids) - text.start - 1 for text in self.texts]
        return self.ms(steps, lambda rows: self.step_ms(costs, rows, 1), costs)

    def batches(self, parts: Sequence[T]) -> list[Sequence[T]]:
        """Cut a list with a part for each answer into batches of as many rows as decode at once."""
        return [parts[first : first + self.rows] for first in range(0, len(parts), self.rows)]

    def step_ms(self, costs: CostModel, rows: int, nodes: int) -> float:
        """Milliseconds of a step of some rows, without drafting; nodes: of a row, with the root."""
        return costs.verify_ms(rows, nodes, self.cached) + costs.loop_ms(rows, nodes)

    def prompts_ms(self, costs: CostModel) -> float:
        """Milliseconds of reading the prompts, which are a batch's first step."""
        total = 0.0
        for texts in self.batches(self.texts):
            length = round(sum(text.start for text in texts) / len(texts))
            total += costs.verify_ms(len(texts), length, 0) + costs.loop_ms(len(texts))
        return total

    def ms(self, steps: Sequence[int], step: StepCost, costs: CostModel) -> float:
        """Milliseconds of all batches, given each answer's steps behind its prompt's."""
        total = self.prompts_ms(costs)
        for own in self.batches(steps):
            done = 0
            for left, count in zip(range(len(own), 0, -1), sorted(own), strict=True):
                total += (count - done) * step(left)  # the steps that so many rows are left in
                done = count
        return total


def answers(target: Target, prompts: Sequence[Prompt], length: int) -> Texts:
    """The target's greedy answers to prompts, up to a length."""
    requests = [Request(prompt.input_ids, length, source=prompt.source) for prompt in prompts]
    capacity = max(len(prompt.input_ids) for prompt in prompts) + length
    done = {one.index: one.tokens for one in Decoder(target, None, ROWS, capacity).run(requests)}
    return [
        Text(len(prompt.input_ids), prompt.input_ids + done[number], prompt.source)
        for number, prompt in enumerate(prompts)
    ]


class Ranks:
    """The ranks of the true tokens of texts, and the steps of trees there."""

    def __init__(self, texts: Texts, traces: Sequence[Tensor]):
        """traces: [T, D] of each text, as `rank_traces` gives them."""
        self.texts = [
            (text.start, trace.tolist()) for text, trace in zip(texts, traces, strict=True)
        ]

    def steps(self, paths: Sequence[Path]) -> list[int]:
        """Steps of every answer with a tree, behind the prompt's."""
        numbers = {(): 0} | {path: node for node, path in enumerate(sorted(paths), start=1)}
        nodes = {(numbers[path[:-1]], path[-1]): numbers[path] for path in paths}
        return [_steps(nodes, start, ranks) for start, ranks in self.texts]


def _steps(nodes: dict[tuple[int, int], int], start: int, ranks: list[list[int]]) -> int:
    """nodes: by parent and rank. Each step goes on as far as its tree, and brings one more."""
    root, steps = start, 0
    while root < len(ranks) - 1:
        node = 0
        for rank in ranks[root]:
            if (node := nodes.get((node, rank))) is None:
                break
            root += 1
        root, steps = root + 1, steps + 1
    return steps
