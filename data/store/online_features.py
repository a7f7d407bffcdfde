"""Features without a cache: the frozen target computes them as rows are read.

    rows = OnlineFeatures(recipe, tokens, target)
    rows[0]         # {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}

What a `FeatureCache` reads from disk, where no disk holds it (data.features=online). The numbers
are the cache's, up to the rounding of a forward with other neighbours: bit for bit where the same
rows share a forward. Training reads a step ahead in a thread: the target runs beside the drafter.

Shapes: T tokens of a row, H hidden.
"""

from functools import cached_property

import torch
from torch import Tensor

from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.features import check_context, read_features, sample_scales
from specdraft.data.store.storage import Storage
from specdraft.data.store.tokens import TokenCache
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe


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

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return {"input_ids": [T] int64, "loss_mask": [T] bool, "features": [T, H]}."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """Return several rows, computed in one forward."""
        # A stream of its own lets a GPU run target and drafter at once; None changes nothing.
        with torch.cuda.stream(self._stream):
            return [
                item | {"features": self.storage.read_back(features, item["loss_mask"])}
                for item, features in read_features(self.target, self.tokens, rows)
            ]


Features = FeatureCache | OnlineFeatures  # what heads are trained on
