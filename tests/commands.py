"""The commands of the README: in a process of their own, as a user runs them, or in this one."""

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from accelerate.state import AcceleratorState

ROOT = Path(__file__).parents[1]
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run `python *command` as a process of its own."""
    env = os.environ | SURROUNDINGS | environment
    arguments = [sys.executable, *command]
    return subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


@contextmanager
def children_here() -> Iterator[None]:
    """Within it, scripts that the code under test starts as processes run in this one, too."""
    start = subprocess.run

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        ours = command[0] == sys.executable and command[1].endswith(".py")
        return run_here(*command[1:]) if ours else start(command, **options)

    with patch.object(subprocess, "run", run):
        yield


def run_here(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """The same within this process, which saves it the imports: seconds of every command."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    AcceleratorState._reset_state(True)
    with (
        patch.dict(os.environ, SURROUNDINGS | {"ACCELERATE_USE_CPU": "true"} | environment),
        patch.object(sys, "argv", list(command)),
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
