"""The machine that figures are measured on: what it is, and how many threads decode."""

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from specdraft.eval.pricing.machine import machine
from specdraft.models.target import Target


def environment(target: Target) -> dict:
    """Where the figures were measured."""
    return {
        **machine(target.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }


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
