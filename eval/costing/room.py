"""How much memory there is, and what has room in it."""

from pathlib import Path

import psutil
import torch
from torch import nn

from specdraft.models.shapes import BYTES, TargetShape
from specdraft.recipes.errors import RecipeError

GB = 1e9
SPARE = 0.9  # of what is free: activations, logits and the allocator take the rest
CGROUP = Path("/sys/fs/cgroup/memory.max")


def free_bytes(device: torch.device) -> int:
    """Memory that a device can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    if CGROUP.is_file() and (limit := CGROUP.read_text().strip()).isdecimal():
        return min(free, int(limit))
    return free


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's tensors, be they there or on the meta device."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_room(what: str, needed: int, device: torch.device) -> None:
    """Raise RecipeError where a device has no room for so many bytes."""
    free = free_bytes(device)
    if needed > SPARE * free:
        place = "GPU memory" if device.type == "cuda" else "memory"
        raise RecipeError(
            f"{what}: needs {needed / GB:.1f} GB of {place}, and {free / GB:.1f} GB are free "
            f"(of which {SPARE:.0%} may be taken); take a smaller shape, half of the bytes "
            "(target.dtype=bfloat16), or a larger machine"
        )


def row_bytes(shape: TargetShape, capacity: int, dtype: str) -> int:
    """Bytes of the KV cache of a row with `capacity` tokens."""
    return shape.cached_numbers * capacity * BYTES[dtype]


def most_rows(row: int, device: torch.device) -> int:
    """How many rows of so many bytes have room beside what is there."""
    return int(SPARE * free_bytes(device) // row)
