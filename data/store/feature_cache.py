"""The feature cache: what the frozen target said of every token of a token cache, kept on disk.

    cache = FeatureCache.open("cache/features-0123456789ab")
    cache[0]        # {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}

With data.feature_layers, features are wide: [T, (1 + n) * H], as models/feature_layers.py has them.

cache/features-<hash>/ holds shards and manifest.json (see storage.py): the target with the hash of
its weights, tokenizer and template, dtype, quantisation with its measured error, lengths, and per
shard its rows and checksum. Row i is row i of the token cache; features that are not stored are
read as zeros. Reading is lazy and memory-mapped. feature_builder.py makes a cache.

Shapes: T tokens of a row, H hidden.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from specdraft.data import atomic
from specdraft.data.store import storage
from specdraft.data.store.features import OnlineFeatures, made_from
from specdraft.data.store.read_ahead import first_bytes, read_ahead
from specdraft.models.feature_layers import cache_command
from specdraft.recipes.errors import CacheError

STORED = ("features", "scales")  # of a token whose feature is kept; scales where it is quantised


class FeatureCache:
    """Rows of tokens, loss mask and features, memory-mapped."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.storage = storage.Storage.of_settings(manifest["settings"])
        self.key = made_from(manifest["settings"])
        self.lengths: list[int] = manifest["lengths"]
        self.kept: list[int] = manifest.get("kept", self.lengths)  # stored features of each row
        self._open: dict[str, dict[str, Tensor]] = {}
        self._layouts: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[int, tuple[str, int, int]] = {}  # file, first token, first feature
        for entry in manifest["shards"].values():
            token = feature = 0
            for row in entry["rows"]:
                self._places[row] = (entry["file"], token, feature)
                token += self.lengths[row]
                feature += self.kept[row]

    @classmethod
    def open(
        cls, directory: str | Path, expect: dict[str, Any] | None = None, verify: bool | None = None
    ) -> "FeatureCache":
        """Open a finished cache and check it.

        `expect` is what the recipe wants (see `feature_settings`). Sizes are always checked,
        checksums with `verify`, or unasked (None) up to 2 GiB.
        Raises: CacheError when it is missing, unfinished, damaged or made from something else.
        """
        directory = Path(directory)
        manifest = storage.read_manifest(directory / storage.MANIFEST)
        with storage.of_one_shape(directory):
            check_settings(directory, manifest, expect or {})
            complete, cache = manifest["complete"], cls(directory, manifest)
            entries = [*manifest["shards"].values()]
            if complete and cache._places.keys() != {*range(len(cache))}:
                raise LookupError("rows that no shard has")
            found = complete and atomic.first_damage(directory, entries, verify)
        if not complete:
            raise CacheError(
                f"the feature cache at {directory} is not finished ({len(entries)} shards "
                "so far); go on with: accelerate launch data/cache.py RECIPE"
            )
        if found:
            raise CacheError(
                f"the shard {' '.join(found)}; delete that file and run again: only it is made anew"
            )
        return cache

    @property
    def scales(self) -> dict[str, float]:
        """Standard deviations of the target's embeddings and features, {"embed_scale", ..}."""
        return {name: self.manifest[name] for name in ("embed_scale", "feature_scale")}

    def answers(self) -> Iterator[Tensor]:
        """Yield the supervised tokens of every shard, [..]."""
        for entry in self.manifest["shards"].values():
            shard = self._tensors(entry["file"])
            yield shard["input_ids"][shard["loss_mask"].bool()]

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
        features = storage.decode({name: shard[name][stored] for name in STORED if name in shard})
        return {
            "input_ids": shard["input_ids"][tokens].long(),
            "loss_mask": loss_mask,
            "features": self.storage.spread(features, loss_mask),
        }

    def will_read(self, indices: Iterable[int]) -> None:
        """Have the system begin to fetch the features of some rows, which are read next."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for index in indices:
            file, _, feature = self._places[index]
            for first, each in self._layout(file):
                spans.setdefault(file, []).append((first + feature * each, self.kept[index] * each))
        for file, wanted in spans.items():
            read_ahead(self.directory / file, wanted)

    def _layout(self, file: str) -> list[tuple[int, int]]:
        """First byte in the file, and bytes of a token, of all that a shard has of features."""
        if file not in self._layouts:
            shard, begins = self._tensors(file), first_bytes(self.directory / file)
            self._layouts[file] = [
                (begins[name], shard[name][:1].nbytes) for name in STORED if name in shard
            ]
        return self._layouts[file]

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
        if name == "layers":
            raise CacheError(
                f"the feature cache at {directory} has layers {found or []} of the target, and "
                f"{wanted} are wanted; add them with: {cache_command(wanted)}"
            )
        raise CacheError(
            f"the feature cache at {directory} was made with {name} {found}, "
            f"and the recipe wants {wanted}; delete it or set another data.cache_dir"
        )


Features = FeatureCache | OnlineFeatures  # what heads are trained on
