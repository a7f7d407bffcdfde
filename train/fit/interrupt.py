"""Ctrl-C and SIGTERM as a request: finish the step, save, then stop."""

import shlex
import signal
import sys
import threading
from typing import Self


class StopRequest:
    """Context in which the first SIGINT or SIGTERM only sets `asked`; a second one acts at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python only lets the main thread set handlers; elsewhere there is nobody to ask.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        # Not left to the handler before this one: a process started in the background ignores
        # SIGINT, and then a second one would do nothing.
        if self.asked:
            raise KeyboardInterrupt("stopped at once; what was saved before stays")
        self.asked = True


def resume_command() -> str:
    """Return the command line that continues this process."""
    return shlex.join(["accelerate", "launch", *sys.argv])
