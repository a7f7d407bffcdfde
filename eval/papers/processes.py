"""Scripts as processes, forked from one that has done their imports.

Importing torch and transformers takes as long as a small training. A forked process has its own
pid, signals and exit code all the same.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from specdraft.recipes.interrupt import STOPS_WITH

ON_THE_WAY = ("matplotlib.figure",)  # what runs import when they need it, if it is installed


def start(command: Sequence[str], modules: Sequence[str], log: Path) -> BaseProcess:
    """Start `python *command` with one thread, its errors in a log.

    modules: what it imports; those of the first call are imported once for all that follow.
    """
    with _one_thread():  # the forking process starts here, and torch reads this when it is imported
        process = _forking(tuple(modules)).Process(target=_become, args=([*command], log))
        process.start()
    return process


@contextmanager
def _one_thread() -> Iterator[None]:
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def _forking(modules: Sequence[str]) -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *modules, *ON_THE_WAY])
    return context


def _become(command: Sequence[str], log: Path) -> None:
    # In a session of its own: Ctrl-C would reach it beside our SIGTERM, and twice is "at once".
    os.setsid()
    os.environ[STOPS_WITH] = str(os.getppid())  # which ends with the process that called it
    with open(os.devnull, "w") as nothing, log.open("w") as errors:
        os.dup2(nothing.fileno(), sys.__stdout__.fileno())
        os.dup2(errors.fileno(), sys.__stderr__.fileno())
    sys.argv, sys.orig_argv = [*command], [sys.executable, *command]
    runpy.run_path(command[0], run_name="__main__")
