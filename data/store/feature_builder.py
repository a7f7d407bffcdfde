"""Making a feature cache: the frozen target runs once over the rows of a token cache.

    cache = build_features(recipe, tokens, target)     # goes on where an earlier run stopped

Rows are sorted by length, longest first (what does not fit into memory fails at once), and cut into
shards; shard s is made by rank s mod world. The plan follows from the token cache alone, so a
killed run goes on with the shards that no manifest names yet, with any number of processes. Rank 0
keeps manifest.json, each other rank its own; rank 0 merges them and marks the cache complete.

Shapes: N tokens of a shard, M of them with a stored feature, H hidden.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.data import atomic, fingerprint
from specdraft.data.lock import building_lock
from specdraft.data.ranks import ALONE, Ranks
from specdraft.data.sealed import write_sealed
from specdraft.data.store import storage
from specdraft.data.store.feature_cache import FeatureCache, check_settings
from specdraft.data.store.features import (
    BATCH_TOKENS,
    batches,
    check_context,
    deviation,
    moments,
    read_features,
    squares,
    summed,
)
from specdraft.data.store.shard_buffer import ShardBuffer
from specdraft.data.store.tokens import TokenCache
from specdraft.models.target import Target
from specdraft.recipes.errors import CacheError
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.schema import Recipe

VERSION = 1  # of the layout; another one is another cache
Announce = Callable[[int, int], None]  # called with the tokens and the bytes still to be made
Plan = dict[str, list[int]]  # rows by the number of their shard


def feature_settings(recipe: Recipe, tokens: TokenCache, target: Target) -> dict[str, Any]:
    """Return everything that decides the contents; its hash names the cache."""
    return {
        "version": VERSION,
        "weights": target.identity()["weights"],
        "config": target.identity()["config"],
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokens.meta["settings"]["tokenizer"],
        "template": tokens.meta["settings"]["template"],
        "tokens": tokens.key,
        **storage.Storage.of(recipe.data).settings(),
    }


def build_features(
    recipe: Recipe,
    tokens: TokenCache,
    target: Target,
    ranks: Ranks = ALONE,
    announce: Announce | None = None,
    batch_tokens: int = BATCH_TOKENS,
    shard_bytes: int = storage.SHARD_BYTES,
) -> FeatureCache:
    """Open the feature cache of a recipe, or make what is missing of it first.

    All ranks must call this. A forward takes at most `batch_tokens` tokens with padding. Before the
    first one, `announce` is called on rank 0.
    Raises: CacheError (disk too small, damaged, made from something else), DataError.
    """
    settings, stored = feature_settings(recipe, tokens, target), storage.Storage.of(recipe.data)
    directory = Path(recipe.data.cache_dir) / f"features-{fingerprint.of_settings(settings)}"
    check_context(tokens, target)
    kept = stored.counts(tokens)
    plan = storage.plan_shards(tokens.lengths, kept, target.hidden_size, stored, shard_bytes)
    if not ranks.share(_is_finished(directory, settings, plan)):
        target.check_runs()
        with building_lock(directory, ranks):
            # Another run may have built it meanwhile.
            if ranks.share(not _is_finished(directory, settings, plan)):
                builder = _Builder(directory, settings, plan, tokens, target, ranks, stored)
                builder.build(kept, announce, batch_tokens)
    return FeatureCache.open(directory, settings)


@dataclass(frozen=True)
class _Builder:
    """Makes the shards of a cache that are missing; every rank has one."""

    directory: Path
    settings: dict[str, Any]
    plan: Plan
    tokens: TokenCache
    target: Target
    ranks: Ranks
    storage: storage.Storage

    def build(self, kept: list[int], announce: Announce | None, batch_tokens: int) -> None:
        """Make this rank's share; the first one announces, and completes the manifest.

        kept: the stored features of each row. Raises: CacheError, DataError.
        """
        tokens, target, ranks = self.tokens, self.target, self.ranks
        manifest = {
            "version": VERSION,
            "complete": False,
            "settings": self.settings,
            "target": target.identity(),
            "quantisation": None,
            "hidden_size": target.hidden_size,
            "lengths": tokens.lengths,
            "kept": kept,
            "shards": (done := _shards_on_disk(self.directory, self.settings, self.plan)),
        }
        ranks.wait()  # nobody writes before everybody has looked
        todo = {number: rows for number, rows in self.plan.items() if number not in done}
        rows = [row for part in todo.values() for row in part]
        count, stored = (sum(sizes[row] for row in rows) for sizes in (tokens.lengths, kept))
        size = storage.feature_bytes(count, stored, target.hidden_size, self.storage)
        needed = size + len(todo) * 4096
        storage.check_disk(self.directory, count, needed, self.storage.dtype)
        if announce and ranks.is_first:
            announce(count, size)
        self.directory.mkdir(parents=True, exist_ok=True)
        mine = {n: rows for n, rows in todo.items() if int(n) % ranks.world == ranks.rank}
        self._write(manifest, mine, batch_tokens)
        ranks.wait()
        if ranks.is_first:
            self._merge(manifest)
        ranks.wait()

    def _write(self, manifest: dict[str, Any], mine: Plan, batch_tokens: int) -> None:
        """Make shards, naming each in this rank's manifest when it is whole."""
        name = storage.MANIFEST if self.ranks.is_first else f"manifest-{self.ranks.rank}.json"
        own = self.directory / name
        write_sealed(own, manifest)
        total = sum(self.tokens.lengths[row] for rows in mine.values() for row in rows)
        quiet, named = not self.ranks.is_first, manifest["shards"]

        def keep(number: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
            file = f"shard-{int(number):05d}.safetensors"
            named[number] = storage.write_shard(self.directory, file, tensors) | facts
            write_sealed(own, manifest)

        # A shard goes to the disk in a thread, while the next one is computed in the other buffer.
        buffers = cycle([ShardBuffer(self.target.device) for _ in range(2)])
        with (
            tqdm(total=total, desc="features", unit="token", unit_scale=True, disable=quiet) as bar,
            keeping(lambda: f"{len(named)} shards of features are kept"),
            ThreadPoolExecutor(1, "shards") as writer,
        ):
            written = None
            for number, rows in mine.items():
                room = sum(manifest["kept"][row] for row in rows)
                shard, found = self._shard(rows, batch_tokens, bar, next(buffers), room)
                if written:
                    written.result()
                written = writer.submit(keep, number, shard, {"rows": rows, **found})
            if written:
                written.result()

    @torch.inference_mode()
    def _shard(
        self, rows: list[int], batch_tokens: int, bar: tqdm, buffer: ShardBuffer, room: int
    ) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
        """Compute the tensors of one shard, and the moments of features, errors and embeddings.

        room: tokens with a stored feature, which `buffer` holds."""
        ids, masks, found, errors = [], [], [], []
        layers, last = self.storage.layers, slice(self.target.hidden_size)
        for batch in batches(rows, self.tokens.room, batch_tokens):
            for item, features in read_features(self.target, self.tokens, batch, layers):
                kept = features[self.storage.kept(item["loss_mask"]).to(self.target.device)]
                encoded = self.storage.encode(kept)  # of [M, H]
                buffer.add(encoded, room)
                found.append(moments(features[:, last]))
                lost = storage.decode(encoded) - kept
                errors.append((squares(lost[:, last]), squares(kept[:, last])))
                ids.append(item["input_ids"])
                masks.append(item["loss_mask"])
                bar.update(len(features))
        tensors = {
            "input_ids": torch.cat(ids).int(),  # [N]
            "loss_mask": torch.cat(masks),  # [N]
            **buffer.take(),
        }
        embedded = self.target.embed(tensors["input_ids"].long().to(self.target.device))
        return tensors, {
            "feature_moments": summed(found),
            "error_moments": summed(errors),
            "embed_moments": moments(embedded),
        }

    def _merge(self, manifest: dict[str, Any]) -> None:
        """Join the manifests of all ranks and mark the cache complete."""
        entries = _shards_on_disk(self.directory, self.settings, self.plan)
        if len(entries) < len(self.plan):
            raise CacheError(
                f"{len(self.plan) - len(entries)} of {len(self.plan)} shards of {self.directory} "
                "were not written; run again to go on"
            )
        manifest["shards"] = {number: entries[number] for number in self.plan}
        ordered = manifest["shards"].values()  # however many ranks made them
        manifest |= {
            "feature_scale": deviation(part["feature_moments"] for part in ordered),
            "embed_scale": deviation(part["embed_moments"] for part in ordered),
            "quantisation": _quantisation(self.settings["dtype"], ordered),
            "complete": True,
        }
        write_sealed(self.directory / storage.MANIFEST, manifest)
        for path in self.directory.glob("manifest-*.json"):
            path.unlink()


def _is_finished(directory: Path, settings: dict[str, Any], plan: Plan) -> bool:
    path = directory / storage.MANIFEST
    return (
        len(_shards_on_disk(directory, settings, plan)) == len(plan)
        and path.exists()
        and storage.read_manifest(path)["complete"]
    )


def _shards_on_disk(directory: Path, settings: dict[str, Any], plan: Plan) -> dict[str, dict]:
    """Collect the shards that some manifest names, that are there and that fit the plan."""
    found = {}
    for path in sorted(directory.glob("manifest*.json")):
        manifest = storage.read_manifest(path)
        with storage.of_one_shape(directory):
            check_settings(directory, manifest, settings)
            for number, entry in manifest["shards"].items():
                missing = not (directory / entry["file"]).exists()
                torn = not manifest["complete"] and atomic.damage(directory, entry, checksum=False)
                if entry["rows"] == plan.get(number) and not missing and not torn:
                    found[number] = entry
    return found


def _quantisation(dtype: str, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that features are stored in, and the error ||f - stored f|| / ||f||."""
    # Shards that an earlier version made say nothing of their errors.
    errors, squares = summed(part.get("error_moments", (0.0, 0.0)) for part in parts)
    return {
        "format": dtype,
        "scale": "token" if dtype in storage.LARGEST else None,  # what has one of its own
        "error": math.sqrt(errors / squares) if squares else None,
    }
