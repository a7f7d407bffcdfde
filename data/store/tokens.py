"""The token cache: conversations as token ids and loss mask, an Arrow dataset on disk.

    cache = build_tokens(recipe, tokenizer)     # reads cache/tokens-<hash> when it is there
    cache[0]                                    # {"input_ids": [T] int64, "loss_mask": [T] bool}

The hash covers the contents of the sources, the tokenizer with its template, every setting that
changes a row and, when the target rewrites the answers, the target. The folder also holds
meta.json (settings, counts) and rejects.jsonl. It is written under another name and renamed when
whole, so a folder that exists is complete.
"""

import dataclasses
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specdraft.data import atomic, fingerprint
from specdraft.data.chat import Reject, split_holdout
from specdraft.data.lock import building_lock
from specdraft.data.ranks import ALONE, Ranks
from specdraft.data.regenerate import Generate, Rewriter
from specdraft.data.sealed import read_sealed, write_sealed
from specdraft.data.sources import Source, each_source
from specdraft.data.template import Example, check_rendered, renderer_of
from specdraft.recipes.errors import CacheError, DataError
from specdraft.recipes.schema import Recipe

VERSION = 1  # of the layout; another one is another cache
REJECTS = "rejects.jsonl"  # of a cache: what was skipped, by file and line, and why
MIN_TOKENS = 8  # a shorter row has next to nothing to draft, and caches need not depend on k
_ROW = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "origin": datasets.Value("string"),
    }
)


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
        """What was read and what is left of it, in a few lines; lengths are in tokens."""
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
        learnt = f"{stats['supervised']:,} ({stats['supervised'] / stats['tokens']:.0%}) are learnt"
        lines = (
            f"data: {stats['rows']:,} rows, {stats['tokens']:,} tokens, of which {learnt}",
            f"a row has {lengths} tokens (shortest / median / longest)",
            f"of {stats['conversations']:,} conversations",
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
        """Tokens that a forward has to have room for, for every row: of itself or of a source."""
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


def token_settings(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, identity: dict | None
) -> dict[str, Any]:
    """Return everything that decides the rows; its hash names the cache."""
    data = recipe.data
    settings = {
        "version": VERSION,
        "sources": [Source(name).content_hash() for name in each_source(data.sources)],
        **fingerprint.of_tokenizer(tokenizer),
        "min_tokens": max(recipe.head.block_size + 2, MIN_TOKENS),
        **{
            name: getattr(data, name)
            for name in ("format", "answers", "max_length", "limit", "holdout", "prompt_tokens")
        },
    }
    if data.shuffle_seed is not None:
        settings["shuffle_seed"] = data.shuffle_seed
    if data.format == "seq2seq":
        settings["start"] = renderer_of(recipe, tokenizer).start
    if data.answers == "target":
        names = ("samples", "temperature", "max_new_tokens", "seed")
        settings |= {name: getattr(data, name) for name in names}
        if identity is None:
            raise ValueError("data.answers=target: pass identity=target.identity()")
        settings |= {"target": identity["weights"], "config": identity["config"]}
        settings["target_dtype"] = recipe.target.dtype
        if data.server is not None:  # who else than our decoder; where it listens is no matter
            settings["server_model"] = data.server_model
    return settings


def build_tokens(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    generate: Generate | None = None,
    identity: dict | None = None,
    ranks: Ranks = ALONE,
) -> TokenCache:
    """Open the token cache of a recipe, or make it first.

    With `data.answers: target`, `generate` writes the answers and `identity` is Target.identity();
    every rank writes its share of them. All ranks must call this. Raises DataError, CacheError.
    """
    settings = token_settings(recipe, tokenizer, identity)
    directory = Path(recipe.data.cache_dir) / f"tokens-{fingerprint.of_settings(settings)}"
    if ranks.share(not directory.is_dir()):
        with building_lock(directory, ranks):
            if ranks.share(not directory.is_dir()):  # another run may have built it meanwhile
                with atomic.stating_shortfall(directory):
                    _build(recipe, tokenizer, settings, directory, generate, ranks)
    return TokenCache.open(directory)


def _build(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    directory: Path,
    generate: Generate | None,
    ranks: Ranks,
) -> None:
    started, rewriter = time.monotonic(), None
    partial = directory.with_name(f"{directory.name}.partial")
    renderer = renderer_of(recipe, tokenizer)
    rewrite = recipe.data.answers == "target"
    corpus = split_holdout(recipe.data)[0] if ranks.is_first or rewrite else None
    if rewrite:
        rewriter = Rewriter(renderer, corpus.conversations, partial)
        rewriter.run(generate, ranks)
        ranks.wait()
    if ranks.is_first:
        conversations = corpus.conversations
        if rewriter:
            examples = rewriter.examples()
        else:
            examples = renderer.examples(tqdm(conversations, "tokens", unit="conversation"))
        counts, digest = Counter(), hashlib.sha256()
        rows = _learnable(examples, recipe.data.max_length, settings["min_tokens"], counts)
        rows = _hashed(rows, digest)
        partial.mkdir(parents=True, exist_ok=True)
        for left in partial.glob("*.arrow"):  # of a cache that is made again
            left.unlink()
        lengths = _write_arrow(rows, partial, bool(renderer.start))
        rejects = corpus.rejects + renderer.rejects
        _check_mask(counts, renderer.rejects, f"the tokenizer {tokenizer.name_or_path}")
        # Answers that are asked for again, of a server say, may be others.
        answers = {"rows": digest.hexdigest()} if rewrite else {}
        meta = {
            "key": fingerprint.of_settings(settings | answers),
            "settings": settings,
            "stats": _stats(counts, rejects, len(conversations), started),
            "lengths": lengths,
            "files": [atomic.describe(path) for path in sorted(partial.glob("*.arrow"))],
        }
        _finish(partial, directory, meta, rejects)
    ranks.wait()


def _learnable(
    examples: Iterable[Example], max_length: int, min_tokens: int, counts: Counter
) -> Iterator[Example]:
    """Cut examples to `max_length` (the head stays) and drop those with nothing left to learn.

    Counts rows, tokens, supervised, truncated, unended, dropped_short and dropped_unsupervised.
    """
    for example in examples:
        ids, mask = example.ids[:max_length], example.mask[:max_length]
        counts["truncated"] += len(ids) < len(example.ids)
        if len(ids) < min_tokens:
            counts["dropped_short"] += 1
        elif not any(mask):
            counts["dropped_unsupervised"] += 1
        else:
            counts.update(rows=1, tokens=len(ids), supervised=sum(mask), unended=example.unended)
            yield Example(ids, mask, example.origin, example.source[:max_length])


def _hashed(rows: Iterable[Example], digest: "hashlib._Hash") -> Iterator[Example]:
    """Note what rows say in a digest, and not where they came from."""
    for row in rows:
        digest.update(json.dumps([row.ids, row.mask, row.source]).encode())
        yield row


def _check_mask(counts: Counter, rejects: list[Reject], what: str) -> None:
    """Refuse rows of which 0% or 100% are supervised, or many do not render. Raises DataError."""
    rendered = counts["rows"] + counts["dropped_short"] + counts["dropped_unsupervised"]
    check_rendered(rendered, rejects)
    if not counts["rows"]:
        raise DataError(
            f"0% of the tokens are supervised with {what}: {counts['dropped_unsupervised']} rows "
            f"have no assistant token within data.max_length and {counts['dropped_short']} are too "
            "short; check the chat template and data.max_length"
        )
    if counts["supervised"] == counts["tokens"]:
        raise DataError(
            f"100% of the tokens are supervised with {what}, prompts included; its chat template "
            "must tell answers from prompts: mark them with {% generation %} .. {% endgeneration %}"
        )


def _anew(directory: Path) -> str:
    """How to make a cache again; of one that holds answers of the target without losing them."""
    if any(directory.glob("answers-*.jsonl")):
        return f"rename it to {directory.name}.partial, which keeps the answers, and run again"
    return f"delete {directory} and run again"


def _write_arrow(examples: Iterable[Example], partial: Path, sources: bool) -> list[int]:
    """Write the rows as a dataset that `datasets.load_from_disk` opens; return their lengths."""
    from datasets.arrow_writer import ArrowWriter

    columns = datasets.Features(_ROW | ({"source_ids": _ROW["input_ids"]} if sources else {}))
    lengths, raw = [], partial / "rows"
    raw.mkdir(exist_ok=True)
    # Row by row: `Dataset.from_generator` would keep a second copy in the user's home.
    with ArrowWriter(path=str(raw / "rows.arrow"), features=columns) as writer:
        for example in examples:
            lengths.append(len(example.ids))
            # A file's name may be of bytes that are no UTF-8.
            origin = example.origin.encode("utf-8", "backslashreplace").decode()
            row = {"input_ids": example.ids, "loss_mask": example.mask, "origin": origin}
            writer.write(row | ({"source_ids": example.source} if sources else {}))
        writer.finalize()
    if lengths:
        with _without_bars():
            datasets.Dataset.from_file(str(raw / "rows.arrow")).save_to_disk(str(partial))
    shutil.rmtree(raw)
    return lengths


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hold back the bars of datasets: what is written here was counted by ours."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _stats(
    counts: Counter, rejects: list[Reject], conversations: int, started: float
) -> dict[str, int | float]:
    names = ("rows", "tokens", "supervised", "truncated", "unended")
    dropped = ("dropped_short", "dropped_unsupervised")
    return {
        "conversations": conversations,
        **{name: counts[name] for name in (*names, *dropped)},
        "rejected": len(rejects),
        "seconds": round(time.monotonic() - started, 3),
    }


def _finish(partial: Path, directory: Path, meta: dict[str, Any], rejects: list[Reject]) -> None:
    """Write the books, then rename the folder: from then on it is atomic."""
    lines = (json.dumps(dataclasses.asdict(reject), ensure_ascii=False) for reject in rejects)
    text = "".join(f"{line}\n" for line in lines)
    # Half a surrogate pair, as a broken row may hold, is left as JSON writes it.
    (partial / REJECTS).write_text(text, "utf-8", "backslashreplace")
    write_sealed(partial / "meta.json", meta)
    atomic.sync_tree(partial)
    partial.rename(directory)
