"""Two kinds of drafters are trained in turns in one folder, and each resumes where it stopped."""

from test_loop import log_lines, make_recipe, train

from specdraft.eval.measure.report import training_shown
from specdraft.train.fit.set_aside import set_aside_others

HEAD = {"head.block_size": 1, "head.fusion": "linear"}
EAGLE = HEAD | {"k": 1}


def test_kinds_of_drafters_can_be_trained_in_turns_in_one_folder(tmp_path):
    alone, weights = train(tmp_path / "alone", **{"train.steps": 6})
    run = tmp_path / "shared"
    short = {"train.max_minutes": 1e-9, "train.log_every": 1}  # stops almost at once
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


def test_a_run_without_a_checkpoint_leaves_nothing_to_another_kind(tmp_path):
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
    assert training_shown(recipe, "maxgram") == []  # it has no steps


def test_resuming_the_same_kind_touches_no_file(tmp_path):
    train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    set_aside_others(tmp_path, "falcon")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
