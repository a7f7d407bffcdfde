"""Two kinds of drafters are trained in one folder, in turns, and each goes on where it was."""

import json

from test_loop import log_lines, train

from specdraft.train.fit.set_aside import set_aside_others

EAGLE = {"head.block_size": 1, "head.fusion": "linear", "k": 1}


def test_kinds_of_drafters_take_turns_in_a_folder(tmp_path):
    alone, weights = train(tmp_path / "alone", **{"train.steps": 6})
    run = tmp_path / "shared"
    train(run, **{"train.steps": 6, "train.max_minutes": 1e-9})  # as far as its first step
    steps = [line["step"] for line in log_lines(run)] if (run / "log.jsonl").stat().st_size else []
    set_aside_others(run, "eagle")
    assert not (run / "checkpoints").exists()
    train(run, **EAGLE)
    eagle = (run / "eagle" / "model.safetensors").read_bytes()
    assert {line["step"] for line in log_lines(run)} == {3, 6}
    set_aside_others(run, "falcon")
    there = [json.loads(line)["step"] for line in (run / "log.jsonl").open()]
    assert [step for step in there if step in steps] == steps
    state, again = train(run, **{"train.steps": 6})
    assert state.step == alone.step
    assert all((weights[name] == again[name]).all() for name in weights)
    assert (run / "eagle" / "model.safetensors").read_bytes() == eagle
    assert {one.name for one in (run / "eagle").iterdir()} >= {"checkpoints", "log.jsonl"}


def test_a_kind_that_goes_on_has_its_room(tmp_path):
    train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    set_aside_others(tmp_path, "falcon")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
