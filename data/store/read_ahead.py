"""What is read soon, asked of the disk at once.

A mapped file comes as it is touched, some pages at a time, and whoever touches it waits for each:
from a disk that answers late, most of the time that features take. The system fetches spans that it
is told of in the background, many at a time.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path


def first_bytes(file: Path) -> dict[str, int]:
    """Return where each tensor of a safetensors file begins, in bytes of the file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def read_ahead(file: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Have the system begin to fetch spans of a file: (first byte, bytes).

    Returns at once, and does nothing where a system has no such request (macOS).
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with file.open("rb") as opened:
        for start, count in spans:
            if count:  # none would stand for the rest of the file
                os.posix_fadvise(opened.fileno(), start, count, os.POSIX_FADV_WILLNEED)
