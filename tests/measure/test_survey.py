"""The table of families shows which work, their special features, and why others are refused."""

import json
import os
import time

from commands import run_here

from specdraft.eval.checkup import survey


def test_every_family_is_tried_once_in_its_own_process(tmp_path, monkeypatch):
    kept = tmp_path / "families.json"
    names = ["llama", "gpt_oss", "cohere", "mamba", "bloom", "lfm2", "jetmoe"]  # views attention
    rows = {row["family"]: row for row in survey.survey(kept, names)}
    assert [rows[name]["result"] for name in names] == [
        "works", "works", "works", "refused", "works", "works", "works",
    ]  # fmt: skip
    assert rows["gpt_oss"]["special"] == ["windows in some layers", "sinks"]
    assert rows["cohere"]["special"] == ["scaled logits"]
    assert "from an empty state only" in rows["mamba"]["why"]
    assert rows["lfm2"]["special"] == ["recurrent states in some layers"]
    assert rows["llama"]["bfloat16"] == "6 identical"
    monkeypatch.setattr(survey, "examine", lambda family: {"family": family, "result": "again"})
    assert [*survey.survey(kept, names)] == [*rows.values()]
    line = survey.page([*rows.values()], "a command").splitlines()
    assert "| gpt_oss | windows in some layers, sinks | works | 6 identical |  |" in line


def test_a_family_that_differs_hangs_or_crashes_gets_a_row_too(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "_own_tokens", lambda target, prompt, **_: [0] * survey.NEW)
    assert survey.examine("llama")["result"] == "differs"
    monkeypatch.setattr(survey, "examine", lambda family: os._exit(3))
    assert "ended with 3" in next(survey.survey(tmp_path / "a", ["llama"]))["why"]
    monkeypatch.setattr(survey, "examine", lambda family: time.sleep(60))
    assert "longer than 1 s" in next(survey.survey(tmp_path / "b", ["llama"], 1.0))["why"]
    monkeypatch.setattr(survey, "examine", lambda family: {"family": family, "why": "again"})
    for name, why in (("a", "its process ended with 3"), ("b", "again")):  # who was late is
        assert next(survey.survey(tmp_path / name, ["llama"]))["why"] == why


def test_the_command_writes_the_table_and_keeps_earlier_families(tmp_path):
    done = run_here("eval/survey.py", "llama", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "families.json").read_text())
    assert [row["family"] for row in written["rows"]] == ["llama"]
    assert "| llama |" in (tmp_path / "families.md").read_text()
    # Trying another family keeps those on the page.
    assert run_here("eval/survey.py", "mistral", "--out", str(tmp_path)).returncode == 0
    page = (tmp_path / "families.md").read_text()
    assert "| llama |" in page
    assert "| mistral |" in page
    unknown = run_here("eval/survey.py", "lama", "--out", str(tmp_path))
    assert (unknown.returncode, "lama: no family of transformers" in unknown.stderr) == (2, True)
    (tmp_path / "families.json").write_text("{")
    broken = run_here("eval/survey.py", "llama", "--out", str(tmp_path))
    assert (broken.returncode, "has no table of families" in broken.stderr) == (2, True)
