"""Commands ended repeatedly, at all their stages, by signals and closed terminals.

Each number stands for a command that is started five times in one folder, under some launcher, and
ended at some moment. None of its processes may survive, and none may complain. Then it runs to its
end, and must give the result of an undisturbed run.
"""

import os
import pty
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from select import select
from threading import Event, Thread

import psutil
from commands import ROOT, SURROUNDINGS, run, start
from pairs import ANSWERS, BENCH, CACHE, COSTS, COUNT, FIT, TRAIN
from place import Place, weights
from verdict import of_command

PATIENCE = 90  # seconds until all processes of an ended command are gone
LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
LONGER = ["train.steps=40", "train.save_every=10", "train.eval_every=20"]
DISTIL = ["train/distill.py", "recipes/tiny_distill.yaml", *LONGER, "eval.methods=[plain,ssd]"]
PAPER = ["eval/paper.py", "noise", "--seeds", "0"]


@dataclass(frozen=True)
class Stage:
    """A command; ranks: whether several processes share its work; trained: whether it starts from a
    trained run; kept: the folder of the weights it leaves."""

    command: list[str]
    ranks: bool = False
    trained: bool = False
    kept: str | None = None


STAGES = [
    Stage([*TRAIN, *LONGER], ranks=True, kept="falcon"),
    Stage(CACHE, ranks=True),
    Stage(BENCH, trained=True),
    Stage(ANSWERS, ranks=True),
    Stage(COSTS, trained=True),
    Stage(FIT, trained=True),
    Stage(COUNT, ranks=True),
    Stage(DISTIL, ranks=True, kept="student"),
    Stage(PAPER),
]
HOW = ["ctrl-c", "ctrl-c twice", "closed", "SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"]


def kill(number: int, folder: Path, place: Place) -> tuple[int, str | None]:
    """Start a command and end it, five times; then check its result."""
    random, stage = Random(f"kill {number}"), STAGES[number % len(STAGES)]
    # Two ranks add in another order, so weights are compared only for numbers without ranks.
    ranks = stage.ranks and number // len(STAGES) % 2 == 1
    launchers = ["python", "python", "accelerate", "torchrun"][: 3 + ranks]
    command, kills = overridden(stage, folder, place), 0
    prepare(stage, folder, place)
    for _ in range(5):
        launcher, how, at_work = random.choice(launchers), random.choice(HOW), random.random() < 0.8
        after = random.expovariate(random.choice([0.5, 5]))  # some stages take only a second
        session = Session(launcher, command, folder)
        if (not at_work or session.lasts(PATIENCE, session.is_at_work)) and session.lasts(after):
            kills += 1
            session.end(how)
        told = f"{' '.join(command[:2])} under {launcher}, {how} after {after:.1f} s"
        told += " of work" if at_work else ""
        if found := session.aftermath():
            return kills, f"{told}: {found}"
        if session.code == 0:  # it has finished
            prepare(stage, folder, place)
    done = run(*command)
    if done.returncode:
        return kills, f"{command}: it does not go on: {done.stderr[-1500:]}"
    if not ranks and stage.kept and weights(folder / "run", stage.kept) != whole(stage, place):
        return kills, f"{command}: other weights than undisturbed"
    return kills, None


def prepare(stage: Stage, folder: Path, place: Place) -> None:
    """Fill a folder with exactly what a stage starts from."""
    for name in [path.name for path in folder.iterdir()]:
        shutil.rmtree(folder / name)
    for name in ("run", "cache") if stage.trained else ():
        shutil.copytree(place.folder / name, folder / name)


def overridden(stage: Stage, folder: Path, place: Place) -> list[str]:
    """The command of a stage with its files in a folder."""
    given = {word.split("=")[0] for word in stage.command}
    own = [word for word in place.settings(folder) if word.split("=")[0] not in given]
    if stage.command is PAPER:
        own = [
            word for word in own if not word.startswith(("output.", "eval.methods", "eval.tree"))
        ]
        own += ["--runs", str(folder / "runs")]
    return [*stage.command, *own]


def whole(stage: Stage, place: Place) -> str:
    """The weights of an undisturbed stage."""
    folder = place.folder / "whole" / stage.kept
    if not (folder / "run" / "report.json").is_file():
        done = run(*overridden(stage, folder, place))
        assert done.returncode == 0, done.stderr
    return weights(folder / "run", stage.kept)


class Session:
    """A command that is the session leader of a terminal."""

    def __init__(self, launcher: str, command: list[str], folder: Path):
        self.folder, self.said, self.code, self.fork = folder, b"", None, None
        self.began = time.time()
        if launcher == "python":  # forked with its imports done
            self.terminal, screen = pty.openpty()
            self.fork = start(*command, terminal=os.ttyname(screen))
            self.pid = self.fork.pid
            os.close(screen)
        else:
            self.pid, self.terminal = pty.fork()
            if not self.pid:
                os.chdir(ROOT)
                os.environ.update(SURROUNDINGS)
                os.execv(sys.executable, [sys.executable, *LAUNCHERS[launcher], *command])
        self.closing = Event()
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        # A blocking read would keep the terminal open: silent commands would get no SIGHUP.
        with suppress(OSError):  # the last process with the terminal has ended
            while not self.closing.is_set():
                if select([self.terminal], [], [], 0.05)[0]:
                    self.said += os.read(self.terminal, 4096)

    def is_at_work(self) -> bool:
        """Whether it has written a file in its folder."""
        paths = self.folder.rglob("*")
        return any(path.stat().st_mtime > self.began for path in paths if path.is_file())

    def lasts(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether it runs for so long, or until a condition holds."""
        deadline = time.monotonic() + seconds
        while self._runs() and time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                if until():
                    break
            time.sleep(0.05)
        return self._runs()

    def _runs(self) -> bool:
        if self.code is None and self.fork:
            self.code = self.fork.poll()
        elif self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is None

    def end(self, how: str) -> None:
        """End it as a user, a shell or a scheduler would."""
        if how == "closed":
            self.closing.set()
            self.reader.join()
            os.close(self.terminal)
            self.terminal = None
        elif how.startswith("ctrl-c"):
            for _ in range(1 + how.endswith("twice")):
                with suppress(OSError):
                    os.write(self.terminal, b"\x03")
                time.sleep(0.3)
        else:
            os.kill(self.pid, signal.Signals[how])

    def aftermath(self) -> str | None:
        """Wait until all its processes are gone; return what is wrong with how it ended."""
        deadline = time.monotonic() + PATIENCE
        while self._runs() or self.alive():
            if time.monotonic() > deadline:
                left = [" ".join(one.cmdline()[-8:]) for one in self.alive()]
                for process in self.alive():
                    process.kill()
                return f"after {PATIENCE} s there still are {left}: {self.text[-1500:]}"
            time.sleep(0.1)
        if self.terminal is not None:
            self.reader.join(5)
            os.close(self.terminal)
        lines = re.findall(r"(?:resume|start again) with: ", self.text)
        if len(lines) > 1:
            return f"it was said {len(lines)} times how to go on: {self.text[-1500:]}"
        return of_command(self.code if self.code in (0, 2) else 130, self.text)

    @property
    def text(self) -> str:
        """Its output."""
        return self.said.decode(errors="replace")

    def alive(self) -> list[psutil.Process]:
        """The processes whose command names the folder."""
        there = psutil.process_iter(["cmdline", "status"])
        ours = [one for one in there if one.info["status"] != psutil.STATUS_ZOMBIE]
        where = str(self.folder)
        return [one for one in ours if any(where in word for word in one.info["cmdline"] or ())]
