"""Files of a run and its caches, corrupted one at a time: refused by name, or without effect."""

import json
import shutil
from pathlib import Path
from random import Random

from commands import run
from mangle import spoilt
from place import Place, weights
from verdict import of_command

MORE = ["train.steps=8"]  # more than the run has, so that it resumes
BENCH = ["--methods", "plain,falcon_chain"]


def tamper(number: int, folder: Path, place: Place) -> tuple[int, str | None]:
    """Corrupt the file of a number, and run what reads it."""
    random = Random(f"tamper {number}")
    for name in ("run", "cache"):
        shutil.copytree(place.folder / name, folder / name)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[number % len(files)]
    how = spoil(path, random)
    name = path.relative_to(folder)
    if found := consequence(name, folder, place):
        return 1, f"{name} {how}: {found}"
    return 1, None


def spoil(path: Path, random: Random) -> str:
    """Corrupt a file; return how."""
    content, way = path.read_bytes(), random.random()
    path.unlink()
    if way < 0.1:
        return "removed"
    if way < 0.15:
        path.mkdir()
        return "made a folder"
    if way < 0.2:
        path.symlink_to("/etc/hostname")
        return "made a link"
    path.write_bytes(spoilt(content, random))
    return f"spoilt to {path.stat().st_size} of {len(content)} bytes"


def consequence(name: Path, folder: Path, place: Place) -> str | None:
    """Return what is wrong with the commands that read a file, or None."""
    settings = ["recipes/tiny.yaml", *place.settings(folder)]
    if name.parts[1] == "falcon":
        done = run("eval/bench.py", *settings, *BENCH, "--out", str(folder / "bench"))
        same = done.returncode or steps(folder / "bench") == place.expected["bench"]
    else:
        done = run("train/falcon.py", *settings, *MORE)
        same = done.returncode or weights(folder / "run") == place.expected["train"]
    if found := of_command(done.returncode, done.stdout + done.stderr):
        return found
    if not same:
        return "taken as whole: what came of it is something else"
    pushed = run("models/push.py", str(folder / "run"), "owner/name", "--dry-run")
    said = pushed.stdout + pushed.stderr
    if pushed.returncode == 0 and (str(folder) in pushed.stdout or "hostname" in pushed.stdout):
        return f"pushed: {pushed.stdout[-500:]}"
    return of_command(pushed.returncode, said)


def steps(folder: Path) -> list[int]:
    """The number of steps of each method."""
    return [each["steps"] for each in json.loads((folder / "report.json").read_text())["runs"]]
