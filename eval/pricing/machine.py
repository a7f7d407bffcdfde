"""Which machine it is: what its processors are, by name."""

import os
import platform
from pathlib import Path

import torch

_MODEL = {"family": "cpu family", "model": "model"}  # in /proc/cpuinfo


def machine(device: torch.device) -> dict[str, str | int | None]:
    """What the time of a step depends on, of the machine that a device is part of."""
    return {
        "device": str(device),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
    }


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, and its model: a cloud's machines of several generations have one."""
    info: dict[str, str] = {}
    if file.is_file():
        pairs = (line.partition(":") for line in file.read_text().splitlines())
        for key, _, value in pairs:
            info.setdefault(key.strip(), value.strip())
    name = info.get("model name", platform.processor())
    numbers = [f"{key} {info[field]}" for key, field in _MODEL.items() if field in info]
    return f"{name} ({', '.join(numbers)})" if numbers else name
