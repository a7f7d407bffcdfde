"""Weights laid out once for the CPU's matrix kernels, where a few tokens meet large matrices.

A verifying forward multiplies every matrix with some dozen tokens: too many for the product of a
matrix and a vector, too few to pay for arranging the matrix anew in each call, as torch's linear
layers do on a CPU. Kept as the kernels want it, at the price of a second copy of the weights, a
node more of a tree costs a fraction (on an AMD EPYC, in oneDNN's blocks, [4096, 1024] in float32
with 1, 4 and 12 tokens: 334, 1110, 1977 us before, 256, 294, 647 us after).

Weights are packed outside of training alone: a packed product has no gradient.
"""

import copy
from collections.abc import Callable
from functools import cache
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST = 2**31  # bytes of copies per model, unless a recipe says: larger models keep their memory


class Layout(NamedTuple):
    """A way to arrange weights, and where multiplying by them is worth what it costs."""

    pack: Callable[[Tensor], Tensor]  # [N, K]
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # as `F.linear`, by the copy
    products: int = 0  # multiplications of a call, from which on it is worth it
    tokens: int = 1  # of a call
    numbers: int = 0  # of a matrix
    below: float = inf  # numbers: what is not worth it any more

    def least(self, weight: Tensor) -> float:
        """Numbers in x from which x by the copy is worth its call."""
        return max(self.products / len(weight), self.tokens * weight.shape[1])


def columns(weight: Tensor) -> Tensor:
    """The same matrix, its columns side by side in memory."""
    return weight.t().contiguous().t()


def blocks(weight: Tensor) -> Tensor:
    """The matrix as oneDNN keeps it: its blocks in the order in which its kernels read them."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)


def times_blocks(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., K] by a matrix in oneDNN's blocks."""
    return _product()(x, packed, bias, "none", [], "")


@cache
def _product() -> Callable[..., Tensor]:
    """The operator itself: to look it up takes as long as to call it."""
    return torch.ops.mkldnn._linear_pointwise.default


COLUMNS, BLOCKS = Layout(columns, F.linear), Layout(blocks, times_blocks)


def layouts_float32(processor: str, instructions: str) -> tuple[Layout, ...]:
    """What pays in float32, by the processor's name and its vector instructions.

    Without AVX-512 torch's own kernels are as good while a matrix fits in a core's cache, and
    better for a single token. On Intel's processors, for which MKL, whose they are, is tuned, a
    call by blocks costs as much as a small product itself; but columns cost no more than rows to
    call, and less for each token after a few. ([512, 192] with 1, 8 and 16 tokens: 16, 29, 40 us,
    by columns 15, 20, 29, by blocks 31, 36, 46. Large matrices are better in blocks: a forward of
    12 tokens through a target 512 wide takes 29 ms, by columns 25, by blocks 20. Intel Xeon, family
    6, model 167.)
    """
    if processor.startswith("Intel"):
        large = BLOCKS._replace(products=2_000_000, tokens=4, numbers=300_000)
        return COLUMNS._replace(tokens=6, below=300_000), large
    if instructions == "AVX2":
        return (BLOCKS._replace(products=600_000, tokens=2, numbers=2**18),)
    return (BLOCKS._replace(products=600_000),)


_PROCESSOR = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")
# By dtype. bfloat16 is arranged in every call otherwise, whatever the size.
LAYOUTS: dict[torch.dtype, tuple[Layout, ...]] = {
    torch.float32: layouts_float32(_PROCESSOR, torch.backends.cpu.get_cpu_capability()),
    torch.bfloat16: (BLOCKS,),
}
# Numbers of a matrix from which a packable module asks at all: of smaller ones, asking takes what a
# packed product spares. (Of [2048, 4096] with 1, 3 and 6 tokens that is much: 1190, 3566, 2976 us
# before, 621, 842, 934 packed; AMD EPYC, family 26.)
_LARGE = 2**18
_TOKENS = 16  # per call that the layout is made for
_NEAR = 1e-2  # relative; a product in bfloat16 is as exact


