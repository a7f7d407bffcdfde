"""Concurrent runs: one per output folder, and each cache is built by one while the others wait."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import run, start
from test_features import SMALL, make_target
from test_tokens import chats, recipe, write

from specdraft.data import lock
from specdraft.data.lock import building_lock, output_lock
from specdraft.data.ranks import ALONE
from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.token_builder import build_tokens
from specdraft.recipes.errors import RecipeError


@pytest.mark.parametrize(
    "command",
    [
        ["train/falcon.py", "recipes/tiny.yaml", "output.dir={}"],
        ["eval/bench.py", "recipes/tiny.yaml", "--out", "{}"],
    ],
    ids=lambda command: command[0],
)
def test_a_second_run_in_an_output_folder_is_refused_naming_the_first(tmp_path, command):
    with output_lock(tmp_path):
        there = {path: path.read_bytes() for path in tmp_path.iterdir()}
        done = run(*(word.format(tmp_path) for word in command))
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: output.dir = {tmp_path}: in use by process {os.getpid()} on ")
    assert "give another output.dir" in line
    assert not list(tmp_path.iterdir())


def test_a_lock_is_free_again_when_its_holder_is_done_or_has_failed(tmp_path):
    for _ in range(2):
        with output_lock(tmp_path):
            assert list(tmp_path.iterdir())
        assert not list(tmp_path.iterdir())
        with pytest.raises(KeyError), output_lock(tmp_path):
            raise KeyError
        assert not list(tmp_path.iterdir())


HOLDING = """
import pathlib, sys, time
from specdraft.data.lock import output_lock
with output_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_run_is_taken_over_with_a_message(tmp_path, capsys):
    (script := tmp_path / "holding.py").write_text(HOLDING)
    holding, folder = start(script, tmp_path / "out"), tmp_path / "out"
    while holding.output[0].read_text() != "held\n":
        assert holding.poll() is None
        time.sleep(0.01)
    there = f"in use by process {holding.pid} on "
    with pytest.raises(RecipeError, match=there), output_lock(folder):
        pass
    holding.send_signal(signal.SIGKILL)
    assert holding.wait() == -signal.SIGKILL
    with output_lock(folder):
        assert f"left behind by process {holding.pid} on " in capsys.readouterr().err
        assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()


THERE = {"pid": 1, "host": "elsewhere", "since": "2001-01-01", "command": "train/falcon.py"}


def held_elsewhere(path: Path, seconds: float) -> Path:
    """A lock file of a holder on another host, last touched so many seconds ago."""
    path.write_text(json.dumps(THERE))
    os.utime(path, times=(time.time() - seconds,) * 2)
    return path


def test_a_holder_on_another_host_counts_until_its_heartbeat_stops(tmp_path, capsys):
    there = held_elsewhere(tmp_path / ".lock", 90)
    refusal = r"process 1 on elsewhere .*, whose last sign of life came 9\d s ago \(after 120 s "
    with pytest.raises(RecipeError, match=refusal), output_lock(tmp_path):
        pass
    assert json.loads(there.read_text()) == THERE
    held_elsewhere(there, 130)
    with output_lock(tmp_path):
        assert "left behind by process 1 on elsewhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_builder_waits_for_one_on_another_host(tmp_path, capsys):
    there = held_elsewhere(tmp_path / ".cache.lock", 0)
    threading.Timer(1.0, there.unlink).start()
    with building_lock(tmp_path / "cache", ALONE):
        assert "waiting for process 1 on elsewhere" in capsys.readouterr().err
        assert json.loads(there.read_text())["pid"] == os.getpid()


def test_a_holder_touches_its_lock_until_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SIGN", 0.01)
    with output_lock(tmp_path):
        os.utime(tmp_path / ".lock", times=(0, 0))
        while (tmp_path / ".lock").stat().st_mtime == 0:
            time.sleep(0.01)
    held_elsewhere(tmp_path / ".lock", 1000)
    time.sleep(0.05)
    assert (tmp_path / ".lock").stat().st_mtime < time.time() - 900


def test_without_system_locks_the_age_of_the_lock_file_decides(tmp_path, monkeypatch):
    """As on some network file systems, where only silence shows that a holder was killed."""

    def unknown(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unknown)
    with output_lock(tmp_path):
        with pytest.raises(RecipeError, match=f"by process {os.getpid()} "), output_lock(tmp_path):
            pass
        os.utime(tmp_path / ".lock", times=(0, 0))
        with output_lock(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [True, False], ids=["there", "to be made"])
def test_a_read_only_folder_is_refused_at_once(tmp_path, monkeypatch, there):
    folder = tmp_path if there else tmp_path / "run"
    if os.geteuid() == 0:  # root may write anywhere
        refused = PermissionError(errno.EACCES, "Permission denied")
        monkeypatch.setattr(lock, "FileLock", Mock(side_effect=refused))
        monkeypatch.setattr(os, "access", lambda *_: False)
    tmp_path.chmod(0o500)
    with pytest.raises(RecipeError, match=f"{folder}: cannot be written"), output_lock(folder):
        pass


def build(settings, meet, place: str) -> None:
    """Build both caches once all processes are ready, and write down where they are."""
    target = make_target()
    meet.wait()
    tokens = build_tokens(settings, target.tokenizer)
    cache = build_features(settings, tokens, target, shard_bytes=SMALL)
    Path(place).write_text(str(cache.directory))


def test_simultaneous_builders_of_the_same_caches_all_get_them(tmp_path):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(40)))
    context, places = multiprocessing.get_context("fork"), [str(tmp_path / n) for n in "012"]
    meet = context.Barrier(len(places), timeout=60)
    running = [context.Process(target=build, args=(settings, meet, place)) for place in places]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    (folder,) = {Path(place).read_text() for place in places}
    assert len(FeatureCache.open(folder, verify=True)) == 40
    assert not list((tmp_path / "cache").glob(".*"))
