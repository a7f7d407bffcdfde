"""A drafter that knows the answers, for comparisons that have to see drafts accepted and rejected.

At each of three depths it drafts a wrong token and then the right one, which goes on.
"""

import torch
from torch import Tensor

from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Topology, Tree


class Foreseeing:
    """A `Drafter` that is told what follows each prompt."""

    forwards, seconds, max_nodes, rules = 0, 0.0, 6, frozenset()
    from_tokens = False
    topology = Topology([-1, 0, 0, 2, 2, 4, 4])

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], device: torch.device | str = "cpu"
    ):
        """answers: the tokens that follow each prompt, or each source."""
        self.answers, self.device, self.coming = answers, torch.device(device), {}

    def start(self, row: int, request: Request) -> None:
        unheard = () if self.from_tokens else request.prompt[1:]
        answer = self.answers[tuple(request.source or request.prompt)]
        self.coming[row] = [*unheard, *answer]

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        assert len(tokens) == len(features)
        self.coming[row] = self.coming[row][len(tokens) :]

    def move(self, row: int, to: int) -> None:
        self.coming[to] = self.coming.pop(row)

    def draft(self, rows: list[int]) -> list[Tree]:
        return [self._tree((self.coming[row] + [0] * 3)[:3]) for row in rows]

    def _tree(self, right: list[int]) -> Tree:
        tokens = [token for good in right for token in (abs(good - 1), good)]
        return Tree(self.topology, torch.tensor(tokens, device=self.device))