@cache
def has_blocks(dtype: torch.dtype) -> bool:
    """Whether this build of torch arranges such weights on this CPU, and multiplies by them
    right."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.ones(3, 8, dtype=dtype), torch.arange(32.0).to(dtype).view(4, 8)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = times_blocks(x, blocks(weight), None)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool(torch.allclose(product, F.linear(x, weight), rtol=_NEAR))


def layout_of(weight: Tensor) -> Layout | None:
    """How a matrix is arranged; None: as it is."""
    for layout in LAYOUTS.get(weight.dtype, ()):
        if layout.numbers <= weight.numel() < layout.below:
            return layout if layout.pack is not blocks or has_blocks(weight.dtype) else None
    return None


class PrepackedWeights:
    """The packed copies of one model's weights, or of rows of them, each made when it is first
    worth it; of weights beyond `most` bytes there are none."""

    def __init__(self, most: float = MOST) -> None:
        # Of each: the whole weight, its version, the copy, and sums of the rows of the whole.
        self._copies: dict[tuple, tuple[Tensor, tuple[int, int], *tuple[Tensor | None, ...]]] = {}
        self.most, self.size = most, 0  # bytes

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., K] by weight [N, K]: [.., N], as `F.linear` but for rounding."""
        layout = layout_of(weight) if _is_run() else None  # a graph must not look for one
        packed = None
        if layout and x.numel() >= layout.least(weight) and weight.is_cpu:
            packed = self.copy_of(weight, layout)
        return F.linear(x, weight, bias) if packed is None else layout.multiply(x, packed, bias)

    def copy_of(self, weight: Tensor, layout: Layout) -> Tensor | None:
        """The packed copy, of the weight as it is now; None where there is none."""
        whole = weight if weight._base is None else weight._base
        part = id(whole), weight.storage_offset(), weight.shape, weight.stride()
        known, version, packed, sums = self._copies.get(part, (None, None, None, None))
        if known is whole and version == _version(weight):
            return packed
        if packed is not None:  # of a weight that has changed since
            self.size -= weight.nbytes
        packed = None
        if self.size + weight.nbytes <= self.most:
            self.size += weight.nbytes
            packed, sums = layout.pack(weight.detach()), _sums(whole)
        # The weight itself is held, so that its id stays its own.
        self._copies[part] = (whole, _version(weight), packed, sums)
        return packed

    def have_missed_a_change(self) -> bool:
        """Whether a weight was written to since, and does not tell: neither fused optimisers nor
        `.data` count what they write. It reads every weight that has a copy."""
        return any(
            packed is not None
            and version[1] == _version(whole)[1]
            and not torch.equal(sums, _sums(whole))
            for whole, version, packed, sums in self._copies.values()
        )


class Packable:
    """A module that multiplies by its weights, or by rows of them, in a way of its own."""

    linear = staticmethod(F.linear)


class PrepackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight."""

    store: PrepackedWeights
    layout: Layout
    least: float  # numbers in x from which the packed product is worth its call
    packed: Tensor | None = None
    version: tuple[int, int] | None = None  # of the weight that `packed` is a copy of

    def forward(self, x: Tensor) -> Tensor:
        parts = self._parameters  # by name: attributes of modules take as long as a third of a call
        weight, bias = parts["weight"], parts["bias"]
        if x.numel() < self.least or not _is_run():
            return F.linear(x, weight, bias)
        if self.version != (version := _version(weight)):
            self.version, self.packed = version, self.store.copy_of(weight, self.layout)
        if self.packed is None:
            return F.linear(x, weight, bias)
        return self.layout.multiply(x, self.packed, bias)


def can_prepack(module: nn.Module) -> bool:
    """Whether it is a plain linear layer with frozen weights on a CPU, kept where it runs, and of
    a size that gains by a packed copy."""
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and layout_of(module.weight) is not None
        and not module.weight.requires_grad
        and not module.weight.is_inference()  # nobody could tell whether it has changed
        and not hasattr(module, "_hf_hook")
    )


def prepack_layers(model: nn.Module, store: PrepackedWeights) -> None:
    """Let the linear layers of a model, a structural copy of somebody's, and what else is packable
    in it multiply by packed weights."""
    for module in model.modules():
        if can_prepack(module):
            layout = layout_of(module.weight)
            module.__class__, module.store, module.layout = PrepackedLinear, store, layout
            module.least = layout.least(module.weight)
        elif isinstance(module, Packable) and any(_is_large(p) for p in module.parameters()):
            module.linear = store.linear


def prepacked_layer(module: nn.Module, store: PrepackedWeights) -> nn.Module:
    """The same linear layer with packed weights, sharing its tensors; else the module itself."""
    if not can_prepack(module):
        return module
    view = copy.copy(module)
    prepack_layers(view, store)
    return view


def frozen_view(
    module: nn.Module, most: float = MOST, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A structural copy of a module that shares its tensors, none with a gradient, and packs up to
    so many bytes of weights. dtype: of its parameters, copies where the module's own is another."""
    twins = {id(one): nn.Parameter(one.detach().to(dtype), False) for one in module.parameters()}
    view = copy.deepcopy(module, twins | {id(one): one for one in module.buffers()})
    prepack_layers(view, PrepackedWeights(most))
    return view


def _is_large(weight: Tensor) -> bool:
    return weight.dim() == 2 and weight.numel() >= _LARGE


def _version(weight: Tensor) -> tuple[int, int]:
    """What tells whether it has changed since: its place and, unless it was made in inference mode,
    how often it was written to."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _sums(weight: Tensor) -> Tensor:
    """Sums of a weight's rows: of their bits, eight bytes at a time, which is as fast as memory in
    any dtype; of their values, where the bytes do not divide."""
    try:
        return weight.detach().view(torch.int64).sum(-1)
    except RuntimeError:
        return weight.detach().sum(-1)


def _is_run() -> bool:
    """Whether a product is for its value alone: not for a gradient, nor for a graph."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()
