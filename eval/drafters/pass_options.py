"""How the passes of a head are run: whether they are compiled, and how precisely they compute."""

from typing import NamedTuple, Self

import torch

from specdraft.models.embeddings import DTYPES
from specdraft.models.target import Target
from specdraft.recipes.schema import EvalSection
from specdraft.recipes.static_trees import AUTO


class PassOptions(NamedTuple):
    """How a head's passes are run.

    dtype: of its weights, of what it computes and of its cache; a head whose fusion carries a
    state, which adds up, stays in float32.
    """

    compiles: bool = False
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, settings: EvalSection, target: Target) -> Self:
        """Those that a recipe asks for; by default as precise as the target."""
        dtype = target.dtype if settings.head_dtype == AUTO else DTYPES[settings.head_dtype]
        return cls(settings.compile, dtype)


DEFAULT = PassOptions()  # unless a recipe says more
