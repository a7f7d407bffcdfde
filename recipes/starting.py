"""The seconds in which a command imports what it needs: a signal ends it in a line there, too.

Importing this is what does it, whatever is imported next; `imported` ends it.
"""

import os
import signal
import threading
from contextlib import suppress

_previous: dict[int, object] = {}


def imported() -> None:
    """Restore the signals' handlers: importing is over."""
    while _previous:
        signal.signal(*_previous.popitem())


def _leave(*_: object) -> None:
    with suppress(OSError):  # a terminal that was closed
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"\ninterrupted before anything began\n")
    os._exit(130)  # an exception could get lost in whatever is being imported


if threading.current_thread() is threading.main_thread():
    for _name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the last is none on Windows
        _number = getattr(signal, _name, None)
        # Ignored by nohup, or by a shell in the background.
        if _number and signal.getsignal(_number) != signal.SIG_IGN:
            _previous[_number] = signal.signal(_number, _leave)
