"""Bigrams of a corpus, and longer contexts, counted in bounded memory, by any number of processes.

A corpus is cut into shards of whole conversations. Each is counted on its own (one sort of
first * V + second; longer contexts: contexts.py) and its sparse counts are written whole or not at
all, so a run that is cut off goes on where it stopped, with any number of processes. The table is
merged range by range of first tokens, so that neither the vocabulary nor the corpus decides the
memory. Of second tokens that are equally frequent the lowest id wins.

Shapes: P different bigrams, V vocabulary.
"""

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from specdraft.data import fingerprint
from specdraft.data.atomic import cleaned_up, sync_tree, write_atomic
from specdraft.data.lock import building_lock
from specdraft.data.ranks import ALONE, Ranks
from specdraft.data.renderer import check_rendered
from specdraft.data.store.corpus import Corpus, Rows
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.recipes.errors import CacheError, DataError
from specdraft.recipes.interrupt import keeping
from specdraft.train.counting.contexts import (
    PARTS,
    Followers,
    Read,
    beginnings,
    count_contexts,
    merged,
    most_frequent,
)

VERSION = 1  # of the counts on disk; another one is another folder
MERGED_PAIRS = 1 << 24  # bigrams merged at once: 16 bytes each, and as much again twice


def count(
    corpus: Corpus, cache_dir: Path, vocab_size: int, ranks: Ranks = ALONE, context: int = 1
) -> "Counts":
    """Count every shard that is not counted yet, contexts of up to so many tokens; all ranks call
    this, each does its share.

    Raises: DataError for a token id outside the vocabulary, or a template that too many
    conversations do not fit.
    """
    settings = {"version": VERSION, "vocab_size": vocab_size, **corpus.settings}
    settings |= {"context": context} if context > 1 else {}
    folder = cache_dir / f"bigrams-{fingerprint.of_settings(settings)}"
    share = None if corpus.tokens is None else corpus.tokens // ranks.world
    shards, quiet = 0, not ranks.is_first
    with (
        building_lock(folder, ranks),
        tqdm(total=share, desc="bigrams", unit="token", unit_scale=True, disable=quiet) as bar,
        keeping(lambda: "what is counted is kept"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for number, read in corpus.shards():
            shards += 1
            if number % ranks.world == ranks.rank:
                _count_shard(_shard_path(folder, number), read, vocab_size, context, bar)
        ranks.wait()
    counts = Counts(folder, shards, vocab_size, context)
    if counts.broken:
        check_rendered(counts.rows, corpus.rejects, counts.broken)
    return counts


def _count_shard(
    path: Path, read: Callable[[], Rows], vocab_size: int, context: int, bar: tqdm
) -> None:
    if path.is_file():
        tokens = int(_metadata(path)["tokens"])
        bar.initial += tokens  # no part of this run's tokens/s
    else:
        rows = read()
        counts, tokens = count_rows(rows, vocab_size), len(rows.ids)
        for length in range(2, context + 1):
            found = count_contexts(rows, length)
            counts |= {f"{name}.{length}": p for name, p in zip(PARTS, found, strict=True)}
        metadata = {"rows": len(rows.lengths), "tokens": tokens, "broken": rows.broken}
        metadata = {name: str(value) for name, value in metadata.items()}
        write_atomic(path, safetensors.numpy.save(counts, metadata))
    bar.update(tokens)


def count_rows(rows: Rows, vocab_size: int) -> dict[str, NDArray]:
    """Count the bigrams within rows.

    Returns: `pairs` [P] int64, ascending first * V + second; their `counts` [P] int32; `tokens` [V]
    int64, how often each id stands where `counted` marks it.
    Raises: DataError for an id outside the vocabulary.
    """
    ids, counted = rows.ids, rows.counted
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DataError(
            f"the corpus has token ids {ids.min()}..{ids.max()}, outside the vocabulary "
            f"0..{vocab_size - 1}: it was made with another tokenizer"
        )
    inside = counted[1:].copy()
    starts = np.cumsum(rows.lengths)[:-1]  # a bigram never crosses from one row to the next
    inside[starts[(starts > 0) & (starts < len(ids))] - 1] = False
    pairs = ids[:-1].astype(np.int64) * vocab_size + ids[1:]
    pairs, counts = np.unique(pairs[inside], return_counts=True)
    tokens = np.bincount(ids[counted], minlength=vocab_size)
    return {"pairs": pairs, "counts": counts.astype(np.int32), "tokens": tokens}


class Counts:
    """The counted shards of a whole corpus, mapped from disk."""

    def __init__(self, folder: Path, shards: int, vocab_size: int, context: int = 1):
        self.folder, self.vocab_size, self.context = folder, vocab_size, context
        self.paths = [_shard_path(folder, number) for number in range(shards)]
        metadata = [_metadata(path) for path in self.paths]
        self.rows = sum(int(entry["rows"]) for entry in metadata)
        self.tokens = sum(int(entry["tokens"]) for entry in metadata)
        self.broken = sum(int(entry.get("broken", 0)) for entry in metadata)

    def table(self, tokenizer: str | None, corpus: dict[str, Any]) -> MaxGramTable:
        """Merge the shards into a table. Raises DataError when there is no bigram in them."""
        size = self.vocab_size
        next_id = np.zeros(size, np.int64)
        seen, agreed = np.zeros(size, np.int64), np.zeros(size, np.int64)
        different = 0
        for pairs, counts in self.merged():
            firsts = pairs // size
            # Pairs ascend, so the first of the most frequent ones has the lowest id.
            starts, winners = most_frequent(firsts, counts)
            first = firsts[starts]
            next_id[first] = pairs[winners] % size
            seen[first], agreed[first] = np.add.reduceat(counts, starts), counts[winners]
            different += len(pairs)
        if not different:
            raise DataError(
                f"no bigram in {self.tokens:,} tokens of {self.rows:,} rows: nothing to count; "
                "check data.sources"
                + ("" if corpus.get("pairs") == "all" else ", or set maxgram.pairs=all")
            )
        tokens = sum(_read(path, "tokens") for path in self.paths)
        described = {"rows": self.rows, "tokens": self.tokens, "different_bigrams": different}
        longer = [self.followers(length) for length in range(2, self.context + 1)]
        config = MaxGramConfig(
            vocab_size=size,
            tokenizer=tokenizer,
            fallback=int(tokens.argmax()),
            corpus=corpus | described,
            longer=tuple(len(known.contexts) for known in longer),
        )
        return MaxGramTable.of_counts(
            config,
            *map(torch.from_numpy, (next_id, seen, agreed)),
            [[*map(torch.from_numpy, (known[0].view(np.int64), *known[1:]))] for known in longer],
        )

    def followers(self, length: int, at_once: int = MERGED_PAIRS) -> Followers:
        """Merge what follows the contexts of so many tokens."""

        def reading(path: Path) -> Read:
            return lambda name, *part: (_part if part else _read)(path, f"{name}.{length}", *part)

        found = [one.followers() for one in merged([*map(reading, self.paths)], at_once)]
        return Followers(*map(np.concatenate, zip(*found, strict=True)))

    def merged(self, at_once: int = MERGED_PAIRS) -> Iterator[tuple[NDArray, NDArray]]:
        """Yield all bigrams in ascending order with their counts, in ranges of first tokens.

        A range holds about `at_once` bigrams of all shards; those of one first token stay together.
        """
        cuts = self._cuts(at_once)
        places = [np.searchsorted(_read(path, "pairs"), cuts) for path in self.paths]
        for starts, stops in pairwise(np.transpose(places)):
            slices = list(zip(self.paths, starts, stops, strict=True))
            pairs = np.concatenate([_part(path, "pairs", *where) for path, *where in slices])
            counts = np.concatenate([_part(path, "counts", *where) for path, *where in slices])
            order = np.argsort(pairs, kind="stable")
            pairs = pairs[order]
            new = np.flatnonzero(beginnings(pairs))
            yield pairs[new], np.add.reduceat(counts[order], new, dtype=np.int64)

    def _cuts(self, at_once: int) -> list[int]:
        """Return first bigrams of ranges, and their end; no range is empty."""
        firsts = np.arange(self.vocab_size + 1) * self.vocab_size
        before = sum(np.searchsorted(_read(path, "pairs"), firsts) for path in self.paths)
        cuts, start = [0], 0
        while before[start] < before[-1]:
            stop = int(np.searchsorted(before, before[start] + at_once, side="right")) - 1
            if before[stop] == before[start]:  # one first token with more than fit
                stop = int(np.searchsorted(before, before[start], side="right"))
            cuts.append(stop * self.vocab_size)
            start = stop
        return cuts


def save_table(table: MaxGramTable, folder: Path) -> None:
    """Save a table so that `folder` holds the old one, the new one or none, never a mixture."""
    writing, old = (folder.with_name(f".{what}-{folder.name}") for what in ("writing", "deleted"))
    for leftover in (writing, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with cleaned_up(writing, folder):
        table.save_pretrained(writing)
        sync_tree(writing)
    if folder.exists():
        folder.rename(old)
    writing.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


def _metadata(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        return file.metadata()


def _read(path: Path, name: str) -> NDArray:
    with _opened(path) as file:
        return file.get_tensor(name)


def _part(path: Path, name: str, start: int, stop: int) -> NDArray:
    if start == stop:  # safetensors refuses to read nothing
        return _read(path, name)[:0]
    with _opened(path) as file:
        return file.get_slice(name)[int(start) : int(stop)]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"the counts {path} cannot be read ({error}); delete that file and run again: only "
            "it is counted anew"
        ) from error
