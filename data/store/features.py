"""The feature cache: one pass of the frozen target over the token cache, kept on disk.

    cache = build_features(recipe, tokens, target)     # goes on where an earlier run stopped
    cache[0]        # {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}

Rows are sorted by length, longest first (what does not fit into memory fails at once), cut into
shards, and shard s is made by rank s mod world. The plan depends on nothing but the token cache,
so a run that was killed goes on with the shards that the manifest does not name yet, whatever the
number of processes. Rank 0 keeps manifest.json, every other rank a manifest of its own; rank 0
merges them at the end and marks the cache complete.

Shapes: B rows of a forward, T tokens (longest row), H hidden, N tokens of a shard.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.data import fingerprint, whole
from specdraft.data.store import shards
from specdraft.data.store.feature_cache import VERSION, FeatureCache, check_settings
from specdraft.data.store.storage import LARGEST, Storage, decode
from specdraft.data.store.tokens import TokenCache
from specdraft.models.target import Target
from specdraft.recipes.errors import CacheError, DataError
from specdraft.recipes.schema import Recipe

BATCH_TOKENS = 8192  # of a forward, padding included
SAMPLE_TOKENS = 1 << 15  # that scales are measured on where no cache is made


Announce = Callable[[int, int], None]  # told the tokens and the bytes that are still to be made


def unannounced(tokens: int, size: int) -> None:
    """Tell nobody."""


def feature_settings(recipe: Recipe, tokens: TokenCache, target: Target) -> dict[str, Any]:
    """Return everything that decides the contents; its hash names the cache."""
    return {
        "version": VERSION,
        "weights": target.identity()["weights"],
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokens.meta["settings"]["tokenizer"],
        "template": tokens.meta["settings"]["template"],
        "tokens": tokens.key,
        **Storage.of(recipe.data).settings(),
    }


def build_features(
    recipe: Recipe,
    tokens: TokenCache,
    target: Target,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    announce: Announce = unannounced,
    batch_tokens: int = BATCH_TOKENS,
    shard_bytes: int = shards.SHARD_BYTES,
) -> FeatureCache:
    """Open the feature cache of a recipe, or make what is missing of it first.

    All ranks must call this. A forward takes at most `batch_tokens` tokens with padding. Before the
    first one, `announce` is told on rank 0 how many tokens and bytes are missing.
    Raises: CacheError (disk too small, damaged, made from something else), DataError.
    """
    settings, storage = feature_settings(recipe, tokens, target), Storage.of(recipe.data)
    directory = Path(recipe.data.cache_dir) / f"features-{fingerprint.of_settings(settings)}"
    check_context(tokens, target)
    kept = storage.counts(tokens)
    plan = shards.plan(tokens.lengths, kept, target.hidden_size, storage, shard_bytes)
    done = _shards_on_disk(directory, settings, plan)
    finished = _is_complete(directory) and len(done) == len(plan)
    barrier()  # nobody writes before everybody has looked
    if not finished:
        target.check_runs()
        manifest = {
            "version": VERSION,
            "complete": False,
            "settings": settings,
            "target": target.identity(),
            "quantisation": None,
            "hidden_size": target.hidden_size,
            "lengths": tokens.lengths,
            "kept": kept,
            "shards": done,
        }
        todo = {number: rows for number, rows in plan.items() if number not in done}
        rows = [row for part in todo.values() for row in part]
        count, stored = (sum(sizes[row] for row in rows) for sizes in (tokens.lengths, kept))
        size = shards.feature_bytes(count, stored, target.hidden_size, storage)
        _check_disk(directory, count, size + len(todo) * 4096)
        if rank == 0:
            announce(count, size)
        directory.mkdir(parents=True, exist_ok=True)
        mine = {number: rows for number, rows in todo.items() if int(number) % world == rank}
        _extract(directory, manifest, mine, tokens, target, rank, batch_tokens)
        barrier()
        if rank == 0:
            _merge(directory, manifest, settings, plan)
        barrier()
    return FeatureCache.open(directory, settings)


def _shards_on_disk(
    directory: Path, settings: dict[str, Any], plan: dict[str, list[int]]
) -> dict[str, dict]:
    """Collect the shards that some manifest names, that are there and that fit the plan."""
    found = {}
    for path in sorted(directory.glob("manifest*.json")):
        manifest = shards.read_manifest(path)
        check_settings(directory, manifest, settings)
        for number, entry in manifest["shards"].items():
            missing = not (directory / entry["file"]).exists()
            torn = not manifest["complete"] and whole.damage(directory, entry, checksum=False)
            if entry["rows"] == plan.get(number) and not missing and not torn:
                found[number] = entry
    return found


def _is_complete(directory: Path) -> bool:
    path = directory / shards.MANIFEST
    return path.exists() and shards.read_manifest(path)["complete"]


def check_context(tokens: TokenCache, target: Target) -> None:
    """Raise DataError when a row is longer than what the target was made for."""
    context = getattr(target.config, "max_position_embeddings", None)
    longest = max(tokens.lengths)
    if context is not None and longest > context:
        raise DataError(
            f"a row has {longest} tokens and {target.name} has a context of {context}; "
            f"set data.max_length={context}"
        )


def _check_disk(directory: Path, count: int, needed: int) -> None:
    """Refuse to start what the disk cannot hold. Raises CacheError that states the shortfall."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        gib = 1 << 30
        raise CacheError(
            f"out of disk: the features of {count} tokens need {needed / gib:.2f} GiB and "
            f"{directory.parent} has {free / gib:.2f} GiB free, {(needed - free) / gib:.2f} GiB "
            "short; set data.feature_dtype=bfloat16 or int8, a lower data.limit or another "
            "data.cache_dir"
        )


