"""Small host lists to the device and back, without making the host wait more than once a step.

On CUDA a copy from pageable memory waits for the device; from pinned memory it is queued behind
the kernels that are already running. On CPU both functions cost nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers as a long tensor [N] on a device; the host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    pinned = torch.tensor(values, dtype=torch.long).pin_memory()
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
