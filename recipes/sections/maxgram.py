"""The table that is counted instead of trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from specdraft.recipes.fields import Draft, Interval, Section


@dataclass(frozen=True, kw_only=True)
class MaxgramSection(Section):
    """Max-Gram (CS Drafting, arXiv 2312.11462): copy what followed the longest suffix
    of the context, then go on by a bigram table."""

    n: Draft = 10  # tokens drafted: copied, then by bigrams
    min_match: Annotated[int, Interval(1, 16)] = 1  # shortest suffix copied from
    continuation: Literal["first", "recent", "frequent"] = "first"  # occurrence that is copied
    # Continuations drafted side by side, as a tree; falcon_maxgram: deepest paths that go on.
    branches: Draft = 1
    corpus: Literal["tokens", "stream"] = "tokens"  # counted: the token cache, or texts as read
    pairs: Literal["answers", "all"] = "answers"  # bigrams that end in an answer, or every one
    table: str | None = None  # folder to draft with; null: output.dir/table

    def conflicts(self) -> Iterator[str]:
        """No more drafts than a target can read at once."""
        yield from self.check_nodes("branches", self.n * self.branches, "lower it or maxgram.n")
