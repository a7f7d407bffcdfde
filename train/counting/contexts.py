"""What follows contexts of several tokens, counted like bigrams: sparse, shard by shard.

A context is known by a hash of 64 bits (models/maxgram.py), so it takes as much memory whatever its
length. Shards are merged range by range of hashes. Of tokens that follow equally often the lowest
id wins. What was seen once says little and is most of what there is: it is left out.

Shapes: P different contexts with a token behind them, E contexts.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdraft.data.store.corpus import Rows
from specdraft.models.maxgram import POWERS

LEAST_SEEN = 2
PARTS = "contexts", "tokens", "counts"
Read = Callable[..., NDArray]  # of a shard: one of these by its name, from one place to another


class Found(NamedTuple):
    """Contexts with the tokens behind them, ascending by both; each pair once."""

    contexts: NDArray[np.uint64]  # [P]
    tokens: NDArray[np.int32]  # [P]
    counts: NDArray[np.int64]  # [P]

    def followers(self) -> "Followers":
        """Return what follows each context most often; of rare contexts, nothing."""
        starts, winners = most_frequent(self.contexts, self.counts)
        seen = np.add.reduceat(self.counts, starts) if len(starts) else self.counts
        kept = seen >= LEAST_SEEN
        winners = winners[kept]
        found = self.contexts[winners], self.tokens[winners], seen[kept], self.counts[winners]
        return Followers(*found)


class Followers(NamedTuple):
    """Of every context, ascending, the token that follows it most often."""

    contexts: NDArray[np.uint64]  # [E]
    tokens: NDArray[np.int32]  # [E]
    seen: NDArray[np.int64]  # [E], how often with any token behind it
    agreed: NDArray[np.int64]  # [E], how often with this one


def count_contexts(rows: Rows, length: int) -> Found:
    """Count the contexts of so many tokens in front of each token that is counted, within rows."""
    ids = rows.ids.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(ids), np.uint64)
    for back, power in enumerate(POWERS[:length]):
        hashes[back:] += ids[: len(ids) - back] * np.uint64(power)
    starts = np.cumsum(rows.lengths) - rows.lengths
    places = np.arange(len(ids)) - np.repeat(starts, rows.lengths)
    last = np.flatnonzero(rows.counted & (places >= length))
    return grouped(Found(hashes[last - 1], rows.ids[last], np.ones(len(last), np.int64)))


def grouped(found: Found) -> Found:
    """Return pairs in ascending order, the counts of equal ones added up."""
    order = np.lexsort((found.tokens, found.contexts))
    contexts, tokens, counts = (part[order] for part in found)
    new = beginnings(contexts) | beginnings(tokens)
    starts = np.flatnonzero(new)
    summed = np.add.reduceat(counts, starts, dtype=np.int64) if len(starts) else counts
    return Found(contexts[starts], tokens[starts], summed)


def merged(shards: Sequence[Read], at_once: int) -> Iterator[Found]:
    """Yield the pairs of all shards, of about `at_once` pairs of theirs at a time.

    All pairs of a context come together.
    """
    lengths = [len(read("contexts")) for read in shards]
    ranges = max(1, -(-sum(lengths) // at_once))
    cuts = np.array([number * 2**64 // ranges for number in range(1, ranges)], np.uint64)
    inner = (np.searchsorted(read("contexts"), cuts) for read in shards)
    places = [[0, *cut, length] for cut, length in zip(inner, lengths, strict=True)]
    for bounds in zip(*map(pairwise, places), strict=True):
        parts = [
            [read(name, *ends) for read, ends in zip(shards, bounds, strict=True)] for name in PARTS
        ]
        yield grouped(Found(*map(np.concatenate, parts)))


def most_frequent(groups: NDArray, counts: NDArray) -> tuple[NDArray, NDArray]:
    """Return where each group of sorted ones begins, and which entry of it has the largest count:
    of several the first."""
    starts = np.flatnonzero(beginnings(groups))
    if not len(starts):
        return starts, starts
    best = np.maximum.reduceat(counts, starts)
    group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(groups)]))
    ties = np.flatnonzero(counts == best[group])
    return starts, ties[beginnings(group[ties])]


def beginnings(values: NDArray) -> NDArray[np.bool_]:
    """Mark where each run of equal values begins."""
    marks = np.ones(len(values), bool)
    marks[1:] = values[1:] != values[:-1]
    return marks
