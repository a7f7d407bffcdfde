"""The decoder layer of a semi-autoregressive head: Llama's, with what attends left to the caller.

Its queries may be fewer than its keys and values, and made of other vectors: a block's slots may
read its newest input, while what is cached of a position depends on that position alone.

Shapes: S sequences, T time, Q queries, H hidden, D head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdraft.models.weights.prepacked import Packable

# attend(layer, query [S, heads, Q, D], key, value [S, kv_heads, T, D]) -> [S, heads, Q, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rope = tuple[Tensor, Tensor]  # cos and signed sin, [S or 1, 1, T, D] each


class DecoderLayer(nn.Module, Packable):
    """Pre-norm attention and SwiGLU MLP; who attends to whom is the caller's `attend`."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        inner: int,
        eps: float,
        normed: bool = True,
        reads: int | None = None,
        dim: int | None = None,
    ):
        """normed: whether the attention's input is; EAGLE-1's first layer takes it as it is.
        reads: width of that input; None: H. dim: of an attention head; None: H / heads."""
        super().__init__()
        self.dim, self.eps = dim or width // heads, eps
        self.heads = (heads, kv_heads, kv_heads)
        self.attention_norm = nn.Parameter(torch.ones(width)) if normed else None
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(reads or width, sum(self.heads) * self.dim, bias=False)
        self.out = nn.Linear(heads * self.dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        layer: int,
        attend: Attend,
        source: tuple[Tensor, Rope] | None = None,
    ) -> Tensor:
        """x [S, Q, H] -> [S, Q, H]. source: what keys and values are made of, [S, T, H] with its
        rope; None: x itself."""
        y, key_value = self._normed(x), self.heads[1] + self.heads[2]
        if source is None:
            query_key, value = self._project(y, self.qkv.weight).split(
                (self.heads[0] + self.heads[1], self.heads[2]), 1
            )
            query, key = _rotate(query_key, *rope).split(self.heads[:2], 1)
        else:
            asks, answers = self.qkv.weight.split((self.heads[0] * self.dim, key_value * self.dim))
            query = _rotate(self._project(y, asks), *rope)
            key, value = self._project(self._normed(source[0]), answers).chunk(2, 1)
            key = _rotate(key, *source[1])
        attended = self.out(attend(layer, query, key, value).transpose(1, 2).flatten(2))
        x = self._residual(x) + attended
        y = F.rms_norm(x, x.shape[-1:], self.mlp_norm, self.eps)
        gate, up = self.gate_up(y).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _normed(self, x: Tensor) -> Tensor:
        if self.attention_norm is None:
            return x
        return F.rms_norm(x, x.shape[-1:], self.attention_norm, self.eps)

    def _residual(self, x: Tensor) -> Tensor:
        """What the attention's output is added to."""
        return x

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        """[S, T, H] -> [S, heads, T, D]."""
        return self.linear(x, weight).unflatten(-1, (-1, self.dim)).transpose(1, 2)


def rotations(positions: Tensor, inverse_frequency: Tensor) -> Rope:
    """Return cos and signed sin of positions [S, T], given frequencies [D / 2]: [S, 1, T, D]."""
    angle = positions[:, None, :, None].to(torch.float32) * inverse_frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def checkpointed(wanted: bool, run: Callable[..., Any], *inputs: Any) -> Any:
    """Call `run`; if wanted, backward runs it again instead of keeping what it computes. Nothing in
    it may be random."""
    if wanted and torch.is_grad_enabled():
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return run(*inputs)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [S, heads, T, D]; cos and sin [S or 1, 1, T, D], sin with
    the sign of rotate_half in its first half."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin
