"""Run commands as a user does, in their own process, or within this one."""

import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from accelerate.state import AcceleratorState
from forks import Fork

ROOT = Path(__file__).parents[1]
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def start(
    *command: object,
    cwd: Path = ROOT,
    own_session: bool = False,
    largest_file: int | None = None,
    terminal: str | None = None,
    **environment: str,
) -> Fork:
    """Start `python *command` in its own process, forked from one with the imports done.

    own_session: give it a session, which then has only the processes that it starts.
    largest_file: limit of file sizes in bytes.
    terminal: used for its streams instead of files.
    """
    how = {"own_session": own_session or terminal is not None, "largest_file": largest_file}
    env = os.environ | SURROUNDINGS | environment
    return Fork(*command, cwd=cwd, env=env, terminal=terminal, **how)


def run(*command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run `python *command` to its end."""
    process = start(*command, cwd=cwd, **environment)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_ranks(*command: object, count: int = 2, **environment: str) -> list[Fork]:
    """Start it as several ranks, with the environment variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    there |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} | environment
    ranks = map(str, range(count))
    return [start(*command, **there, RANK=rank, LOCAL_RANK=rank) for rank in ranks]


def end(ranks: list[Fork]) -> str:
    """Wait until all are done; return their output."""
    try:
        return "".join(rank.communicate(timeout=300)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)


def run_afresh(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """The same in a new interpreter, for launchers and for settings that are read on import."""
    env = os.environ | SURROUNDINGS | environment
    arguments = [sys.executable, *command]
    return subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def run_here(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """The same within this process, which saves seconds of imports per command."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    AcceleratorState._reset_state(True)
    with (
        patch.dict(os.environ, SURROUNDINGS | {"ACCELERATE_USE_CPU": "true"} | environment),
        patch.object(sys, "argv", list(command)),
        patch.object(sys, "orig_argv", ["python", *command]),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    AcceleratorState._reset_state(True)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
