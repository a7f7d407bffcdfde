"""Where the numbers of a small model lie in a large one that computes the same.

All other numbers are zero: the first h channels hold the small model, the others nothing, and
matrices are as large as those of a model of the large sizes. With capitals for these:

    norms       zeros make the mean square of a vector smaller, by h / H. With weights w sqrt(h / H)
                and eps h / H the norm of the first channels is what it was:
                x w sqrt(h/H) / sqrt(h/H ms + h/H eps) = x w / sqrt(ms + eps)
    rotation    pair i of d / 2 turns as fast as pair i D / d of D / 2, for the same theta:
                dimension i of either half of an attention head lies at i D / d of the same half
    scores      are divided by sqrt(D) instead of sqrt(d): query weights times sqrt(D / d)
    kv heads    a query head reads the kv head of its group. Where the large groups are smaller, a
                small kv head is there once for each group that holds one of its query heads

Shapes: h, H hidden; d, D attention head; R rows and C columns of a matrix.
"""

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.models.shapes import TargetShape
from specdraft.recipes.errors import RecipeError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model's layers."""

    width: int
    heads: int
    kv_heads: int
    dim: int  # of an attention head
    inner: int

    @classmethod
    def of(cls, shape: TargetShape) -> "Sizes":
        """Return the sizes of a target of this shape."""
        dim = shape.hidden_size // shape.heads
        return cls(shape.hidden_size, shape.heads, shape.kv_heads, dim, shape.intermediate_size)


class Places(NamedTuple):
    """Which rows, or columns, of the small matrix go to which ones of the large, [n] each."""

    taken: Tensor
    put: Tensor


class Layer(NamedTuple):
    """The weights of a decoder layer, or parts of matrices that hold several of them."""

    attention_norm: Tensor | None
    mlp_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Growth:
    """From small sizes to large ones. Raises RecipeError where they do not divide."""

    name: str  # of what is enlarged, in errors
    small: Sizes
    large: Sizes

    def __post_init__(self) -> None:
        small, large = self.small, self.large
        for what in ("width", "inner"):
            if (least := getattr(small, what)) > (found := getattr(large, what)):
                raise RecipeError(
                    f"{self.name}: its {what} is {least}, and that of the shape {found}; take a "
                    "larger shape"
                )
        if large.dim % small.dim:
            raise RecipeError(
                f"{self.name}: its attention heads have {small.dim} dimensions, which must divide "
                f"the {large.dim} of the shape; take another shape"
            )
        if (groups := small.kv_heads * self._groups) > large.kv_heads:
            raise RecipeError(
                f"{self.name}: its {small.heads} attention heads, {small.kv_heads} of keys and "
                f"values, take {groups} groups of the shape, which has {large.heads}, "
                f"{large.kv_heads} of keys and values; take a shape with more of them"
            )

    @property
    def of_norms(self) -> float:
        """The factor of a norm's weights; its eps takes the square."""
        return sqrt(self.small.width / self.large.width)

    @property
    def of_scores(self) -> float:
        """The factor of the weights that make queries."""
        return sqrt(self.large.dim / self.small.dim)

    @property
    def _groups(self) -> int:
        """Groups of the large model that the query heads of one small kv head fill."""
        return -(-(self.small.heads // self.small.kv_heads) // self._group)

    @property
    def _group(self) -> int:
        """Query heads in a group of the large model: those that share a kv head."""
        return self.large.heads // self.large.kv_heads

    def width(self, blocks: int = 1) -> Places:
        """Return the places of hidden vectors, `blocks` of them side by side."""
        return in_blocks(blocks, self.small.width, self.large.width)

    def queries(self) -> Places:
        """Return the places of all query heads."""
        shared = self.small.heads // self.small.kv_heads
        heads = torch.arange(self.small.heads)
        # A small kv head's queries fill one large group after the other, from a new one on.
        first = heads // shared * self._groups * self._group
        return self._heads(heads, first + heads % shared)

    def keys(self) -> Places:
        """Return the places of all key heads, which are those of value heads, too."""
        groups = torch.arange(self.small.kv_heads * self._groups)
        return self._heads(groups // self._groups, groups)

    def _heads(self, taken: Tensor, put: Tensor) -> Places:
        """Return the places of all dimensions of the heads `taken`, which are `put` there."""
        small, large = self.small.dim, self.large.dim
        every, half = torch.arange(small), small // 2
        inside = every // half * (large // 2) + every % half * (large // small)
        return Places(
            (taken[:, None] * small + every).flatten(), (put[:, None] * large + inside).flatten()
        )

    def fill_layer(self, large: Layer, small: Layer) -> None:
        """Write a small layer into a large one."""
        width, inner = self.width(), in_blocks(1, self.small.inner, self.large.inner)
        for norm, own in zip(large[:2], small[:2], strict=True):
            if own is not None:
                fill(norm, own, width, factor=self.of_norms)
        fill(large.query, small.query, self.queries(), width, self.of_scores)
        fill(large.key, small.key, self.keys(), width)
        fill(large.value, small.value, self.keys(), width)
        fill(large.out, small.out, width, self.queries())
        fill(large.gate, small.gate, inner, width)
        fill(large.up, small.up, inner, width)
        fill(large.down, small.down, width, inner)


def in_blocks(blocks: int, small: int, large: int) -> Places:
    """Return the places of blocks side by side: a small block's numbers begin a large block."""
    number, inside = torch.arange(blocks)[:, None], torch.arange(small)
    return Places((number * small + inside).flatten(), (number * large + inside).flatten())


@torch.no_grad()
def fill(
    large: Tensor,  # [R] or [R, C], a parameter or a part of one, anywhere
    small: Tensor,
    rows: Places,
    columns: Places | None = None,
    factor: float = 1.0,
) -> None:
    """Write a small matrix, or a vector, into the places of a large one, and zeros elsewhere."""
    # Rounded once, to what the large one is.
    part = factor * small.detach().float()[rows.taken.to(small.device)]
    if columns is not None:
        part = part[:, columns.taken.to(small.device)]
    put = [axis.put.to(large.device) for axis in (rows, columns) if axis is not None]
    where = (put[0],) if columns is None else (put[0][:, None], put[1])
    large.zero_()
    large[where] = part.to(large)


def repeat_row(large: Tensor, filled: int, row: int) -> None:
    """Make the rows of [R, C] behind the `filled` first ones copies of one of those."""
    with torch.no_grad():
        large[filled:] = large[row].clone()
