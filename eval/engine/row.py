"""A running request: what is committed, what the target has read of it, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from specdraft.eval.engine.request import Request, Step

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character are decoded to


@dataclass(slots=True)
class Row:
    """A request in one of the decoder's slots.

    Prompt and new tokens are committed; the first `num_cached_tokens` of them are in the target's
    KV cache, the others `unread`: parts of a long prompt, later the bonus token alone.
    """

    slot: int
    index: int  # of the request
    request: Request
    unread: list[int]
    eos_ids: frozenset[int]
    is_drafting: bool  # whether the drafter still knows this row
    fallback: str | None = None  # why it no longer does
    tokens: list[int] = field(default_factory=list)  # new ones
    steps: list[Step] = field(default_factory=list)

    @property
    def num_committed_tokens(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens the target has read, and the position of the next one."""
        return self.num_committed_tokens - len(self.unread)

    def cut(self, fresh: list[int], tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, str]:
        """After how many fresh tokens the row ends, the last one included, and why: the first of an
        end-of-sequence token, a stop string and the limit, which may lie beyond them."""
        request = self.request
        count, reason = request.max_new_tokens - len(self.tokens), "length"
        if request.stop:
            stop = tokens_until_stop(tokenizer, self.tokens, fresh, request.stop)
            if stop is not None and stop <= count:
                count, reason = stop, "stop"
        if not self.eos_ids.isdisjoint(fresh):
            eos = next(n for n, token in enumerate(fresh, start=1) if token in self.eos_ids)
            if eos <= count:
                count, reason = eos, "eos"
        return count, reason


def tokens_until_stop(
    tokenizer: PreTrainedTokenizerBase, known: list[int], fresh: list[int], stop: Sequence[str]
) -> int | None:
    """Number of fresh tokens up to the one that completes a stop string; None where none does.

    Depends on the tokens alone, not on how many came in one step. A token is at least one byte of
    text unless it is special, so a bounded tail of the known ones is enough: one that begins with
    a whole character, since a part of one spoils all bytes behind it (Llama 2's byte fallback).
    """
    # So that text only grows: a tokenizer may tidy it.
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    start = max(0, len(known) - 4 * max(map(len, stop)) - 8)
    while start and BROKEN in decode(known[start]):
        start -= 1
    tail = known[start:]
    before, text = _count(decode(tail), stop), decode(tail + fresh)
    if BROKEN not in text and _count(text, stop) == before:
        return None
    counts = range(1, len(fresh) + 1)
    return next((n for n in counts if _count(decode(tail + fresh[:n]), stop) > before), None)


def _count(text: str, stop: Sequence[str]) -> int:
    return sum(text.count(word) for word in stop)
