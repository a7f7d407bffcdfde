"""Small host lists to the device and back, without making the host wait more than once a step.

On CUDA a copy from pageable memory waits for the device; from pinned memory it is queued behind
the kernels that are already running. On a CPU a list becomes a slice of a tensor that is there
already: to make one costs twice as much, and a step needs ten. The way back costs nothing there.
"""

import threading
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

SLAB = 4096  # integers that share a tensor


class _Slab:
    """Host memory handed out slice by slice and each slot once: what someone holds is never
    written again."""

    def __init__(self, size: int = SLAB):
        memory = array("q", bytes(8 * size))
        self.used, self.writable = 0, memoryview(memory)
        with torch.inference_mode(False):  # or its slices could take no part in training
            self.tensor = torch.frombuffer(memory, dtype=torch.long)

    def hold(self, values: array) -> Tensor | None:
        """The values as a slice [N]; None when there is no room left."""
        first = self.used
        self.used = stop = first + len(values)
        if stop > len(self.writable):
            return None
        self.writable[first:stop] = values
        return self.tensor[first:stop]


class _Slabs(threading.local):
    """The slab that a thread writes on."""

    def __init__(self):
        self.current = _Slab()


_slabs = _Slabs()


def upload(values: Sequence, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers as a tensor on a device, [N] of integers; the host does not wait."""
    if device.type == "cpu" and dtype == torch.long:
        packed = array("q", values)
        while (held := _slabs.current.hold(packed)) is None:
            _slabs.current = _Slab(max(SLAB, len(packed)))
        return held
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.tensor(values, dtype=dtype).pin_memory()
    return pinned.to(device, non_blocking=True)


def download(*tensors: Tensor) -> list[Tensor]:
    """Tensors on the host: one wait for all of them."""
    if not tensors or not tensors[0].is_cuda:
        return list(tensors)
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def wait(device: torch.device) -> None:
    """Until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
