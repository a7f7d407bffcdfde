"""Ctrl-C, SIGTERM and SIGHUP: every command keeps what is whole, says how to go on, and stops."""

import ctypes
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from specdraft.recipes.terminal import say_at_once

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in dir(signal)]
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # what launchers leave there
Returned = TypeVar("Returned")
_PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal to get when the parent dies


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a chat where Ctrl-C only ends an answer."""


class Abandoned(KeyboardInterrupt):
    """An interruption that leaves threads behind, for which Python would wait when it ends."""


class StopRequest:
    """Context in which a signal raises KeyboardInterrupt: what every command runs in.

    saves: who is inside has a step to finish and to save. The first signal sets `asked` and says
    so; then only another Ctrl-C raises, and not while it is saved.
    """

    def __init__(self, saves: bool = False) -> None:
        self.asked, self._saves = False, saves
        self._ended = self._cut = self._saving = False
        self._raised, self._lost = 0, False  # a signal's number; whether what it raised got lost
        self._parent = os.getppid()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python only lets the main thread set handlers; elsewhere there is nobody to ask. Ranks
        # behind the first have nothing to say, and may be where no handler runs: in a barrier.
        speaks = self._saves or is_first_process()
        if speaks and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Ignored by nohup, or by a shell in the background; training saves all the same.
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if not ignored or (self._saves and number == signal.SIGINT):
                    self._previous[number] = signal.signal(number, self._ask)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._raise_again
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        sys.unraisablehook = self._hook
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.asked and not is_first_process() and kind and issubclass(kind, Exception):
            raise KeyboardInterrupt from None  # the first rank has stopped, and broke what joins us

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Context in which the first signal raises, too, for work that is done again by the next
        run. Raises KeyboardInterrupt where one has come before."""
        if self.asked:
            raise KeyboardInterrupt
        self._cut = True
        try:
            yield
        finally:
            self._cut = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which no signal raises."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _raise_again(self, lost: "sys.UnraisableHookArgs") -> None:
        """Have an interruption that came in a `__del__`, where Python drops it, come once more."""
        if not self._raised or not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook(lost)
            return
        self._lost, left = True, threading.Event()

        def again(number: int) -> None:
            left.wait()  # what comes while this runs is dropped, too
            time.sleep(0.01)
            os.kill(os.getpid(), number)

        threading.Thread(target=again, args=(self._raised,)).start()
        left.set()

    def _ask(self, number: int, _: object) -> None:
        again, self.asked, pressed = self.asked, True, number == signal.SIGINT
        # One Ctrl-C or closed terminal ends launcher and shell, whose signals come behind it.
        echo = self._ended or (again and os.getppid() != self._parent)
        self._ended |= not pressed
        if self._saves and not again and is_first_process():
            say_at_once("saving after this step .. (Ctrl-C again: stop at once, unsaved)")
        if self._saves:
            raises = pressed and not self._saving if again else self._cut
        else:
            raises = pressed or not echo
        if raises or (self._lost and not self._saving):
            self._raised, self._lost = number, False
            raise KeyboardInterrupt if pressed else Terminated


def abandonable(call: Callable[..., Returned], *given: Any, **options: Any) -> Returned:
    """Return what a call returns; do not wait for the threads it starts where it is interrupted.

    huggingface_hub moves files in pools, and leaving a pool waits for a file's end: of gigabytes.
    Raises what the call raises, and Abandoned.
    """
    done: Future[Returned] = Future()

    def work() -> None:
        try:
            done.set_result(call(*given, **options))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        return done.result()
    except KeyboardInterrupt as interrupt:
        raise Abandoned(*interrupt.args) from None


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Context whose interruption says what is kept of the work inside, so that going on pays."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(f"interrupted; {kept()}") from None


def is_first_process() -> bool:
    """Whether no launcher has made this process the second or later of a run."""
    return os.environ.get("RANK", "0") == "0"


def resume_command() -> str:
    """Return the command line that continues this process, as it was typed: its launcher's."""
    command = (_launchers() or [sys.orig_argv])[-1]
    interpreter, script = Path(command[0]), Path(*command[1:2])
    if script.is_absolute() and script.parent == interpreter.parent:
        command = [script.name, *command[2:]]  # installed beside its interpreter: on the PATH
    return shlex.join(command)


def stop_with_launcher() -> None:
    """End this process with its launcher, which passes no signal on when it is ended.

    Raises: Terminated where it was ended before it could.
    """
    launched = _launchers()
    if sys.platform == "linux" and launched:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not launched and any(name in os.environ for name in _LAUNCHED) and _is_orphan():
        raise Terminated


def _launchers() -> list[list[str]]:
    """Return the command lines of our launchers, the nearest first: parents' that end in ours."""
    ours = [*dropwhile(lambda word: word.startswith("-"), sys.orig_argv[1:])]
    found = []
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            command = parent.cmdline()
            if not ours or command[-len(ours) :] != ours:
                break
            found.append(command)
    return found


def _is_orphan() -> bool:
    """Whether the parent is the process that those get whose own is gone."""
    parent = psutil.Process().parent()
    return parent is None or parent.pid == 1 or parent.name() == "systemd"
