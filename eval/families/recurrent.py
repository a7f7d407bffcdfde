"""Layers with a recurrent state, found by asking the model: short convolutions, linear attention,
state spaces.

transformers keeps their states in one kind of cache, whatever the family, by the layer's number. A
copy of the target reads two tokens with such a cache, and the module behind which a layer has a
state is the one that made it.
"""

import copy
from collections.abc import Callable
from inspect import signature
from typing import NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from specdraft.eval.families.support import is_recurrent, refusal, refusing
from specdraft.models.target import Target

CACHES = ("cache_params", "past_key_values")  # what families call their cache


class Recurrent(NamedTuple):
    """A module with a state."""

    number: int  # of its layer
    module: nn.Module
    forward: Callable  # its own
    argument: str  # by which it is handed a cache
    states: LinearAttentionLayer  # of one row that has read two tokens


def recurrent_layers(target: Target, view: nn.Module) -> list[Recurrent]:
    """The modules of a target's copy that have a state, by layers.

    Raises TargetError where a model that has states keeps them elsewhere, and where its layers
    cannot go on from one with several tokens at once.
    """
    if not is_recurrent(target.model):
        return []
    base, found = view.base_model, {}
    cache = DynamicCache(config=base.config)

    def note(module: nn.Module, *_) -> None:
        number = module.layer_idx
        if number not in found and _has_state(cache, number):
            (argument,) = _caches(module)
            states = cache.layers[number]
            found[number] = Recurrent(number, module, module.forward, argument, states)

    modules = [module for module in base.modules() if hasattr(module, "layer_idx")]
    hooks = [module.register_forward_hook(note) for module in modules]
    with torch.inference_mode(), refusing(target, "its recurrent layers cannot be looked at"):
        for argument in _caches(base):
            ids = torch.tensor([[0, 1]], device=target.device)
            base(input_ids=ids, use_cache=True, **{argument: cache})
    for hook in hooks:
        hook.remove()
    if not found:
        raise refusal(target, "its recurrent state is not in transformers' cache")
    layers = [found[number] for number in sorted(found)]
    if not _goes_on(target, layers[0]):
        raise refusal(
            target,
            "its recurrent layers read several tokens from an empty state only, and one by one a "
            "draft of n tokens costs them what n steps cost",
        )
    return layers


def _caches(module: nn.Module) -> list[str]:
    return [name for name in CACHES if name in signature(module.forward).parameters]


@torch.inference_mode()
def _goes_on(target: Target, layer: Recurrent) -> bool:
    """Whether it matters to several tokens which state they are read behind."""
    given, answers = target.embed(torch.arange(2, device=target.device))[None], []
    for shift in (0.0, 1.0):
        states = copy.deepcopy(layer.states)
        kept = [state for state in states.recurrent_states.values() if state is not None]
        for state in kept:
            state += shift
        cache = Cache(layers=[states] * (layer.number + 1))
        with refusing(target, "its recurrent layers cannot be read"):
            answers.append(layer.forward(given, **{layer.argument: cache}))
    return not (kept and torch.equal(*answers))


def _has_state(cache: Cache, number: int) -> bool:
    layer = cache.layers[number]
    return isinstance(layer, LinearAttentionLayer) and any(layer.has_previous_state.values())
