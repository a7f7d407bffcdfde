"""Answers with accepted draft tokens coloured: green was drafted, plain is the target's own.

A replay tells of every step which tokens it gave and which tree was drafted for it.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdraft.eval.engine.request import Completion, Step
from specdraft.eval.engine.row import BROKEN
from specdraft.recipes.terminal import Screen

ACCEPTED, BONUS, PLAIN = "accepted", "bonus", "plain"
STYLES = {ACCEPTED: "bold green", BONUS: "", PLAIN: ""}


class Pieces:
    """An answer that grows by runs of (text, kind): its tokens and its text so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""

    def add(self, tokens: Sequence[int], steps: Sequence[Step]) -> list[tuple[str, str]]:
        """Append the tokens of some steps; return their runs, whose kinds are those of `kinds`."""
        runs, done = [], len(self.tokens)
        self.tokens += tokens
        for kind, run in groupby(kind for step in steps for kind in kinds(step)):
            done += len([*run])
            # Decoded as a whole each time: a token may be part of a character, or carry a space.
            text = self.tokenizer.decode(self.tokens[:done], skip_special_tokens=True)
            text = text.rstrip(BROKEN)  # the rest of a character is to come
            if len(text) >= len(self.text):  # Llama 2's bytes are all broken, up to that
                runs.append((text[len(self.text) :], kind))
                self.text = text
        return runs


def coloured(pieces: Iterable[tuple[str, str]]) -> Text:
    """Runs of (text, kind) as a terminal shows them."""
    return Text.assemble(*((text, STYLES[kind]) for text, kind in pieces))


def kinds(step: Step) -> list[str]:
    """Tell of each token of a step whose it is: drafted and accepted, the target's own behind a
    draft (the bonus), or plain, where nothing was drafted. An end may cut what was accepted, and
    then there is no bonus.
    """
    if not step.drafted:  # with a draft that is not known, nobody can tell whose they are
        return [BONUS if step.accepted else PLAIN] * step.emitted
    return ([ACCEPTED] * step.accepted + [BONUS])[: step.emitted]


def replay(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], steps: Sequence[Step]
) -> list[dict]:
    """Return, for every step, its tokens as (text, kind) and its draft: parents, texts, accepted
    nodes.

    The kinds are those of `kinds`. Node 0 of a draft is its root and has no text.
    """
    shown, done, replayed = "", 0, []
    for step in steps:
        given = []
        for kind in kinds(step):
            done += 1
            text = tokenizer.decode(tokens[:done])
            whole = not text.endswith(BROKEN) or done == len(tokens)
            given.append((text[len(shown) :] if whole else "", kind))
            shown = text if whole else shown
        replayed.append({"tokens": given, "draft": _draft(tokenizer, step)})
    return replayed


def _draft(tokenizer: PreTrainedTokenizerBase, step: Step) -> dict | None:
    if not step.drafted or not step.parents:
        return None
    return {
        "parents": list(step.parents),
        "texts": ["", *(tokenizer.decode([token]) for token in step.tokens)],
        "accepted": list(step.path[1:]),
    }


def sample(
    tokenizer: PreTrainedTokenizerBase, question: str, completion: Completion
) -> dict[str, object]:
    """One answer as it goes into a report."""
    return {
        "prompt": question,
        "tokens": len(completion.tokens),
        "steps": len(completion.steps),
        "pieces": Pieces(tokenizer).add(completion.tokens, completion.steps),
        "replay": replay(tokenizer, completion.tokens, completion.steps),
    }


def print_sample(sample: dict, console: Screen) -> None:
    """Print one answer of a report with its accepted tokens coloured."""
    ratio = sample["tokens"] / sample["steps"]
    console.print(Text(sample["prompt"].strip()[-400:], style="dim"))
    console.print(coloured(sample["pieces"]))
    console.print(
        Text(f"{sample['tokens']} tokens in {sample['steps']} steps: {ratio:.2f} a step\n", "cyan")
    )
