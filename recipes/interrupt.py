"""Ctrl-C, SIGTERM and SIGHUP: every command keeps what is whole, says how to go on, and stops."""

import ctypes
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in dir(signal)]
_PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal to get when the parent dies


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a chat where Ctrl-C only ends an answer."""


class StopRequest:
    """Context in which a signal raises KeyboardInterrupt: what every command runs in.

    deferred: the first one only sets `asked`, for who has a step to finish; a second one raises.
    """

    def __init__(self, deferred: bool = False) -> None:
        self.asked, self.deferred = False, deferred
        self._parent = os.getppid()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python only lets the main thread set handlers; elsewhere there is nobody to ask. Ranks
        # behind the first have nothing to say, and may be where no handler runs: in a barrier.
        speaks = self.deferred or is_first_process()
        if speaks and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Ignored by nohup, or by a shell in the background; training saves all the same.
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if not ignored or (self.deferred and number == signal.SIGINT):
                    self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        parent, self._parent = self._parent, os.getppid()
        again, self.asked = self.asked, True
        if again and parent != self._parent:  # its launcher, ended by the same Ctrl-C
            return
        if again or not self.deferred:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Have an interruption say what is kept of the work inside: there is a point in going on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(f"interrupted; {kept()}") from None


def is_first_process() -> bool:
    """Whether no launcher has made this process the second or later of a run."""
    return os.environ.get("RANK", "0") == "0"


def resume_command() -> str:
    """Return the command line that continues this process: its launcher's, where it has one."""
    command = _launcher() or ["python", *sys.argv]
    script = Path(command[1])
    if script.is_absolute() and script.parent == Path(command[0]).parent:
        command = [script.name, *command[2:]]  # installed beside its interpreter: on the PATH
    return shlex.join(command)


def stop_with_launcher() -> None:
    """Have a launcher that is ended take this process along; it passes no signal on."""
    if sys.platform == "linux" and _launcher():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _launcher() -> list[str] | None:
    """Return the parent's command line if it ends in ours: `accelerate launch SCRIPT ..`."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        return None
    return command if command[-len(sys.argv) :] == sys.argv else None
