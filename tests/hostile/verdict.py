"""What no input and no kill may cause: a traceback, an internal error, a hang, a crash."""

import re
import signal
import traceback
from collections.abc import Callable

from commands import ROOT

from specdraft.recipes.errors import UserError

PATIENCE = 60  # seconds per input
OURS = re.compile(rf'File "[^"]*(?:{ROOT}|specdraft)/(?:recipes|models|data|eval|train)/')
ESCAPES = re.compile("\x1b(?!\\[[0-9;]*[mKA])")  # except colours and a progress bar's codes


def refused_or_fine(call: Callable[[], object]) -> str | None:
    """Call it; return what is wrong with how that went. A short refusal is right."""
    previous = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(PATIENCE)
    try:
        call()
    except UserError as error:
        return None if len(str(error)) < 8000 else f"{len(str(error))} characters of a message"
    except OSError as error:
        return None if error.errno is not None else _place(error)
    except Exception as error:
        return _place(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return None


def of_command(code: int, output: str) -> str | None:
    """What is wrong with how a command ended; 0, 1 with a reason, 2, 130 or a signal are right."""
    if "internal error" in output:
        return next(line for line in output.splitlines() if "internal error" in line)
    if found := _our_traceback(output):
        return found
    if ESCAPES.search(output):
        return f"an escape sequence: {ESCAPES.search(output)}"
    if code not in (0, 1, 2, 130, *(-number for number in (1, 2, 9, 15))):
        return f"exit code {code}: {output[-300:]}"
    return None


def _our_traceback(output: str) -> str | None:
    """Whether there is a traceback through a file of ours; launchers print their own."""
    for part in output.split("Traceback (most recent call last)")[1:]:
        if OURS.search(part):
            return f"Traceback{part[:1500]}"
    return None


def _hangs(*_: object) -> None:
    raise RuntimeError(f"it hangs: after {PATIENCE} s it is still at it")


def _place(error: Exception) -> str:
    """An error, and the place in our code that it came from."""
    at = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if OURS.match(f'File "{frame.filename}')
    ]
    return f"{type(error).__name__}: {str(error)[:300]} at {' < '.join(at[:-4:-1])}"
