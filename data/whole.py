"""Files that are whole or absent, and known by their sha256 when they are read again."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from specdraft.data import fingerprint
from specdraft.recipes.errors import CacheError

HASHED_AT_OPEN = 2 << 30  # bytes whose checksums are verified unasked: seconds, not minutes


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for a part of it.

    Raises CacheError, which states the shortfall, when the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise _full(path, len(content)) from error
        raise
    _sync_directory(path.parent)


def _full(path: Path, needed: int) -> CacheError:
    free = shutil.disk_usage(path.parent).free
    short = f"{(needed - free) / 2**20:.1f} MiB short" if needed > free else "taken meanwhile"
    return CacheError(
        f"out of disk: {path} needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free, "
        f"{short}; what is written stays valid: make room, and the same command goes on"
    )


def describe(path: Path) -> dict[str, Any]:
    """Return the entry of a file that something else has written: file, bytes, sha256."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": fingerprint.of_file(path)}


def damage(directory: Path, entry: dict[str, Any], checksum: bool) -> str | None:
    """Say what is wrong with a file: missing, size or (if asked) checksum; else None."""
    path = directory / entry["file"]
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"has {size} bytes and should have {entry['bytes']}"
    if checksum:
        found = fingerprint.of_file(path)
        if found != entry["sha256"]:
            return f"has the sha256 {found[:12]}.. and should have {entry['sha256'][:12]}.."
    return None


def _sync_directory(directory: Path) -> None:
    if os.name == "posix":  # else the new name may be lost with the power, and Windows cannot
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
