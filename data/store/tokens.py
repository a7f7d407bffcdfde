"""The token cache: conversations as token ids and loss mask, an Arrow dataset on disk.

    cache = TokenCache.open("cache/tokens-0123456789ab")
    cache[0]                            # {"input_ids": [T] int64, "loss_mask": [T] bool}

The folder also holds meta.json (settings, counts) and rejects.jsonl. token_builder.py makes one.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
import torch
from torch import Tensor

from specdraft.data import atomic
from specdraft.data.sealed import read_sealed
from specdraft.recipes.errors import CacheError, DataError

REJECTS = "rejects.jsonl"  # of a cache: what was skipped, by file and line, and why


class TokenCache:
    """Rows of token ids and loss mask, memory-mapped."""

    def __init__(self, directory: Path, dataset: datasets.Dataset, meta: dict[str, Any]):
        self.directory, self.dataset, self.meta = directory, dataset, meta
        self.key: str = meta["key"]  # a hash of what decides the rows
        self.lengths: list[int] = meta["lengths"]  # tokens of every row
        self.has_sources = "source_ids" in dataset.column_names  # of an encoder-decoder
        columns = ["input_ids", "loss_mask", *(["source_ids"] if self.has_sources else [])]
        self._tensors = dataset.with_format("torch", columns=columns)

    @classmethod
    def open(cls, directory: str | Path) -> "TokenCache":
        """Open a finished cache. Raises CacheError when it is missing or damaged."""
        directory = Path(directory)
        if not directory.is_dir():
            raise CacheError(
                f"no token cache at {directory}; build it with: accelerate launch data/cache.py "
                "RECIPE"
            )
        try:
            meta = read_sealed(directory / "meta.json")
            files = meta.get("files", [])  # earlier versions list none
            if found := atomic.first_damage(directory, files):
                raise CacheError(f"{' '.join(found)}; {_anew(directory)}")
            dataset = datasets.load_from_disk(str(directory))
            rows = meta["stats"]["rows"]
            cache = cls(directory, dataset, meta)
        except CacheError:
            raise
        except Exception as error:
            raise CacheError(
                f"the token cache at {directory} is damaged ({error}); {_anew(directory)}"
            ) from error
        if len(dataset) != rows:
            raise CacheError(
                f"the token cache at {directory} holds {len(dataset)} rows and its meta.json says "
                f"{rows}; {_anew(directory)}"
            )
        return cache

    @property
    def stats(self) -> dict[str, int | float]:
        """Counts of what was read, kept and dropped, and the seconds it took."""
        return self.meta["stats"]

    def summary(self) -> str:
        """Return a few lines about what was read and what is left of it; lengths are in tokens."""
        stats, ordered = self.stats, sorted(self.lengths)
        limit = self.meta["settings"]["max_length"]
        lost = {
            f"truncated at {limit} tokens": stats["truncated"],
            "end within an answer (data.max_new_tokens, data.max_length)": stats.get("unended", 0),
            "dropped as too short": stats["dropped_short"],
            "dropped without an answer that fits": stats["dropped_unsupervised"],
            f"rejected ({self.directory / REJECTS})": stats["rejected"],
        }
        told = [f"{count:,} {what}" for what, count in lost.items() if count]
        lengths = " / ".join(f"{ordered[int(q * (len(ordered) - 1))]:,}" for q in (0, 0.5, 1))
        share = f"{stats['supervised'] / stats['tokens']:.0%}"
        learnt = f"{stats['supervised']:,} ({share}) are trained on"
        lines = (
            f"data: {stats['rows']:,} rows, {stats['tokens']:,} tokens, of which {learnt}",
            f"tokens per row: {lengths} (shortest / median / longest)",
            f"from {stats['conversations']:,} conversations",
            *(told or ["none was cut, dropped or rejected"]),
        )
        return "\n      ".join(lines)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"input_ids": [T] int64, "loss_mask": [T] bool}, and "source_ids" [S] of rows
        that have a source."""
        row = self._tensors[index]
        item = {"input_ids": row["input_ids"].long(), "loss_mask": row["loss_mask"].bool()}
        return item | ({"source_ids": row["source_ids"].long()} if self.has_sources else {})

    @cached_property
    def room(self) -> list[int]:
        """The tokens of every row that a forward needs room for: its own, or the longest source."""
        if not self.has_sources:
            return self.lengths
        longest = pc.max(pc.list_value_length(self.dataset.data.column("source_ids"))).as_py()
        return [max(length, longest) for length in self.lengths]

    def check_vocabulary(self, vocab_size: int, target: str) -> None:
        """Raise DataError where a row has ids that a target has no embedding of."""
        for name in ("input_ids", "source_ids")[: 1 + self.has_sources]:
            ends = pc.min_max(pc.list_flatten(self.dataset.data.column(name))).as_py()
            if not 0 <= ends["min"] <= ends["max"] < vocab_size:
                raise DataError(
                    f"{self.directory} has token ids {ends['min']}..{ends['max']}, and {target} "
                    f"knows 0..{vocab_size - 1}: its tokenizer is another model's; put the "
                    "target's own beside its weights"
                )

    def masks(self) -> Iterator[Tensor]:
        """Yield the loss mask [T] of every row, without the rest: many times faster."""
        for table in self.dataset.with_format("arrow").iter(1000):
            masks = table["loss_mask"].combine_chunks()
            flat = torch.tensor(masks.flatten().to_numpy(zero_copy_only=False))
            yield from flat.split(masks.value_lengths().to_pylist())

    def origin(self, index: int) -> str:
        """Return source:line of a row."""
        return self.dataset[index]["origin"]


def frequent_tokens(
    answers: Iterable[Tensor], count: int, vocab_size: int, always: Collection[int] = ()
) -> Tensor:
    """Return the `count` most frequent ids of answers [..], ascending; ties go to the lower id.

    always: ids that are among them however rare, `count` at most.
    """
    seen = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in answers:
        seen += ids.long().bincount(minlength=vocab_size)
    seen[torch.tensor([*always], dtype=torch.int64)] = seen.sum() + 1
    return seen.argsort(descending=True, stable=True)[:count].sort().values


def _anew(directory: Path) -> str:
    """Say how to make a cache again, without losing the target's answers where it holds some."""
    if any(directory.glob("answers-*.jsonl")):
        return f"rename it to {directory.name}.partial, which keeps the answers, and run again"
    return f"delete {directory} and run again"
