"""An answer while it comes: coloured as it grows, and how fast.

On a terminal, lines that are full stand; the one that still grows and the figures below it are
drawn again and again. Elsewhere the text is just written.
"""

import time
from collections.abc import Iterable

from rich.console import Group
from rich.live import Live
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdraft.eval.engine.request import Update
from specdraft.eval.measure.show import Pieces, coloured
from specdraft.recipes.terminal import Screen


class Answer:
    """What has come of an answer so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.pieces, self.steps = Pieces(tokenizer), 0
        self.began, self.seconds = time.perf_counter(), 0.0

    @property
    def text(self) -> str:
        return self.pieces.text

    def grow(self, update: Update) -> Text:
        """Return what a step adds. Raises the error of a request that is refused."""
        if update.completion and update.completion.error:
            raise update.completion.error
        self.steps += len(update.steps)
        self.seconds = time.perf_counter() - self.began
        return coloured(self.pieces.add(update.tokens, update.steps))

    def speed(self) -> str:
        """Tokens, steps, tokens per step and per second, from the question on."""
        tokens = len(self.pieces.tokens)
        if not tokens:
            return "nothing yet"
        return (
            f"{tokens} tokens in {self.steps} steps: {tokens / self.steps:.2f} a step, "
            f"{tokens / self.seconds:.0f} tokens/s"
        )


def show(answer: Answer, updates: Iterable[Update], console: Screen) -> None:
    """Print an answer as it comes, as far as it comes."""
    if not console.is_terminal:
        for update in updates:
            console.print(answer.grow(update), end="", soft_wrap=True)
        console.print()
        return
    growing = spaces = Text()
    try:
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            for update in updates:
                grown = growing + spaces + answer.grow(update)
                # Wrapping drops spaces at the end of a line, and this line's end is to come.
                end = len(grown.plain.rstrip(" "))
                spaces = grown[end:]
                *full, growing = grown[:end].wrap(console, console.width)
                for line in full:
                    console.print(line)
                live.update(Group(growing, Text(answer.speed(), "cyan")))
    finally:
        console.print(growing)
