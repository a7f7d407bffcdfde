"""How a feature cache lies on the disk: features of which tokens, in which numbers and files.

    storage = Storage.of(recipe.data)
    kept = storage.kept(loss_mask)             # [T] bool
    tensors = storage.encode(features[kept])   # {"features": [M, H]}; of one byte also "scales" [M]
    features = decode(tensors)                 # [M, H]

A value of one byte is a float8 (e4m3fn) or an int8, and each token has a float32 scale s (one for
its feature, and one for each layer of a wide feature):

    q = round(f / s),    s = max |f| / Q,    Q = 448 (float8) or 127 (int8)

so an int8 is off by at most s / 2, and a float8 by 2^-4 of itself, or 2^-10 s where it is small.

A shard is a safetensors file of whole rows, one behind the other: `input_ids` [N] int32,
`loss_mask` [N] bool, `features` [M, H] and perhaps `scales` [M]. manifest.json names it when it is
whole: a shard that no manifest names does not exist, whatever the folder holds after a crash.

Shapes: T tokens of a row, N of a shard, M of them with a stored feature, H hidden. With n layers
(models/feature_layers.py) it is (1 + n) * H everywhere, and `scales` is [M, 1 + n].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from specdraft.data import atomic
from specdraft.data.sealed import read_sealed
from specdraft.data.store.tokens import TokenCache
from specdraft.models.feature_layers import Layers
from specdraft.recipes.errors import CacheError, in_a_line
from specdraft.recipes.schema import DataSection

MANIFEST = "manifest.json"
SHARD_BYTES = 64 << 20
_MAX_SHARDS = 1024  # a larger cache gets larger shards
_MASK_AND_ID_BYTES = 5  # per token: bool + int32

TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST = {"float8": 448.0, "int8": 127.0}  # Q; the others need no scale
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Storage:
    """How features are stored: in which numbers, of which tokens, with which layers."""

    dtype: str
    context: int | None = None  # see `kept`
    layers: Layers = ()  # beside the last feature

    @classmethod
    def of(cls, data: DataSection) -> "Storage":
        """Read a recipe's storage."""
        return cls(data.feature_dtype, data.feature_context, data.feature_layers)

    @classmethod
    def of_settings(cls, settings: dict[str, Any]) -> "Storage":
        """Read the storage of a cache that exists from its settings."""
        layers = tuple(settings.get("layers", ()))
        return cls(settings["dtype"], settings.get("context"), layers)

    def settings(self) -> dict[str, Any]:
        """Return what the settings of a cache say of it."""
        context = {} if self.context is None else {"context": self.context}
        layers = {"layers": list(self.layers)} if self.layers else {}
        return {"dtype": self.dtype, **context, **layers}

    @property
    def parts(self) -> int:
        """How many vectors of H a feature has: itself and the layers."""
        return 1 + len(self.layers)

    @property
    def eps(self) -> float:
        """The relative step between stored numbers; of int8, as a share of the largest."""
        dtype = TYPES[self.dtype]
        return torch.finfo(dtype).eps if dtype.is_floating_point else 1 / LARGEST[self.dtype]

    def token_bytes(self, hidden_size: int) -> int:
        """Return the size of one stored feature."""
        part = hidden_size * TYPES[self.dtype].itemsize + _SCALE_BYTES * (self.dtype in LARGEST)
        return self.parts * part

    def kept(self, loss_mask: Tensor) -> Tensor:
        """Return which tokens of a row [T] have a stored feature: [T] bool.

        With a context c, those with a supervised token among the next c; without, all. No loss
        reads a feature that has no supervised token behind it, so a context as long as the rows
        loses nothing. Nor does 1 for a student, which reads the feature before each supervised
        token, or D + 1 for D Medusa heads. A SAR head reads all before them: for it, a
        shorter context is an approximation.
        """
        if self.context is None:
            return torch.ones_like(loss_mask)
        before = torch.nn.functional.pad(loss_mask.cumsum(0), (1, 0))  # [T + 1], supervised ones
        behind = torch.arange(len(loss_mask)) + 1
        return before[(behind + self.context).clamp(max=len(loss_mask))] > before[behind]

    def counts(self, tokens: TokenCache) -> list[int]:
        """Return how many features of every row are stored."""
        if self.context is None:
            return tokens.lengths
        return [int(self.kept(mask).sum()) for mask in tokens.masks()]

    def spread(self, features: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the stored features [M, H] of a row in their places [T, H], zeros elsewhere."""
        if self.context is None:
            return features
        whole = features.new_zeros(len(loss_mask), features.shape[-1])
        whole[self.kept(loss_mask)] = features
        return whole

    def read_back(self, features: Tensor, loss_mask: Tensor) -> Tensor:
        """Return a row's features [T, H] as a cache gives them back: on the CPU."""
        kept = features[self.kept(loss_mask).to(features.device)]
        return self.spread(decode(self.encode(kept)).cpu(), loss_mask)

    def encode(self, features: Tensor) -> dict[str, Tensor]:
        """Return what a shard holds of features [M, H]."""
        dtype = TYPES[self.dtype]
        if self.dtype not in LARGEST:
            return {"features": features.to(dtype)}
        parts = features.float().unflatten(-1, (self.parts, -1))
        # A feature of zeros has a scale, too, or it would be 0 / 0.
        scales = (parts.abs().amax(-1) / LARGEST[self.dtype]).clamp(min=torch.finfo().tiny)
        values = (parts / scales[..., None]).flatten(1)
        values = values.round() if dtype is torch.int8 else values
        return {"features": values.to(dtype), "scales": scales if self.layers else scales[:, 0]}


def decode(tensors: dict[str, Tensor]) -> Tensor:
    """Return what `encode` was given: a copy [M, H], in float32 where there are scales."""
    features = tensors["features"]
    if "scales" in tensors:
        scales = tensors["scales"].unsqueeze(-1)  # [M, 1], with layers [M, 1 + n, 1]
        parts = features.float().unflatten(-1, (*scales.shape[1:-1], -1))
        return (parts * scales).flatten(1)
    return features.clone()


def feature_bytes(tokens: int, kept: int, hidden_size: int, storage: Storage) -> int:
    """Return the size on disk of a feature cache, known before anything runs.

    kept: how many of the tokens have a stored feature.
    """
    return tokens * _MASK_AND_ID_BYTES + kept * storage.token_bytes(hidden_size)


def check_disk(directory: Path, count: int, needed: int, dtype: str) -> None:
    """Raise CacheError, which states the shortfall, where the disk cannot hold a cache.

    dtype: of the features; the error names smaller ones.
    """
    free, told = atomic.free_bytes(directory), atomic.of_bytes
    if needed > free:
        size = TYPES[dtype].itemsize
        smaller = [name for name in ("bfloat16", "int8") if TYPES[name].itemsize < size]
        key = f"feature_dtype={' or '.join(smaller)}" if smaller else "features=online"
        raise CacheError(
            f"out of disk: the features of {count} tokens need {told(needed)} and "
            f"{directory.parent} has {told(free)} free, {told(needed - free)} short; set "
            f"data.{key}, a lower data.limit or another data.cache_dir"
        )


def plan_shards(
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
    """Write one shard and return its manifest entry: file, bytes, sha256.

    Raises CacheError, which states the shortfall, when the disk is full.
    """
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with atomic.written_whole(directory / name, needed) as partial:
        partial.touch()
        readers = partial.stat().st_mode  # safetensors would have its owner alone read it
        safetensors.torch.save_file(tensors, partial)
        partial.chmod(readers)
    return atomic.describe(directory / name)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest. Raises CacheError when it is missing or damaged."""
    try:
        return read_sealed(path)
    except FileNotFoundError:
        raise CacheError(
            f"no feature cache at {path.parent}; build it with: "
            "accelerate launch data/cache.py RECIPE"
        ) from None
    except ValueError as error:
        raise CacheError(
            f"{path} is damaged ({error}); delete {path.parent} and run again"
        ) from error


@contextmanager
def of_one_shape(directory: Path) -> Iterator[None]:
    """Raise CacheError where a manifest lacks, or has of another kind, what is asked of it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CacheError(
            f"{directory / MANIFEST} is damaged ({in_a_line(error, kind=True)}); delete "
            f"{directory} and run again"
        ) from error
