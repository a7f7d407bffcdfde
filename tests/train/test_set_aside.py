"""Two kinds of drafters are trained in one folder, in turns, and each goes on where it was."""

from test_loop import log_lines, make_recipe, train

from specdraft.eval.measure.report import training_shown
from specdraft.train.fit.set_aside import set_aside_others

HEAD = {"head.block_size": 1, "head.fusion": "linear"}
EAGLE = HEAD | {"k": 1}


def test_kinds_of_drafters_take_turns_in_a_folder(tmp_path):
    alone, weights = train(tmp_path / "alone", **{"train.steps": 6})
    run = tmp_path / "shared"
    short = {"train.max_minutes": 1e-9, "train.log_every": 1}  # as far as it gets in no time
    train(run, **{"train.steps": 6}, **short)
    steps = [line["step"] for line in log_lines(run)]
    set_aside_others(run, "eagle")
    assert not (run / "checkpoints").exists()
    train(run, **EAGLE)
    eagle = (run / "eagle" / "model.safetensors").read_bytes()
    assert {line["step"] for line in log_lines(run)} == {3, 6}
    set_aside_others(run, "falcon")
    assert [line["step"] for line in log_lines(run)] == steps
    state, again = train(run, **{"train.steps": 6})
    assert state.step == alone.step
    assert all((weights[name] == again[name]).all() for name in weights)
    assert (run / "eagle" / "model.safetensors").read_bytes() == eagle
    assert {one.name for one in (run / "eagle").iterdir()} >= {"checkpoints", "log.jsonl"}


def test_a_kind_that_ended_before_its_first_checkpoint_leaves_nothing_to_another(tmp_path):
    train(tmp_path)
    before = (tmp_path / "log.jsonl").read_bytes()
    set_aside_others(tmp_path, "medusa")
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1}\n')
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "checkpoints" / ".writing-9").mkdir(parents=True)
    set_aside_others(tmp_path, "falcon")
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert list((tmp_path / "tensorboard").rglob("events.*"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-6"]
    assert not {"log.jsonl", "tensorboard"} & {one.name for one in (tmp_path / "falcon").iterdir()}


def test_a_report_shows_the_training_of_its_own_kind(tmp_path):
    recipe = make_recipe(tmp_path)
    train(tmp_path)
    shown = training_shown(recipe, "falcon_tree")
    assert [point["step"] for point in shown] == [3, 6]
    set_aside_others(tmp_path, "eagle")
    train(tmp_path, **EAGLE, **{"train.log_every": 1})
    assert training_shown(recipe, "falcon_tree") == shown
    assert len(training_shown(make_recipe(tmp_path, **HEAD), "eagle_tree")) == 6
    assert training_shown(recipe, "maxgram") == []  # which is counted in no steps


def test_a_kind_that_goes_on_has_its_room(tmp_path):
    train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    set_aside_others(tmp_path, "falcon")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
