"""Making a token cache: conversations are rendered, cut, masked and written as an Arrow dataset.

    cache = build_tokens(recipe, tokenizer)     # opens cache/tokens-<hash> when it is there

The hash covers the contents of the sources, the tokenizer with its template, every setting that
changes a row and, when the target rewrites the answers, the target. A cache is written under
another name and renamed when whole, so a folder that exists is complete.
"""

import dataclasses
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specdraft.data import atomic, fingerprint
from specdraft.data.answers import Generate
from specdraft.data.chat import Reject, split_holdout
from specdraft.data.lock import building_lock
from specdraft.data.ranks import ALONE, Ranks
from specdraft.data.regenerate import Rewriter
from specdraft.data.renderer import Example, check_rendered, renderer_of
from specdraft.data.sealed import write_sealed
from specdraft.data.sources import Source, each_source
from specdraft.data.store.tokens import REJECTS, TokenCache
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

# Of a cache's settings, those that tell whose answers it holds.
ANSWERING = ("target", "config", "target_dtype", "tokenizer", "server_model")
VERSION = 1  # of the layout; another one is another cache
MIN_TOKENS = 8  # a shorter row has next to nothing to draft, and caches need not depend on k
_ROW = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "origin": datasets.Value("string"),
    }
)


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
        target = {name: settings.get(name) for name in ANSWERING}
        rewriter = Rewriter(renderer, corpus.conversations, partial, target)
        rewriter.run(generate, ranks)
        ranks.wait()
    if ranks.is_first:
        conversations = corpus.conversations
        partial.mkdir(parents=True, exist_ok=True)  # what fails here is told before a bar begins
        if rewriter:
            examples = rewriter.examples()
        else:
            examples = renderer.examples(tqdm(conversations, "tokens", unit="conversation"))
        counts, digest = Counter(), hashlib.sha256()
        rows = _learnable(examples, recipe.data.max_length, settings["min_tokens"], counts)
        rows = _hashed(rows, digest)
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
    """Yield rows, and add their tokens and masks, but not their origins, to a digest."""
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
    """Hide the bars of datasets: ours has shown these rows already."""
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
    """Write rejects and meta.json, then rename the folder: only now is it a cache."""
    lines = (json.dumps(dataclasses.asdict(reject), ensure_ascii=False) for reject in rejects)
    text = "".join(f"{line}\n" for line in lines)
    # Half a surrogate pair, as a broken row may hold, is left as JSON writes it.
    (partial / REJECTS).write_text(text, "utf-8", "backslashreplace")
    write_sealed(partial / "meta.json", meta)
    atomic.sync_tree(partial)
    partial.rename(directory)
