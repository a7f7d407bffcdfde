"""More of the target than its last feature: hidden states after chosen decoder layers.

Layer n is what the n-th decoder layer returns, counted from 1: transformers' `hidden_states[n]`. Of
L layers there are 1 .. L - 1 to choose from: what follows the L-th and the final norm is the
feature itself. A wide feature has them behind it, in the order in which they are named:

    layers (2, 4)    [f_i; hidden_states[2]_i; hidden_states[4]_i]    [.., (1 + n) * H]

EAGLE-3 (arXiv 2503.01840) reads low, middle and high layers of the target in this way.

Shapes: n layers, H hidden.
"""

import torch
from torch import Tensor, nn

from specdraft.recipes.errors import HeadError, TargetError

Layers = tuple[int, ...]


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


def wide_features(base: nn.Module, layers: Layers, device: torch.device, **inputs) -> Tensor:
    """Run a model without its lm_head; return its features, wide where there are `layers`.

    Raises TargetError for a model whose layers cannot be read, or are not as wide as its features.
    """
    if layers:
        inputs["output_hidden_states"] = list(layers)  # no others are kept
    output = base(use_cache=False, **inputs)
    # Some add up their layers' outputs in float32 and leave it to lm_head to round.
    features = output.last_hidden_state.to(device, base.dtype)
    if not layers:
        return features
    states = getattr(output, "hidden_states", None) or ()
    read = [states[n].to(device) for n in layers if n < len(states)]
    if [part.shape for part in read] != [features.shape] * len(layers):
        widths = ", ".join(str(part.shape[-1]) for part in read) or "nothing"
        raise TargetError(
            f"feature layers {list(layers)}: {type(base).__name__} gives widths {widths} for them, "
            f"and {features.shape[-1]} for its feature; they must be alike: go without, "
            "data.feature_layers=[]"
        )
    return torch.cat((features, *read), -1)
