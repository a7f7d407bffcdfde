"""The machine that figures are measured on: what it is, and how many threads decode."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from specdraft.models.target import Target

_MODEL = {"family": "cpu family", "model": "model"}  # in /proc/cpuinfo


def environment(target: Target) -> dict:
    """Where the figures were measured."""
    return {
        "device": str(target.device),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if target.device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
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


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Decode with `count` threads: a step of a small target is faster with one than with many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
