"""Scripts as processes, forked from one that has done their imports.

Importing torch and transformers takes as long as a small training. A forked process has its own
pid, signals and exit code all the same.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

ON_THE_WAY = ("matplotlib.figure",)  # what runs import when they need it, if it is installed
# Read while torch is imported. The second: who asks for a GPU does not initialise CUDA, which could
# not be used behind a fork.
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def start(command: Sequence[str], modules: Sequence[str], log: Path) -> BaseProcess:
    """Start `python *command` in a session of its own with one thread, its errors in a log. It gets
    SIGTERM when this process ends, whatever ends it.

    modules: what it imports; those of the first call are imported once for all that follow.
    """
    with _surroundings():  # of the forking process, which the first call starts
        what = [*command], dict(os.environ), log
        process = _forking(tuple(modules)).Process(target=_become, args=what)
        process.start()
    return process


@contextmanager
def _surroundings() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(SURROUNDINGS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def _forking(modules: Sequence[str]) -> BaseContext:
    # Elsewhere, what libraries start when they are imported may not survive a fork.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["__main__", *modules, *ON_THE_WAY])
    return context


def _become(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    os.setsid()  # Ctrl-C would reach it beside our caller's SIGTERM, and twice is "at once"
    Thread(target=_stop_with_caller, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "w") as nothing, log.open("w") as errors:
        os.dup2(nothing.fileno(), sys.__stdout__.fileno())
        os.dup2(errors.fileno(), sys.__stderr__.fileno())
    sys.argv, sys.orig_argv = [*command], [sys.executable, *command]
    runpy.run_path(command[0], run_name="__main__")


def _stop_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None  # the process that called `start`
    caller.join()
    os.kill(os.getpid(), signal.SIGTERM)
