"""Reading a feature cache: what the frozen target knows at every token (built by features.py).

    cache = FeatureCache.open("cache/features-0123456789ab")
    cache[0]        # {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}

cache/features-<hash>/ holds safetensors shards and manifest.json (see shards.py): the target with
the hash of its weights, tokenizer and template, dtype, quantisation with its measured error,
lengths, and per shard its rows and checksum. Row i is row i of the token cache; features that are
not stored (see storage.py) are read as zeros. Reading is lazy and memory-mapped.

Shapes: T tokens of a row, N tokens of a shard, H hidden.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from specdraft.data import whole
from specdraft.data.store import shards
from specdraft.data.store.storage import Storage, decode
from specdraft.recipes.errors import CacheError

VERSION = 1  # of the layout; another one is another cache


class FeatureCache:
    """Rows of tokens, loss mask and features, memory-mapped."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.storage = Storage.of_settings(manifest["settings"])
        self.lengths: list[int] = manifest["lengths"]
        self.kept: list[int] = manifest.get("kept", self.lengths)  # stored features of each row
        self._open: dict[str, dict[str, Tensor]] = {}
        self._places: dict[int, tuple[str, int, int]] = {}  # file, first token, first feature
        for entry in manifest["shards"].values():
            token = feature = 0
            for row in entry["rows"]:
                self._places[row] = (entry["file"], token, feature)
                token += self.lengths[row]
                feature += self.kept[row]

    @classmethod
    def open(
        cls,
        directory: str | Path,
        expect: dict[str, Any] | None = None,
        verify: bool | None = None,
    ) -> "FeatureCache":
        """Open a finished cache and check it.

        `expect` is what the recipe wants (see `feature_settings`). Sizes are always checked,
        checksums with `verify`, or unasked (None) up to 2 GiB.
        Raises: CacheError when it is missing, unfinished, damaged or made from something else.
        """
        directory = Path(directory)
        manifest = shards.read_manifest(directory / shards.MANIFEST)
        check_settings(directory, manifest, expect or {})
        if not manifest["complete"]:
            raise CacheError(
                f"the feature cache at {directory} is not finished ({len(manifest['shards'])} "
                "shards so far); go on with: accelerate launch data/cache.py RECIPE"
            )
        entries = manifest["shards"].values()
        if verify is None:
            verify = sum(entry["bytes"] for entry in entries) <= whole.HASHED_AT_OPEN
        for entry in entries:
            if problem := whole.damage(directory, entry, verify):
                raise CacheError(
                    f"the shard {directory / entry['file']} {problem}; "
                    "delete that file and run again: only it is made anew"
                )
        return cls(directory, manifest)

    @property
    def scales(self) -> dict[str, float]:
        """Standard deviations of the target's embeddings and features, {"embed_scale", ..}."""
        return {name: self.manifest[name] for name in ("embed_scale", "feature_scale")}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}."""
        index = range(len(self))[index]  # IndexError past the end, negative from there
        file, token, feature = self._places[index]
        tokens = slice(token, token + self.lengths[index])
        stored = slice(feature, feature + self.kept[index])
        shard = self._tensors(file)
        loss_mask = shard["loss_mask"][tokens].clone()
        # A copy: whoever adds noise in place must not change what the next epoch reads.
        features = decode({n: shard[n][stored] for n in ("features", "scales") if n in shard})
        return {
            "input_ids": shard["input_ids"][tokens].long(),
            "loss_mask": loss_mask,
            "features": self.storage.spread(features, loss_mask),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Leave the mapped files behind when a reader is sent to another process."""
        return {**self.__dict__, "_open": {}}

    def _tensors(self, file: str) -> dict[str, Tensor]:
        """Map a shard; nothing is read before it is touched, and no file stays open."""
        if file not in self._open:
            with safe_open(self.directory / file, "pt") as shard:
                names = shard.keys()
                self._open[file] = {name: shard.get_tensor(name) for name in names}
        return self._open[file]


def check_settings(directory: Path, manifest: dict[str, Any], expect: dict[str, Any]) -> None:
    """Compare a manifest with what is wanted. Raises CacheError that names both sides."""
    for name, wanted in expect.items():
        found = manifest["settings"].get(name)
        if found == wanted:
            continue
        if name == "weights":
            found = f"{manifest['target']['name']} (weights {str(found)[:12]})"
            wanted = f"weights {wanted[:12]}"
        raise CacheError(
            f"the feature cache at {directory} was made with {name} {found}, "
            f"and the recipe wants {wanted}; delete it or set another data.cache_dir"
        )
