"""The Max-Gram table: for every token the one that most often follows it, and of longer contexts.

CS Drafting (arXiv 2312.11462): where copying from the context ends, a bigram table goes on. What
follows contexts of several tokens, with how often, is beyond the paper: drafts of it alone, as long
as they are likely (eval/drafters/ngrams.py). The table is counted (train/counting), not
trained, and belongs to a tokenizer, not to a model.

Shapes: V vocabulary, E contexts of one length, each length its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdraft.models.saved import Saved, SavedConfig, Vocabulary, load_saved
from specdraft.recipes.errors import HeadError, TargetError
from specdraft.recipes.fields import LONGEST_CONTEXT, Natural, shown

VERSION = 1  # of the layout on disk
MOST_CONTEXTS = 10**9
PARTS = "contexts", "next_id", "seen", "agreed"
# A context of tokens t_1 .. t_n is known by sum (t_(n - i) + 1) M^i, modulo 2^64, with i from 0.
POWERS = tuple(pow(0x9E3779B97F4A7C15, place, 2**64) for place in range(LONGEST_CONTEXT))


@dataclass(frozen=True)
class MaxGramConfig(SavedConfig):
    """Whose tokens a table speaks of, and what it was counted on; saved beside it."""

    vocab_size: Vocabulary
    tokenizer: str | None = None  # hash of the tokenizer; None: unknown
    fallback: Natural = 0  # what follows a token that was never seen: the most frequent token
    corpus: dict = field(default_factory=dict)  # sources, rows, tokens, ...
    longer: tuple[Natural, ...] = ()  # how many contexts of 2, 3, .. tokens it knows
    version: int = VERSION

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "longer", tuple(self.longer))  # JSON has lists
        if len(self.longer) >= LONGEST_CONTEXT or max(self.longer, default=0) > MOST_CONTEXTS:
            raise ValueError(
                f"longer = {shown(self.longer)}: numbers of contexts of 2 to {LONGEST_CONTEXT} "
                f"tokens, {MOST_CONTEXTS:,} of each at most"
            )
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the table; this release reads {VERSION}")
        if not 0 <= self.fallback < self.vocab_size:
            raise ValueError(f"fallback = {self.fallback}: must be in 0..{self.vocab_size - 1}")


class MaxGramTable(Saved, tags=["max-gram", "bigram"]):
    """`next_id`, int32 [V], and how sure it is: bigrams counted per first token, int64 [V].

    Of the contexts of n > 1 tokens: their hashes `contexts_n`, as int64 [E], `next_id_n` [E],
    `seen_n` and `agreed_n` [E].
    """

    def __init__(self, config: MaxGramConfig):
        super().__init__()
        self.config = config
        # Minus one is no token: a file that lacks a tensor cannot pass for a table.
        unset = torch.full((config.vocab_size,), -1)
        self.register_buffer("next_id", unset.int())
        self.register_buffer("seen", unset.clone())  # all bigrams
        self.register_buffer("agreed", unset.clone())  # the best one
        for length, entries in enumerate(config.longer, start=2):
            unset = torch.full((entries,), -1)
            for part in PARTS:
                own = unset.int() if part == "next_id" else unset.clone()
                self.register_buffer(f"{part}_{length}", own)

    @classmethod
    def of_counts(
        cls,
        config: MaxGramConfig,
        next_id: Tensor,
        seen: Tensor,
        agreed: Tensor,
        longer: Sequence[Sequence[Tensor]] = (),
    ) -> "MaxGramTable":
        """Build a table of [V] tensors; ids that were never seen get the fallback. longer: of every
        length of `config.longer` its PARTS, each [E]."""
        table = cls(config)
        table.next_id.copy_(torch.where(seen > 0, next_id, config.fallback))
        table.seen.copy_(seen)
        table.agreed.copy_(agreed)
        for length, parts in enumerate(longer, start=2):
            for part, values in zip(PARTS, parts, strict=True):
                getattr(table, f"{part}_{length}").copy_(values)
        return table

    def followers(self) -> list[dict[int, tuple[int, float]]]:
        """Return, of contexts of 1, 2, .. tokens, by their hashes, what follows and how likely it
        is: once less than it did, of all that was seen, since what follows is chosen for it."""
        ids = self.seen.nonzero()[:, 0]
        parts = [[ids + 1, self.next_id[ids], self.seen[ids], self.agreed[ids]]]
        for length in range(2, 2 + len(self.config.longer)):
            parts.append([getattr(self, f"{part}_{length}") for part in PARTS])
        found = []
        for contexts, tokens, seen, agreed in parts:
            hashes = contexts.numpy().view("uint64").tolist()
            chances = (agreed.double() / (seen + 1)).tolist()
            found.append(dict(zip(hashes, zip(tokens.tolist(), chances, strict=True), strict=True)))
        return found

    @property
    def coverage(self) -> float:
        """Share of the vocabulary that was seen with a token behind it."""
        return float((self.seen > 0).double().mean())

    @property
    def agreement(self) -> float:
        """Share of the counted bigrams that the table predicts."""
        return int(self.agreed.sum()) / max(1, int(self.seen.sum()))

    def check(self, name: str, vocab_size: int, tokenizer: str | None) -> None:
        """Raise TargetError when this table speaks of other tokens than the target `name`."""
        own = self.config
        if own.vocab_size != vocab_size:
            what = f"is for a vocabulary of {own.vocab_size}, {name} has {vocab_size}"
        elif own.tokenizer and tokenizer and own.tokenizer != tokenizer:
            what = f"was counted with the tokenizer {own.tokenizer[:12]}, "
            what += f"{name} has {tokenizer[:12]}"
        else:
            return
        way_out = "count one with its tokenizer: python train/maxgram.py RECIPE"
        raise TargetError(f"this table {what}; {way_out}")


def load_table(
    source: str | Path,
    name: str,
    vocab_size: int,
    tokenizer: str | None = None,
    revision: str | None = None,
) -> MaxGramTable:
    """Load the table of a target called `name`, from a folder or by its Hub id.

    Raises HeadError when there is none or it is damaged, HubError when the Hub does not give it,
    and TargetError when it is another tokenizer's.
    """
    maker = "python train/maxgram.py"
    table = load_saved(MaxGramTable, source, revision, noun="Max-Gram table", maker=maker)
    table.check(name, vocab_size, tokenizer)
    next_id, seen, agreed = (
        torch.cat([part for key, part in table.state_dict().items() if key.startswith(own)])
        for own in PARTS[1:]
    )
    low, high = int(next_id.min()), int(next_id.max())
    if low < 0 or high >= vocab_size:
        wrong = f"next ids are {low}..{high}, allowed are 0..{vocab_size - 1}"
    elif (agreed < 0).any() or (agreed > seen).any():
        wrong = "a token followed its context less than never, or more often than all together"
    else:
        return table
    raise HeadError(f"{source} holds no whole Max-Gram table: {wrong}")
