"""Scripts in their own processes, forked from one that has done their imports once.

Importing torch and transformers takes five seconds of every `python train/falcon.py`; a forked
process still has its own pid, signals and exit code.

As a script it is that process: python tests/forks.py MODULE ..
"""

import atexit
import faulthandler
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

# Imports of the tests' scripts, ours and others', as far as they are installed.
MODULES = ["specdraft.eval.bench", "specdraft.eval.generate", "specdraft.eval.paper"]
MODULES += ["specdraft.train.falcon", "specdraft.train.distill", "pytest"]
MODULES += ["deepspeed", "matplotlib.backends.backend_agg"]
# Read when the interpreter starts or huggingface_hub is imported, so shared by all children.
ONCE = ("HF_HOME", "HF_ENDPOINT", "HF_HUB", "PYTHON")


class Nursery:
    """The process with the imports done, for children in an environment like its own."""

    def __init__(self, env: Mapping[str, str], modules: list[str] = MODULES):
        self.env = dict(env)
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: object) -> int | None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@cache
def nursery() -> Nursery:
    """The one nursery of this worker's tests."""
    found = Nursery(os.environ)
    atexit.register(found.close)
    return found


class Fork:
    """`python *command`, with the interface of `subprocess.Popen`; its output goes to files."""

    def __init__(
        self,
        *command: str,
        cwd: Path,
        env: Mapping[str, str],
        parent: Nursery | None = None,
        own_session: bool = False,
        largest_file: int | None = None,
        terminal: str | None = None,
    ):
        self.parent, self.returncode = parent or nursery(), None
        there, here = ({k: e[k] for k in e if k.startswith(ONCE)} for e in (self.parent.env, env))
        assert there == here, "read when modules are imported: start such a process afresh"
        self.folder = TemporaryDirectory()
        self.output = [Path(self.folder.name, name) for name in ("out", "err")]
        for path in self.output:
            path.touch()
        self.pid = self.parent.ask(
            command=[str(word) for word in command],
            cwd=str(cwd),
            env=dict(env),
            streams=[terminal] * 3 if terminal else [os.devnull, *map(str, self.output)],
            own_session=own_session,
            largest_file=largest_file,
        )

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.ask(ended=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 600) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGUSR1)
                time.sleep(1)
                self.send_signal(signal.SIGKILL)
                late = subprocess.TimeoutExpired(str(self.pid), timeout)
                late.add_note(self.output[1].read_text(errors="replace")[-8000:])
                raise late
            time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        self.wait(timeout)
        return tuple(path.read_text(errors="replace") for path in self.output)


# In the forking process


def serve(modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for the output of imported modules
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    alive = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            alive.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                end(partial(become, **request))
            alive.add(answer)
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()
    for pid in alive:  # left by failed tests
        os.kill(pid, signal.SIGKILL)


def end(work: Callable[[], None]) -> None:
    """Run it as the last work of this process, which then exits as the interpreter would."""
    code: object = 0
    try:
        work()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(
    command: list[str],
    cwd: str,
    env: dict[str, str],
    streams: list[str],
    own_session: bool,
    largest_file: int | None,
) -> None:
    """Run a command as the process that `python *command` starts."""
    if own_session:
        os.setsid()
    for number, path in enumerate(streams):
        os.dup2(stream := os.open(path, os.O_RDWR | os.O_APPEND), number)
        os.close(stream)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)  # a process that hangs prints where
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
    sys.orig_argv = ["python", *command]
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1:])
