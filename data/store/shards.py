"""Shards of a feature cache on disk, and the manifest that says which of them exist.

A shard holds whole rows, one behind the other: `input_ids` [N] int32, `loss_mask` [N] bool,
`features` [M, H] and perhaps `scales` [M] of the tokens that have a feature (see storage.py). It is
written under a temporary name, flushed to the disk and renamed, and only then named in the
manifest, which is replaced in one move: a shard that the manifest does not name does not exist,
whatever the folder holds after a crash.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from specdraft.data.store.storage import Storage
from specdraft.data.whole import write_whole
from specdraft.recipes.errors import CacheError

MANIFEST = "manifest.json"
SHARD_BYTES = 64 << 20
_MAX_SHARDS = 1024  # a larger cache gets larger shards
_MASK_AND_ID_BYTES = 5  # per token: bool + int32


def feature_bytes(tokens: int, kept: int, hidden_size: int, storage: Storage) -> int:
    """Return the size on disk of a feature cache, known before anything runs.

    kept: how many of the tokens have a stored feature.
    """
    return tokens * _MASK_AND_ID_BYTES + kept * storage.token_bytes(hidden_size)


def plan(
    lengths: list[int], kept: list[int], hidden_size: int, storage: Storage, shard_bytes: int
) -> dict[str, list[int]]:
    """Cut the rows, longest first, into shards: number -> rows."""
    counts = zip(lengths, kept, strict=True)
    row_bytes = [feature_bytes(*row, hidden_size, storage) for row in counts]
    shard_bytes = max(shard_bytes, sum(row_bytes) // _MAX_SHARDS)
    cut, size = [[]], 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if cut[-1] and size + row_bytes[row] > shard_bytes:
            cut.append([])
            size = 0
        cut[-1].append(row)
        size += row_bytes[row]
    return {str(number): rows for number, rows in enumerate(cut)}


def write_shard(directory: Path, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write one shard and return its manifest entry: file, bytes, sha256."""
    content = safetensors.torch.save(tensors)
    write_whole(directory / name, content)
    return {
        "file": name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def write_manifest(directory: Path, manifest: dict[str, Any], name: str = MANIFEST) -> None:
    """Replace a manifest in one move."""
    write_whole(directory / name, json.dumps(manifest).encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest. Raises CacheError when it is missing or no JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CacheError(
            f"no feature cache at {path.parent}; build it with: "
            "accelerate launch data/cache.py RECIPE"
        ) from None
    except ValueError as error:
        raise CacheError(
            f"{path} is damaged ({error}); delete {path.parent} and run again"
        ) from error
