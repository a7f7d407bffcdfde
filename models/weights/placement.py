"""A target that does not fit one device: its modules spread over several, as accelerate does it.

`target.device_map` is what transformers' `from_pretrained` takes: a way to spread the modules, or a
device for each. accelerate's hooks then bring inputs to the device of a module, and weights that
are kept on the CPU or on disk to where it runs, for as long as it runs. A module whose weights are
elsewhere shows tensors on the "meta" device.
"""

from typing import Any

import torch
from torch import nn

from specdraft.recipes.errors import TargetError
from specdraft.recipes.schema import TargetSection

KEPT = ("cpu", "disk")  # where weights may lie; where there is a GPU, it runs these modules, too


def loading_options(section: TargetSection) -> dict[str, Any]:
    """What `from_pretrained` is told of a recipe's devices; nothing where it is one.

    Raises TargetError for a device that is not there.
    """
    if section.device_map is None:
        return {}
    spread, limits = section.device_map, section.max_memory
    if isinstance(spread, dict):
        spread = {name: _device("device_map", place) for name, place in spread.items()}
    if limits is not None:
        limits = {_device("max_memory", place): size for place, size in limits.items()}
    return {"device_map": spread, "max_memory": limits}


def _device(key: str, place: int | str) -> int | str:
    """A device as accelerate wants it: a GPU by its number, else its name."""
    name = str(place).removeprefix("cuda:")
    count = torch.cuda.device_count()
    if name in KEPT:
        return name
    if not name.isdecimal() or int(name) >= count:
        known = ", ".join([*map(str, range(count)), *KEPT])
        raise TargetError(f"target.{key}: no device {place!r} here; there are {known}")
    return int(name)


def runs_on(module: nn.Module) -> torch.device:
    """The device that a module with a weight runs on, wherever the weight is kept."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return module.weight.device if device is None else torch.device(device)


def is_kept_elsewhere(model: nn.Module) -> bool:
    """Whether some weights lie neither where they are needed nor on a device at all."""
    return any(tensor.is_meta for tensor in model.parameters())


def shared(model: nn.Module) -> dict[int, Any]:
    """What `copy.deepcopy` is to share between a model and its copy: every tensor, those that
    accelerate keeps elsewhere included; by id, as a memo."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    for hook in hooks:
        weights, tied = getattr(hook, "weights_map", None), getattr(hook, "tied_params_map", None)
        if weights is not None:
            kept[id(weights)] = weights
        for copies in (tied or {}).values():
            kept |= {id(tensor): tensor for tensor in copies.values()}
    for module in model.modules():  # a hook may be an object that its owner goes on changing
        for found in (module._forward_hooks, module._forward_pre_hooks):
            kept |= {id(hook): hook for hook in found.values()}
    return kept
