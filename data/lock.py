"""One run at a time in a folder that is written: an output folder, a cache that is being built.

The system holds the lock, and lets it go when the process ends, however it ends. The lock's file
says for people who holds it, or who did when it was killed: {"pid", "host", "since", "command"}.
"""

import errno
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specdraft.data.ranks import ALONE, Ranks
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.terminal import say


@contextmanager
def output_lock(folder: Path, ranks: Ranks = ALONE) -> Iterator[None]:
    """Keep other runs out of an output folder; all ranks call this.

    Raises: RecipeError, on every rank, that names the process which is there already.
    """
    with ExitStack() as held:
        holder = ranks.share(_acquire(held, folder / ".lock", folder) if ranks.is_first else None)
        if holder:
            raise RecipeError(
                f"output.dir = {folder}: in use by {holder}; wait until that is done, or give "
                "another output.dir"
            )
        yield


@contextmanager
def building_lock(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Build a folder, which need not exist, alone; all ranks call this, and wait where another
    run builds it."""
    with ExitStack() as held:
        path = folder.with_name(f".{folder.name}.lock")
        if ranks.is_first and (holder := _acquire(held, path, folder)):
            say(f"waiting for {holder}, to which {folder} belongs until it is built")
            _acquire(held, path, folder, timeout=-1)
        ranks.wait()
        yield


def _acquire(held: ExitStack, path: Path, folder: Path, timeout: float = 0) -> str | None:
    """Hold a lock until `held` is left, or say who holds it after `timeout` seconds (-1: wait)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(FileLock(path, timeout=timeout))
    except Timeout:
        return _holder(path) or "another process"
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):
            return None  # where nothing can be written, nobody is in the way
        raise
    if gone := _holder(path):
        say(f"{folder} was left behind by {gone}, which is no more: taking over")
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
    }
    path.write_text(json.dumps(owner))
    held.callback(path.unlink, missing_ok=True)  # before the lock is let go
    return None


def _holder(path: Path) -> str | None:
    """Say who holds a lock, or held it when killed; None where its file does not tell."""
    try:
        owner = json.loads(path.read_text())
        return "process {pid} on {host} since {since} ({command})".format(**owner)
    except (OSError, ValueError, KeyError, TypeError):
        return None
