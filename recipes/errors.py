"""What a user did wrong, said in a line or two, and how an entry point reports it.

Every floor raises a `UserError` for bad input; `entry` turns it into a message and exit code 2.
Anything else is a fault of ours: one line and exit code 1, the traceback on request.
"""

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable

from specdraft.recipes.interrupt import (
    StopRequest,
    is_first_process,
    resume_command,
    stop_with_launcher,
)
from specdraft.recipes.terminal import LONGEST, say, visible

# What gloo and NCCL make of a rank that is no more.
_LOST = re.compile("closed by peer|reset by peer|remote process exited|Broken pipe")


class UserError(Exception):
    """Bad input: the message names the value, what is allowed and what to do next."""


class RecipeError(UserError):
    """A recipe key, type, value or combination that is not allowed."""


class DataError(UserError):
    """Conversations, prompts or templates that cannot be used."""


class CacheError(UserError):
    """A token or feature cache that is damaged or belongs to something else."""


class HeadError(UserError):
    """A trained head or a counted table that is missing, damaged or none."""


class HubError(UserError):
    """A Hub that does not give or take a drafter."""


class TargetError(UserError):
    """A target that is missing, unsupported or not the one a head was made for."""


def in_a_line(error: BaseException, kind: bool = False) -> str:
    """Return the first line of an error's message, cut to 300 characters; its type if it has none.

    A first line that only announces the second has it behind. kind: put its type before the message
    in any case.
    """
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if not lines:
        return name
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    first = visible(" ".join(first.split()))[:300]
    return f"{name}: {first}" if kind else first


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a script's main: exit 2 for bad input, 1 for a fault of ours, and 130 for Ctrl-C,
    SIGTERM and SIGHUP, with the command that goes on."""

    @functools.wraps(main)
    def guarded() -> None:
        resume = resume_command()  # asked now: a launcher may be gone by then
        with StopRequest():
            try:
                stop_with_launcher()
                main()
            except Exception as error:
                _fail(error)
            except KeyboardInterrupt as interrupt:
                if is_first_process():
                    kept = f"{interrupt}; resume" if str(interrupt) else "interrupted; start again"
                    say(f"\n{kept} with: {resume}")
                sys.exit(130)

    return guarded


def _fail(error: Exception) -> None:
    if os.environ.get("SPECDRAFT_DEBUG") == "1":
        traceback.print_exc()
    # Out of disk, no permission, ...: the system's own words name the cause and the file.
    if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno is not None):
        say(f"error: {error}")
        sys.exit(2)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and _LOST.search(str(error)):
        if is_first_process():
            say("error: another process of this run has ended, and said why if it could")
        sys.exit(1)
    what = f"{type(error).__name__}: {error}"[:LONGEST]
    say(f"internal error: {what} (set SPECDRAFT_DEBUG=1 for the traceback)")
    sys.exit(1)