def _extract(
    directory: Path,
    manifest: dict[str, Any],
    mine: dict[str, list[int]],
    tokens: TokenCache,
    target: Target,
    rank: int,
    batch_tokens: int,
) -> None:
    """Make this rank's shards, naming each in the manifest when it is whole."""
    name = shards.MANIFEST if rank == 0 else f"manifest-{rank}.json"
    shards.write_manifest(directory, manifest, name)
    storage = Storage.of_settings(manifest["settings"])
    total = sum(manifest["lengths"][row] for rows in mine.values() for row in rows)
    with tqdm(total=total, desc="features", unit="token", unit_scale=True, disable=rank > 0) as bar:
        try:
            for number, rows in mine.items():
                tensors, moments = _shard(target, tokens, rows, storage, batch_tokens, bar.update)
                file = f"shard-{int(number):05d}.safetensors"
                entry = shards.write_shard(directory, file, tensors)
                manifest["shards"][number] = {**entry, "rows": rows, **moments}
                shards.write_manifest(directory, manifest, name)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; {len(manifest['shards'])} shards of features are kept: "
                "the same command goes on from there"
            ) from None


@torch.inference_mode()
def _shard(
    target: Target,
    tokens: TokenCache,
    rows: list[int],
    storage: Storage,
    batch_tokens: int,
    count: Callable[[int], object] = lambda tokens: None,
) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """Compute the tensors of one shard, and the moments of features, errors and embeddings."""
    ids, masks, stored, moments, errors = [], [], [], [], []
    for batch in batches(rows, tokens.lengths, batch_tokens):
        for item, features in read_features(target, tokens, batch):
            kept = features[storage.kept(item["loss_mask"]).to(target.device)]  # [M, H]
            encoded = storage.encode(kept)
            stored.append({name: tensor.cpu() for name, tensor in encoded.items()})
            moments.append(_moments(features))
            errors.append((_squares(decode(encoded) - kept), _squares(kept)))
            ids.append(item["input_ids"])
            masks.append(item["loss_mask"])
            count(len(features))
    tensors = {
        "input_ids": torch.cat(ids).int(),  # [N]
        "loss_mask": torch.cat(masks),  # [N]
        **{name: torch.cat([part[name] for part in stored]) for name in stored[0]},
    }
    embedded = target.embed(tensors["input_ids"].long().to(target.device))
    return tensors, {
        "feature_moments": _summed(moments),
        "error_moments": _summed(errors),
        "embed_moments": _moments(embedded),
    }


