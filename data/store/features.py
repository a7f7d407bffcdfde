"""What the frozen target knows at every token: its features, as they are computed.

    rows = OnlineFeatures(recipe, tokens, target)
    rows[0]         # {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}

`OnlineFeatures` is what a `FeatureCache` (feature_cache.py) reads from disk, where no disk holds it
(data.features=online). The numbers are the cache's, up to the rounding of a forward with other
neighbours: bit for bit where the same rows share a forward. Training reads a step ahead in a
thread: the target runs beside the drafter.

Shapes: B rows of a forward, T tokens (longest row), H hidden; (1 + n) * H with data.feature_layers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdraft.data.fingerprint import of_settings
from specdraft.data.store.storage import Storage
from specdraft.data.store.tokens import TokenCache
from specdraft.models.feature_layers import Layers
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

BATCH_TOKENS = 8192  # of a forward, padding included
SAMPLE_TOKENS = 1 << 15  # that scales are measured on where no cache is made


class OnlineFeatures:
    """Rows of tokens and loss mask, with features that are computed whenever they are read.

    Raises DataError when a row is longer than the target's context.
    """

    def __init__(self, recipe: Recipe, tokens: TokenCache, target: Target):
        target.check_runs()
        check_context(tokens, target)
        self.tokens, self.target, self.lengths = tokens, target, tokens.lengths
        self.storage = Storage.of(recipe.data)
        device = target.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @cached_property
    def scales(self) -> dict[str, float]:
        """The scales of `FeatureCache.scales`, measured on a sample (see `sample_scales`)."""
        return sample_scales(self.tokens, self.target)

    @property
    def key(self) -> str:
        """A hash of the rows and of the target that reads them."""
        return made_from({"tokens": self.tokens.key, **self.target.identity()})

    def answers(self) -> Iterator[Tensor]:
        """Yield the supervised tokens of every row, [..]."""
        for row in range(len(self)):
            item = self.tokens[row]
            yield item["input_ids"][item["loss_mask"]]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """Return several rows, computed in one forward."""
        # A stream of its own lets a GPU run target and drafter at once; None changes nothing.
        with torch.cuda.stream(self._stream):
            read = read_features(self.target, self.tokens, rows, self.storage.layers)
            return [
                item | {"features": self.storage.read_back(features, item["loss_mask"])}
                for item, features in read
            ]


def made_from(settings: dict) -> str:
    """Return a hash of what decides features: the rows of tokens, and the target."""
    return of_settings({name: settings[name] for name in ("tokens", "weights", "config")})


def check_context(tokens: TokenCache, target: Target) -> None:
    """Raise DataError when a row is longer than what the target was made for."""
    longest = max(tokens.lengths)
    if target.context is not None and longest > target.context:
        raise DataError(
            f"a row has {longest} tokens and {target.name} has a context of {target.context}; "
            f"set data.max_length={target.context}"
        )


def batches(rows: list[int], lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Cut rows that are sorted by length, longest first, into batches of one forward each."""
    while rows:
        count = max(1, batch_tokens // lengths[rows[0]])
        yield rows[:count]
        rows = rows[count:]


def read_rows(data: Sequence[dict[str, Tensor]], rows: list[int]) -> list[dict[str, Tensor]]:
    """Read several rows of a data set: in one call where it has a way to (`__getitems__`)."""
    together = getattr(data, "__getitems__", None)
    return together(rows) if together else [data[row] for row in rows]


def read_features(
    target: Target, tokens: TokenCache, rows: list[int], layers: Layers = ()
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Read rows and run the target over them, in one forward.

    Yields {"input_ids": [T] int64, "loss_mask": [T] bool} of each and its features [T, H], wide
    with `layers`, which lie where the target does. Raises: DataError when a feature is not finite.
    """
    items = [tokens[row] for row in rows]
    read = {}
    if tokens.has_sources:  # an encoder sees padding, unless it is masked
        sources = pad_sources([item.pop("source_ids") for item in items])
        read = {name: tensor.to(target.device) for name, tensor in sources.items()}
    # No attention mask: attention is causal, so padding on the right is seen by nobody.
    ids = pad([item["input_ids"] for item in items]).to(target.device)
    hidden = target.features(ids, layers=layers, **read)  # [B, T, H]
    for line, item, row in zip(hidden, items, rows, strict=True):
        features = line[: len(item["input_ids"])]
        if not features.isfinite().all():
            raise DataError(
                f"{target.name} computes NaN or infinity for {tokens.origin(row)} in "
                f"{target.dtype}; set target.dtype=float32 or bfloat16"
            )
        yield item, features


def pad(rows: list[Tensor]) -> Tensor:
    """Return the ids of rows, padded on the right with zeros: [B, T]."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def pad_sources(sources: list[Tensor]) -> dict[str, Tensor]:
    """Return {"source": ids [B, S] padded on the right, "source_mask": 0 where they are pads}."""
    return {"source": pad(sources), "source_mask": pad([torch.ones_like(one) for one in sources])}


@torch.inference_mode()
def sample_scales(
    tokens: TokenCache, target: Target, sample: int = SAMPLE_TOKENS
) -> dict[str, float]:
    """Measure the scales of `FeatureCache.scales` on about `sample` tokens: every n-th row.

    They are those of the cache where the sample is the whole of it.
    """
    every = -(-sum(tokens.lengths) // sample)
    rows = sorted(range(0, len(tokens), every), key=tokens.lengths.__getitem__, reverse=True)
    ids, found = [], []
    for batch in batches(rows, tokens.room, BATCH_TOKENS):
        for item, features in read_features(target, tokens, batch):
            ids.append(item["input_ids"])
            found.append(moments(features))
    embedded = target.embed(torch.cat(ids).to(target.device))
    return {"feature_scale": deviation(found), "embed_scale": deviation([moments(embedded)])}


def moments(values: Tensor) -> list[float]:
    """Return count, sum and sum of squares."""
    return [values.numel(), values.sum(dtype=torch.float64).item(), squares(values)]


def squares(values: Tensor) -> float:
    """Return the sum of squares."""
    return values.float().square().sum(dtype=torch.float64).item()


def summed(parts: Iterable[Sequence[float]]) -> list[float]:
    """Add up moments."""
    return [sum(values) for values in zip(*parts, strict=True)]


def deviation(parts: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation of what has these moments, taken together."""
    count, total, squared = summed(parts)
    return math.sqrt(max(squared / count - (total / count) ** 2, 0.0))
