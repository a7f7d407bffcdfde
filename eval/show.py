"""Answers with accepted draft tokens coloured: green was drafted, plain is the target's own."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdraft.eval.decoder import Completion, Step

ACCEPTED, BONUS = "accepted", "bonus"
STYLES = {ACCEPTED: "bold green", BONUS: ""}


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], steps: Sequence[Step]
) -> list[tuple[str, str]]:
    """Cut an answer into runs of (text, "accepted" or "bonus"), in order."""
    runs, shown, done = [], "", 0
    for count, kind in _runs(steps):
        done += count
        # Decoded as a whole each time: a token may be part of a character, or carry a space.
        text = tokenizer.decode(tokens[:done], skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            runs.append((text[len(shown) :], kind))
            shown = text
    return runs


def _runs(steps: Sequence[Step]) -> Iterator[tuple[int, str]]:
    for step in steps:
        if step.emitted > 1:
            yield step.emitted - 1, ACCEPTED
        yield 1, BONUS


def sample(
    tokenizer: PreTrainedTokenizerBase, question: str, completion: Completion
) -> dict[str, object]:
    """One answer as it goes into a report."""
    return {
        "prompt": question,
        "tokens": len(completion.tokens),
        "steps": len(completion.steps),
        "pieces": pieces(tokenizer, completion.tokens, completion.steps),
    }


def print_sample(sample: dict, console: Console | None = None) -> None:
    """Print one answer of a report with its accepted tokens coloured."""
    console = console or Console()
    ratio = sample["tokens"] / sample["steps"]
    console.print(Text(sample["prompt"].strip()[-400:], style="dim"))
    console.print(Text.assemble(*((text, STYLES[kind]) for text, kind in sample["pieces"])))
    console.print(
        Text(f"{sample['tokens']} tokens in {sample['steps']} steps: {ratio:.2f} a step\n", "cyan")
    )
