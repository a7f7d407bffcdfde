"""More of the target than its last feature: hidden states after chosen decoder layers.

Layer n is what the n-th decoder layer returns, counted from 1: transformers' `hidden_states[n]`. Of
L layers there are 1 .. L - 1 to choose from: what follows the L-th and the final norm is the
feature itself. A wide feature has them behind it, in the order in which they are named:

    layers (2, 4)    [f_i; hidden_states[2]_i; hidden_states[4]_i]    [.., (1 + n) * H]

EAGLE-3 (arXiv 2503.01840) reads low, middle and high layers of the target in this way.

Shapes: n layers, H hidden.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.recipes.errors import HeadError, TargetError

Layers = tuple[int, ...]
_CAPTURES = "transformers.utils.output_capturing"


def check_layers(
    layers: Layers, count: int, name: str, key: str = "data.feature_layers", way_out: str = ""
) -> None:
    """Raise TargetError for layers that a target with `count` decoder layers does not have.

    key: what asks for them, and what to do where that is not to name others.
    """
    if max(layers, default=0) >= count:
        raise TargetError(
            f"{key} = {list(layers)}: each must be below {count}, for {name} has {count} decoder "
            f"layers and what follows the last is the feature itself; "
            f"{way_out or f'name layers from 1 to {count - 1}'}"
        )


def cache_command(layers: Layers) -> str:
    """The command that makes features with these layers."""
    names = ",".join(map(str, layers))
    return f"accelerate launch data/cache.py RECIPE data.feature_layers=[{names}]"


def check_width(features: Tensor, width: int, layers: Layers) -> None:
    """Raise HeadError for features [.., ..] without the layers that a head of this width reads."""
    found, wanted = features.shape[-1] / width, 1 + len(layers)
    if found != wanted:
        raise HeadError(
            f"this head reads layers {list(layers)} of the target beside its feature, {wanted} x "
            f"{width} numbers a token, and was given {found:g} x {width}; make a cache for it "
            f"with: {cache_command(layers)}"
        )


class Taps:
    """What chosen layers of a model return, kept by a hook on each.

    To ask transformers for hidden states calls a hook of its own on every layer. Of a small model
    that is 2% of a forward, which a draft has to earn. (Of 6 layers and 8 tokens 80 of 3,400 us,
    with these 15; AMD EPYC, family 25.)
    """

    def __init__(self, layers: Layers, stack: nn.ModuleList):
        self._kept: dict[int, Tensor] = {}
        self._hooks = [stack[n - 1].register_forward_hook(partial(self._keep, n)) for n in layers]

    @classmethod
    def of(cls, base: nn.Module, layers: Layers, count: int) -> "Taps | None":
        """Taps on a model of so many decoder layers; None where it is not plain which these are."""
        stacks = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        return cls(layers, stacks[0]) if layers and len(stacks) == 1 else None

    def _keep(self, number: int, layer: nn.Module, inputs: tuple, output: Any) -> None:
        self._kept[number] = output[0] if isinstance(output, tuple) else output

    def drain(self) -> dict[int, Tensor]:
        """What the last forward left, by layer; it is held no longer."""
        kept, self._kept = self._kept, {}
        return kept

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()


def remove_captures(base: nn.Module) -> None:
    """Take away the hooks that transformers leaves on a model whose hidden states were asked for:
    every layer's call takes longer for them. It puts them there again when they are."""
    for module in base.modules():
        hooks = module._forward_hooks
        for key in [k for k, hook in hooks.items() if getattr(hook, "__module__", "") == _CAPTURES]:
            del hooks[key]
        module.__dict__.pop("_output_capturing_hooks_installed", None)


def wide_features(
    base: nn.Module, layers: Layers, device: torch.device, taps: Taps | None = None, **inputs
) -> Tensor:
    """Run a model without its lm_head; return its features, wide where there are `layers`.

    taps: on these layers. Raises TargetError for a model whose layers cannot be read, or are not as
    wide as its features.
    """
    if layers and not taps:
        inputs["output_hidden_states"] = list(layers)  # no others are kept
    output = base(use_cache=False, **inputs)
    # Some add up their layers' outputs in float32 and leave it to lm_head to round.
    features = output.last_hidden_state.to(device, base.dtype)
    if not layers:
        return features
    states = taps.drain() if taps else dict(enumerate(getattr(output, "hidden_states", None) or ()))
    read = [states[n].to(device) for n in layers if n in states]
    if [part.shape for part in read] != [features.shape] * len(layers):
        widths = ", ".join(str(part.shape[-1]) for part in read) or "nothing"
        raise TargetError(
            f"feature layers {list(layers)}: {type(base).__name__} gives widths {widths} for them, "
            f"and {features.shape[-1]} for its feature; they must be alike: go without, "
            "data.feature_layers=[]"
        )
    return torch.cat((features, *read), -1)
