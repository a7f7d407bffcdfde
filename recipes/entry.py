"""What every command runs in, imported before all else: how it ends, whatever ends it.

A `UserError` is a message and exit code 2. Anything else is a fault of ours: one line and exit code
1, the traceback on request.
"""

from specdraft.recipes.starting import imported

import errno
import functools
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from specdraft.recipes.errors import UserError
from specdraft.recipes.interrupt import (
    Abandoned,
    StopRequest,
    is_first_process,
    resume_command,
    stop_with_launcher,
)
from specdraft.recipes.terminal import LONGEST, say

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
# What gloo and NCCL make of a rank that is no more.
_LOST = re.compile("closed by peer|reset by peer|remote process exited|Broken pipe")


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a script's main: exit 2 for bad input, 1 for a fault of ours, and 130 for Ctrl-C,
    SIGTERM and SIGHUP, with the command that goes on. Its script has imported all by now."""
    imported()

    @functools.wraps(main)
    def guarded() -> None:
        resume = None
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, io.TextIOWrapper):  # no character ends a command
                stream.reconfigure(errors=errors)
        with StopRequest():
            try:
                resume = resume_command()  # asked now: a launcher may be gone by then
                stop_with_launcher()
                main()
            except Exception as error:
                _fail(error)
            except KeyboardInterrupt as interrupt:
                if is_first_process():
                    kept = f"{interrupt}; resume" if str(interrupt) else "interrupted; start again"
                    say(f"\n{kept} with: {resume or resume_command()}")
                if isinstance(interrupt, Abandoned):
                    _leave()
                sys.exit(130)

    return guarded


def _leave() -> None:
    """End now, without waiting for other threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # gone, or closed
            stream.flush()
    os._exit(130)


def _remedy(error: Exception) -> str:
    """Say what to do about a file that this user may not write, or not read; else nothing."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return ""
    return "; give yourself access, or another place (output.dir, data.cache_dir)"


def _fail(error: Exception) -> None:
    if os.environ.get("SPECDRAFT_DEBUG") == "1":
        traceback.print_exc()
    # Out of disk, no permission, ...: the system's own words name the cause and the file.
    if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno is not None):
        say(f"error: {error}{_remedy(error)}")
        sys.exit(2)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and _LOST.search(str(error)):
        if is_first_process():
            say("error: another process of this run has ended, and said why if it could")
        sys.exit(1)
    what = f"{type(error).__name__}: {error}"[:LONGEST]
    say(f"internal error: {what} (set SPECDRAFT_DEBUG=1 for the traceback)")
    sys.exit(1)
