"""Stop strings: how many new tokens stand when their text may end a request."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def tokens_until_stop(
    tokenizer: PreTrainedTokenizerBase, known: list[int], fresh: list[int], stop: Sequence[str]
) -> int | None:
    """Number of fresh tokens up to the one that completes a stop string; None where none does.

    Depends on the tokens alone, not on how many came in one step. A token is at least one byte of
    text unless it is special, so a bounded tail of the known ones is enough.
    """
    tail = known[-4 * max(map(len, stop)) - 8 :]
    before = _count(tokenizer.decode(tail), stop)
    if _count(tokenizer.decode(tail + fresh), stop) == before:
        return None
    counts = range(1, len(fresh) + 1)
    return next(n for n in counts if _count(tokenizer.decode(tail + fresh[:n]), stop) > before)


def _count(text: str, stop: Sequence[str]) -> int:
    return sum(text.count(word) for word in stop)