def batches(rows: list[int], lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Cut rows that are sorted by length, longest first, into batches of one forward each."""
    while rows:
        count = max(1, batch_tokens // lengths[rows[0]])
        yield rows[:count]
        rows = rows[count:]


def read_features(
    target: Target, tokens: TokenCache, rows: list[int]
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Read rows and run the target over them, in one forward.

    Yields {"input_ids": [T] int64, "loss_mask": [T] bool} of each and its features [T, H], which
    lie where the target does. Raises: DataError when a feature is not finite.
    """
    items = [tokens[row] for row in rows]
    # No attention mask: attention is causal, so padding on the right is seen by nobody.
    hidden = target.features(pad(items).to(target.device))  # [B, T, H]
    for line, item, row in zip(hidden, items, rows, strict=True):
        features = line[: len(item["input_ids"])]
        if not features.isfinite().all():
            raise DataError(
                f"{target.name} computes NaN or infinity for {tokens.origin(row)} in "
                f"{target.dtype}; set target.dtype=float32 or bfloat16"
            )
        yield item, features


def pad(items: list[dict[str, Tensor]]) -> Tensor:
    """Return the ids of rows, padded on the right: [B, T]."""
    width = max(len(item["input_ids"]) for item in items)
    padded = torch.zeros(len(items), width, dtype=torch.long)
    for line, item in zip(padded, items, strict=True):
        line[: len(item["input_ids"])] = item["input_ids"]
    return padded


def sample_scales(
    tokens: TokenCache, target: Target, sample: int = SAMPLE_TOKENS
) -> dict[str, float]:
    """Measure the scales of `FeatureCache.scales` on about `sample` tokens: every n-th row.

    They are those of the cache where the sample is the whole of it.
    """
    every = -(-sum(tokens.lengths) // sample)
    rows = sorted(range(0, len(tokens), every), key=tokens.lengths.__getitem__, reverse=True)
    return _scales([_shard(target, tokens, rows, Storage("float32"), BATCH_TOKENS)[1]])


def _moments(values: Tensor) -> list[float]:
    """Return count, sum and sum of squares."""
    return [values.numel(), values.sum(dtype=torch.float64).item(), _squares(values)]


def _squares(values: Tensor) -> float:
    return values.float().square().sum(dtype=torch.float64).item()


def _summed(moments: Iterable[Sequence[float]]) -> list[float]:
    return [sum(values) for values in zip(*moments, strict=True)]


def _merge(
    directory: Path, manifest: dict[str, Any], settings: dict[str, Any], plan: dict[str, list[int]]
) -> None:
    """Join the manifests of all ranks and mark the cache complete."""
    entries = _shards_on_disk(directory, settings, plan)
    if len(entries) < len(plan):
        raise CacheError(
            f"{len(plan) - len(entries)} of {len(plan)} shards of {directory} were not written; "
            "run again to go on"
        )
    manifest["shards"] = {number: entries[number] for number in plan}
    ordered = manifest["shards"].values()  # however many ranks made them
    manifest |= _scales(ordered) | {"quantisation": _quantisation(settings["dtype"], ordered)}
    shards.write_manifest(directory, manifest | {"complete": True})
    for path in directory.glob("manifest-*.json"):
        path.unlink()


def _scales(parts: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the standard deviations of what has these moments, taken together."""
    parts, scales = list(parts), {}
    for name, scale in (("feature_moments", "feature_scale"), ("embed_moments", "embed_scale")):
        count, total, squares = _summed(part[name] for part in parts)
        scales[scale] = math.sqrt(max(squares / count - (total / count) ** 2, 0.0))
    return scales


def _quantisation(dtype: str, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """In which numbers features are stored, and the error ||f - stored f|| / ||f||."""
    # The shards of a cache that an earlier version began say nothing of their errors.
    errors, squares = _summed(part.get("error_moments", (0.0, 0.0)) for part in parts)
    return {
        "format": dtype,
        "scale": "token" if dtype in LARGEST else None,  # what has one of its own
        "error": math.sqrt(errors / squares) if squares else None,
    }
