"""A short part of the attacks: some corrupt inputs of every kind, and a tampered run."""

import signal
from pathlib import Path
from random import Random

import pytest
from fuzz import KINDS, fuzz
from kills import PATIENCE, Session
from mangle import WAYS
from place import Place
from tampers import tamper
from verdict import of_command, refused_or_fine

from specdraft.recipes.errors import RecipeError


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("hostile") / "place")


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_corrupt_inputs_are_refused_briefly_or_are_harmless(place, tmp_path, kind):
    for number in range(kind, 12 * len(KINDS), len(KINDS)):
        (folder := tmp_path / str(number)).mkdir()
        assert fuzz(number, folder, place) == (1, None), number


def test_a_tampered_file_is_refused_or_without_effect(place, tmp_path):
    assert tamper(0, tmp_path, place) == (1, None)


def test_a_closed_terminal_ends_a_silent_command(tmp_path):
    script, begun = tmp_path / "silent.py", tmp_path / "begun"
    script.write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")
    session = Session("python", [str(script)], tmp_path)
    assert session.lasts(PATIENCE, begun.exists)
    session.end("closed")
    assert not session.lasts(10)
    assert session.code == -signal.SIGHUP
    assert session.aftermath() is None


def test_the_verdicts_recognise_the_faults_they_look_for():
    """Otherwise attacks without a finding would prove nothing."""

    def refused(message: str) -> None:
        raise RecipeError(message)

    assert refused_or_fine(lambda: refused("short")) is None
    assert "characters" in refused_or_fine(lambda: refused("x" * 10_000))
    assert "KeyError" in refused_or_fine(lambda: {}["a"])
    assert of_command(2, "error: nothing there\n") is None
    assert "internal error" in of_command(1, "\ninternal error: KeyError: 7\n")
    assert "escape" in of_command(0, "\x1b]52;c;aGk=\x07")
    assert "exit code -11" in of_command(-11, "")
    inside = Path(__file__).parents[2] / "recipes" / "errors.py"
    trace = f'Traceback (most recent call last):\n  File "{inside}", line 75, in guarded\n'
    assert "Traceback" in of_command(1, trace)
    assert all(way(b"some bytes", Random(3)) != b"some bytes" for way in WAYS)
