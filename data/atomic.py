"""Files that are whole or absent, and known by their sha256 when they are read again.

What is written gets another name first and its own when it is on the disk: a reader, or a run that
goes on where one was killed, never takes a part for the whole. A file that grows by lines is whole
up to its last one.
"""

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdraft.data import fingerprint
from specdraft.recipes.errors import CacheError

HASHED_AT_OPEN = 2 << 30  # bytes whose checksums are verified unasked: seconds, not minutes
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch and safetensors make of these: they keep no errno.
_NO_ROOM_WORDS = re.compile(rf"unexpected pos|os error ({'|'.join(map(str, _NO_ROOM))})\b")


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for a part of it.

    Raises CacheError, which states the shortfall, when the disk is full.
    """
    with written_whole(path, len(content)) as partial:
        partial.write_bytes(content)


@contextmanager
def written_whole(path: Path, needed: int) -> Iterator[Path]:
    """Give a name to write a file under; it is renamed to `path` once it is on the disk.

    needed: bytes. Raises CacheError, which states the shortfall, when the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    with cleaned_up(partial, path, needed):
        yield partial
        with partial.open("rb+") as file:  # Windows flushes only what may be written
            os.fsync(file.fileno())
        partial.replace(path)
    sync(path.parent)


@contextmanager
def cleaned_up(partial: Path, path: Path, needed: int | None = None) -> Iterator[None]:
    """Remove the file or folder `partial` where the writing of `path` fails inside.

    Raises CacheError, which states the shortfall (needed: bytes), when the disk is full.
    """
    with stating_shortfall(path, needed):  # outside: what is removed is free again
        try:
            yield
        except BaseException:
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)
            raise


@contextmanager
def stating_shortfall(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise CacheError, which names `path` and the shortfall, where the disk gets full inside."""
    try:
        yield
    except Exception as error:
        if is_full_disk(error):
            raise CacheError(shortfall(path, needed)) from error
        raise


def is_full_disk(error: BaseException) -> bool:
    """Whether a disk, or the share of it that one may use, had no room for what was written."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_ROOM
    return _NO_ROOM_WORDS.search(str(error)) is not None


def free_bytes(path: Path) -> int:
    """Return the bytes that are free on the disk where a file or folder is to lie."""
    there = path.absolute()
    existing = next(one for one in (there, *there.parents) if one.exists())
    return shutil.disk_usage(existing).free


def of_bytes(count: int) -> str:
    """Format a size in GiB, MiB or KiB."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
    name = next((name for name, unit in units.items() if count >= unit), "KiB")
    return f"{count / units[name]:.1f} {name}"


def shortfall(path: Path, needed: int | None) -> str:
    """Say how much room is lacking for a file or folder, and what to do."""
    free = free_bytes(path)
    lacking = f"out of disk: {path} cannot be written and {of_bytes(free)} are free"
    if needed is not None:
        lacking = f"out of disk: {path} needs {of_bytes(needed)} and {of_bytes(free)} are free, "
        short = f"{of_bytes(needed - free)} short"
        lacking += short if needed > free else "unless a quota or ulimit says less"
    return f"{lacking}; what is written stays valid: make room, and the same command goes on"


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


def first_damage(
    directory: Path, entries: Collection[dict[str, Any]], verify: bool | None = None
) -> tuple[str, str] | None:
    """Return the first file that is damaged and what is wrong with it; None where all are whole.

    verify: compare checksums; unasked (None) up to 2 GiB.
    """
    if verify is None:
        verify = sum(entry["bytes"] for entry in entries) <= HASHED_AT_OPEN
    problems = ((entry, damage(directory, entry, verify)) for entry in entries)
    return next(((str(directory / e["file"]), problem) for e, problem in problems if problem), None)


def cut_torn_line(path: Path) -> None:
    """Cut an unfinished last line off a file: its writer was killed."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file to disk, or a folder's names, which else may be lost with the power."""
    if os.name != "posix" and path.is_dir():  # Windows cannot
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
