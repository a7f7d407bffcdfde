"""One run at a time in a folder that is written: an output folder, a cache that is being built.

The system holds the lock (flock), and lets it go when the process ends, however it ends. The lock's
file says for people who holds it, or who did when it was killed: {"pid", "host", "since",
"command"}; it is touched now and then as long as its holder lives. Network file systems may keep
locks within a host (NFS with local_lock, sshfs) or have none. There the file counts: a holder on
another host is alive until its file has not been touched for two minutes, by clocks that agree to
within less. Two hosts that come within the same second may both get such a lock.
"""

import errno
import json
import math
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdraft.data.atomic import stating_shortfall
from specdraft.data.ranks import ALONE, Ranks
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.terminal import say

SIGN, SILENT = 20.0, 120.0  # seconds between two signs of life, and without one: then it is dead
_NOT_WRITABLE = (errno.EACCES, errno.EROFS)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def output_lock(folder: Path, ranks: Ranks = ALONE) -> Iterator[None]:
    """Keep other runs out of an output folder; all ranks call this.

    Raises: RecipeError, on every rank, that names the process which is there already, or for a
    folder that cannot be written: now, and not behind the work of hours.
    """
    with ExitStack() as held:
        holder = ranks.share(_acquire(held, folder / ".lock", folder) if ranks.is_first else None)
        if ranks.share(ranks.is_first and not os.access(folder, os.W_OK | os.X_OK)):
            raise RecipeError(
                f"output.dir = {folder}: cannot be written by this user; give another output.dir "
                "or --out, or yourself the right to write there"
            )
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
            while _acquire(held, path, folder):
                time.sleep(0.5)
        ranks.wait()
        yield


def _acquire(held: ExitStack, path: Path, folder: Path) -> str | None:
    """Take a lock, held until `held` is left. Return None, or who has it where it is taken."""
    with ExitStack() as attempt:
        locked = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not 0: a holder that has just come needs a moment to say who it is.
            attempt.enter_context(FileLock(path, timeout=0.2, fallback_to_soft=False))
        except Timeout:
            return _told(_holder(path)) or "another process"
        except OSError as error:
            if error.errno in _NOT_WRITABLE:
                return None  # where nothing can be written, nobody is in the way
            if error.errno not in _NO_LOCKS:
                raise
            locked = False
        if there := _holder(path):
            silent = _silent(path)
            # On this host the lock would be its own.
            if silent < SILENT and not (locked and there["host"] == socket.gethostname()):
                return (
                    f"{_told(there)}, whose last sign of life came {silent:.0f} s ago (after "
                    f"{SILENT:.0f} s without one it is taken for dead)"
                )
            say(f"{folder} was left behind by {_told(there)}, which is no more: taking over")
        _own(attempt, path)
        held.push(attempt.pop_all())
    return None


def _own(held: ExitStack, path: Path) -> None:
    """Say in a lock's file that this process holds it, and lives, until `held` is left."""
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
    }
    with stating_shortfall(path):
        path.write_text(json.dumps(owner))
    held.callback(path.unlink, missing_ok=True)  # before the lock is let go
    done = threading.Event()
    held.callback(done.set)
    threading.Thread(target=_show_life, args=(path, done), daemon=True).start()


def _show_life(path: Path, done: threading.Event) -> None:
    while not done.wait(SIGN):
        with suppress(OSError):  # removed by somebody, or out of reach for a while
            os.utime(path)


def _silent(path: Path) -> float:
    """Seconds since a holder's last sign of life; endless where its file is gone meanwhile."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return math.inf


def _holder(path: Path) -> dict[str, Any] | None:
    """Who holds a lock, or held it when killed; None where its file does not tell."""
    try:
        owner = json.loads(path.read_text())
        return {name: owner[name] for name in ("pid", "host", "since", "command")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _told(owner: dict[str, Any] | None) -> str:
    return owner and "process {pid} on {host} since {since} ({command})".format(**owner)
