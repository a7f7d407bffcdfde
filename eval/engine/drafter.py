"""What the decoder asks of a drafter; those there are live in eval/drafters/.

A drafter that reads layers of the target, too, names them in an attribute `feature_layers`
(models/feature_layers.py); without one it is shown the last feature.

Shapes: A newly cached tokens of a row, H hidden; (1 + n) * H where it reads n layers.
"""

from typing import Protocol

from torch import Tensor

from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Tree


class Drafter(Protocol):
    """Proposes a tree per row. State per row lives here, never on a model."""

    forwards: int  # passes of its own model so far, each counted once per row
    seconds: float  # that they took
    max_nodes: int  # of a tree it may return, the root not counted
    rules: frozenset[str]  # that its drafts are drawn for, besides those that take any draft
    # Whether it drafts from tokens alone. It then knows the prompt from `start`, drafts before the
    # target has read it, and is told of generated tokens only.
    from_tokens: bool

    def start(self, row: int, request: Request) -> None:
        """A request moves into a row."""

    def move(self, row: int, to: int) -> None:
        """A row's request goes on in another row, whose own has ended."""

    def draft(self, rows: list[int]) -> list[Tree]:
        """Draft behind the last committed token of each row."""

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        """The target has read a row on: `features` [A, H] of the newly cached tokens, and
        `tokens` [A], the token that follows each of them."""
