"""The Max-Gram table: for every token the one that most often follows it, 4 bytes an entry.

CS Drafting (arXiv 2312.11462): where copying from the context ends, a bigram table goes on. The
table is counted (train/bigrams.py), not trained, and belongs to a tokenizer, not to a model.

Shapes: V vocabulary.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdraft.models.saved import Saved, SavedConfig, Vocabulary, load_saved
from specdraft.recipes.errors import HeadError, TargetError
from specdraft.recipes.fields import Natural

VERSION = 1  # of the layout on disk


@dataclass(frozen=True)
class MaxGramConfig(SavedConfig):
    """Whose tokens a table speaks of, and what it was counted on; saved beside it."""

    vocab_size: Vocabulary
    tokenizer: str | None = None  # hash of the tokenizer; None: unknown
    fallback: Natural = 0  # what follows a token that was never seen: the most frequent token
    corpus: dict = field(default_factory=dict)  # sources, rows, tokens, ...
    version: int = VERSION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the table; this release reads {VERSION}")
        if not 0 <= self.fallback < self.vocab_size:
            raise ValueError(f"fallback = {self.fallback}: must be in 0..{self.vocab_size - 1}")


class MaxGramTable(Saved, tags=["max-gram", "bigram"]):
    """`next_id`, int32 [V], and how sure it is: bigrams counted per first token, int64 [V]."""

    def __init__(self, config: MaxGramConfig):
        super().__init__()
        self.config = config
        # Minus one is no token: a file that lacks a tensor cannot pass for a table.
        unset = torch.full((config.vocab_size,), -1)
        self.register_buffer("next_id", unset.int())
        self.register_buffer("seen", unset.clone())  # all bigrams
        self.register_buffer("agreed", unset.clone())  # the best one

    @classmethod
    def of_counts(
        cls, config: MaxGramConfig, next_id: Tensor, seen: Tensor, agreed: Tensor
    ) -> "MaxGramTable":
        """Build a table of [V] tensors; ids that were never seen get the fallback."""
        table = cls(config)
        table.next_id.copy_(torch.where(seen > 0, next_id, config.fallback))
        table.seen.copy_(seen)
        table.agreed.copy_(agreed)
        return table

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
    low, high = int(table.next_id.min()), int(table.next_id.max())
    if low < 0 or high >= vocab_size or int(table.seen.min()) < 0:
        raise HeadError(
            f"{source} holds no whole Max-Gram table: next ids are {low}..{high}, allowed are "
            f"0..{vocab_size - 1}"
        )
    return table
