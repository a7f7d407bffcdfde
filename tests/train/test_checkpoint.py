"""Checkpoints: resumed bit for bit, complete or absent, and only by the recipe that made them."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import test_loop
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from commands import end, start, start_ranks
from safetensors.torch import load_file
from test_loop import ToyRows, assert_close, log_lines, make_head, train

from specdraft.data.atomic import of_bytes
from specdraft.models.falcon import FalconHead
from specdraft.models.weights.checksums import write_sums
from specdraft.recipes.compare import differences
from specdraft.recipes.errors import CacheError, RecipeError
from specdraft.recipes.interrupt import SIGNALS, StopRequest, Terminated
from specdraft.train.fit.checkpoint import (
    Checkpoints,
    TrainState,
    check_run,
    expected_bytes,
    read_state,
    save_drafter,
)
from specdraft.train.fit.continued import FREE, Launch, check_continued


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def spawn(out, *arguments, **options):
    return start(test_loop.__file__, out, *arguments, **options)


# -- resume ----------------------------------------------------------------------------------------


class CrashError(Exception):
    """Stands for anything that ends a process between two steps."""


def crash_at(step):
    def evaluate(head, now):
        if now == step:
            raise CrashError
        return {"tokens_per_step": 1.0 + now}

    return evaluate


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_crashed_run_continues_bit_for_bit(tmp_path, optimizer):
    changes = {
        "optim.name": optimizer,
        "train.steps": 12,
        "train.save_every": 3,
        "train.eval_every": 4,
        "train.log_every": 2,
    }
    _, whole = train(tmp_path / "whole", evaluate=crash_at(99), **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", evaluate=crash_at(8), **changes)
    state, cut = train(tmp_path / "cut", evaluate=crash_at(99), **changes)
    assert state.step == 12
    assert_equal(whole, cut)
    once, twice = log_lines(tmp_path / "whole"), log_lines(tmp_path / "cut")
    assert [r["step"] for r in twice] == [2, 4, 6, 8, 10, 12]
    assert [(r["loss"], r["grad_norm"]) for r in once[:2]] == [
        (r["loss"], r["grad_norm"]) for r in twice[:2]
    ]
    assert once[-1]["loss"] == twice[-1]["loss"]


def test_a_killed_process_continues_bit_for_bit(tmp_path):
    arguments = ["train.steps=12", "train.save_every=6"]
    _, whole = train(tmp_path / "whole", **{"train.steps": 12, "train.save_every": 6})
    # Slow rows leave time to kill the process in the steps after its checkpoint.
    process = spawn(tmp_path / "cut", *arguments, "pace=0.02")
    wait_for((tmp_path / "cut" / "checkpoints" / "step-6").exists, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "cut" / "falcon" / "config.json").exists()
    state, cut = train(tmp_path / "cut", **{"train.steps": 12, "train.save_every": 6})
    assert state.step == 12
    assert_equal(whole, cut)
    assert_equal(whole, load_file(tmp_path / "cut" / "falcon" / "model.safetensors"))


def test_sigterm_finishes_the_step_saves_and_says_how_to_resume(tmp_path):
    process = spawn(tmp_path, "train.steps=1000", "train.log_every=1", "pace=0.01")
    wait_for((tmp_path / "log.jsonl").exists, process)
    wait_for(lambda: (tmp_path / "log.jsonl").read_text().count("\n") > 1, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    step = read_state(checkpoint)["state"]["step"]
    assert 1 < step < 1000
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith(f"stopped at step {step}; resume with: python ")
    assert str(tmp_path) in errors.splitlines()[-1]


def test_a_finished_run_is_left_alone(tmp_path):
    _, weights = train(tmp_path)
    before = (tmp_path / "falcon" / "model.safetensors").read_bytes()
    state, again = train(tmp_path)
    assert state.step == 6
    assert_equal(weights, again)
    assert (tmp_path / "falcon" / "model.safetensors").read_bytes() == before


def test_more_steps_prolong_a_run(tmp_path):
    train(tmp_path)
    state, _ = train(tmp_path, **{"train.steps": 9})
    assert state.step == 9


def test_a_run_may_change_its_micro_batches_midway(tmp_path):
    changes = {"train.save_every": 3, "train.eval_every": 1}
    _, whole = train(tmp_path / "whole", **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", evaluate=crash_at(4), **changes)
    _, cut = train(tmp_path / "cut", **changes, **{"train.accumulation": 2})
    assert_close(whole, cut)


def test_changing_the_number_of_processes_midway_changes_no_result(tmp_path):
    """One process, then two, then one again."""
    changes = {"train.steps": 12, "train.save_every": 3, "train.eval_every": 1}
    changes["train.log_every"] = 1
    _, whole = train(tmp_path / "whole", **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", evaluate=crash_at(4), **changes)
    steps = [f"{key}={value}" for key, value in changes.items()]
    steps += ["train.accumulation=2", "pace=0.05"]
    two = start_ranks(test_loop.__file__, tmp_path / "cut", *steps)
    try:
        wait_for((tmp_path / "cut" / "checkpoints" / "step-6").exists, two[0])
    finally:
        for rank in two:
            rank.terminate()
        end(two)
    newest = max(
        (tmp_path / "cut" / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime
    )
    assert read_state(newest)["processes"] == 2
    assert 6 <= read_state(newest)["state"]["step"] < 12
    _, cut = train(tmp_path / "cut", **changes)
    assert_close(whole, cut)
    once, twice = log_lines(tmp_path / "whole"), log_lines(tmp_path / "cut")
    assert [record["loss"] for record in once] == pytest.approx(
        [r["loss"] for r in twice], rel=1e-4
    )


def speeds_of(speeds, seen):
    """An evaluation with a speed per step, which records when it was called."""

    def evaluate(head, step):
        seen.append(step)
        return {"tokens_per_step": speeds[step]}

    return evaluate


def test_an_evaluation_after_the_last_checkpoint_is_added_to_it(tmp_path):
    """Step 6 is saved, and evaluated afterwards, as training is over."""
    changes, seen = {"train.save_every": 3, "train.eval_every": 4}, []
    evaluate = speeds_of({4: 2.0, 6: 3.0, 8: 2.5}, seen)
    state, _ = train(tmp_path, evaluate=evaluate, **changes)
    kept = (tmp_path / "falcon" / "model.safetensors").read_bytes()
    assert read_state(tmp_path / "checkpoints" / "step-6")["state"]["best"] == state.best
    train(tmp_path, evaluate=evaluate, **changes)
    assert seen == [4, 6]
    assert [record["step"] for record in log_lines(tmp_path, "eval")] == seen
    prolonged, _ = train(tmp_path, evaluate=evaluate, **changes, **{"train.steps": 8})
    assert (prolonged.step, prolonged.best) == (8, {"tokens_per_step": 3.0})
    assert (tmp_path / "falcon" / "model.safetensors").read_bytes() == kept


def test_an_evaluation_that_is_not_yet_in_a_checkpoint_is_logged_once(tmp_path, monkeypatch):
    evaluate, save = speeds_of({4: 2.0, 6: 3.0}, []), Checkpoints.save

    def crash_behind_the_last(checkpoints, state):
        if state.evaluated == 6:
            raise CrashError
        save(checkpoints, state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", crash_behind_the_last)
        with pytest.raises(CrashError):
            train(tmp_path, evaluate=evaluate, **{"train.eval_every": 4})
    train(tmp_path, evaluate=evaluate, **{"train.eval_every": 4})
    assert [record["step"] for record in log_lines(tmp_path, "eval")] == [4, 6]


@pytest.mark.parametrize(
    ("changes", "best"),
    [({"eval.temperature": 1.0}, 2.0), ({"eval.tree": "tiny_k2"}, 2.0), ({"eval.repeats": 2}, 5.0)],
)
def test_a_best_score_measured_under_other_settings_is_dropped(tmp_path, changes, best):
    evaluate = speeds_of({6: 5.0, 9: 2.0}, [])
    train(tmp_path, evaluate=evaluate, **{"train.eval_every": 6})
    longer = {"train.eval_every": 9, "train.steps": 9}
    state, _ = train(tmp_path, evaluate=evaluate, **longer, **changes)
    assert state.best == {"tokens_per_step": best}


# -- which runs may resume -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lr", 1.0e-4, r"optim.lr = 0.003, now it is 0.0001"),
        ("train.seed", 1, r"train.seed = 0, now it is 1"),
        ("glance.start", 0.2, r"glance.start = 0.4, now it is 0.2"),
    ],
)
def test_another_recipe_is_refused_with_the_key_and_both_values(tmp_path, key, value, message):
    train(tmp_path, **{"train.steps": 1})
    with pytest.raises(RecipeError, match=message + r"; give another output.dir"):
        train(tmp_path, **{"train.steps": 1, key: value})


def test_another_recipe_is_refused_before_anything_is_built(tmp_path):
    train(tmp_path, **{"train.steps": 1})
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    recipe = read_state(checkpoint)["recipe"]
    check_run(tmp_path, recipe)
    check_run(tmp_path / "another", recipe)
    recipe["optim"]["lr"] = 0.5
    with pytest.raises(RecipeError, match=r"step-1 was made with optim.lr = 0.003, now it is 0.5"):
        check_run(tmp_path, recipe)
    (checkpoint / "state.json").write_text("{")  # damaged: `resume` uses the one before
    check_run(tmp_path, recipe)


def test_a_checkpoint_beyond_the_last_step_is_an_error(tmp_path):
    train(tmp_path, **{"train.steps": 3})
    with pytest.raises(RecipeError, match=r"step-3 lies beyond the 2 steps .* raise train.steps"):
        train(tmp_path, **{"train.steps": 2})
    train(tmp_path, **{"train.steps": 3})


def test_other_data_is_refused(tmp_path):
    train(tmp_path, **{"train.steps": 1})
    with pytest.raises(RecipeError, match="rows of training data = 24, now it is 20"):
        train(tmp_path, data=ToyRows(count=20), **{"train.steps": 1})


def test_the_same_number_of_rows_with_other_contents_is_refused(tmp_path):
    data = ToyRows()
    data.key = "a"
    train(tmp_path, data=data, **{"train.steps": 1})
    train(tmp_path, data=data, **{"train.steps": 2})
    data.key = "b"
    with pytest.raises(RecipeError, match="contents of its data or target = a, now it is b"):
        train(tmp_path, data=data, **{"train.steps": 3})


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Launch(2, "DEEPSPEED"), Launch(1, "DEEPSPEED")),
        (Launch(2, "DEEPSPEED"), Launch(2, None)),
        (Launch(2, "FSDP"), Launch(2, "DEEPSPEED")),
    ],
)
def test_processes_that_cannot_read_a_checkpoint_are_refused_naming_both(there, here, tmp_path):
    with pytest.raises(RecipeError) as refused:
        there.check_continued_by(here, tmp_path / "step-3")
    assert f"step-3 was written by {there}, and {here} cannot read its files" in str(refused.value)
    there.check_continued_by(there, tmp_path / "step-3")


def test_a_checkpoint_of_an_earlier_version_is_continued(tmp_path):
    train(tmp_path, **{"train.steps": 1})
    state = tmp_path / "checkpoints" / "step-1" / "state.json"
    content = json.loads(state.read_text())
    content["state"]["best_step"] = 0
    state.write_text(json.dumps(content))
    write_sums(state.parent)
    resumed, _ = train(tmp_path, **{"train.steps": 2})
    assert (resumed.step, [line["step"] for line in log_lines(tmp_path)]) == (2, [1, 2])


def test_plain_training_refuses_a_deepspeed_checkpoint(tmp_path):
    train(tmp_path, **{"train.steps": 1})
    state = tmp_path / "checkpoints" / "step-1" / "state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps(content | {"processes": 2, "engine": "DEEPSPEED"}))
    write_sums(state.parent)
    with pytest.raises(RecipeError, match=r"written by 2 processes under DEEPSPEED, and 1 process"):
        train(tmp_path, **{"train.steps": 2})


def test_only_settings_that_alter_a_step_count_as_differences():
    there = {"train": {"steps": 5, "seed": 0}, "eval": {"limit": 3}, "name": "a"}
    here = {"train": {"steps": 9, "seed": 0}, "eval": {"limit": 4}, "name": "b"}
    assert differences(there, here, FREE) == {}
    here["train"]["seed"] = 1
    assert differences(there, here, FREE) == {"train.seed": (0, 1)}


@pytest.mark.parametrize(
    "change",
    [
        {"train.forward_tokens": 40},
        {"train.threads": 1},  # as recipes/tiny.yaml says for two processes
        {"target.prepack_gib": 0.0},
        {"data.batch_rows": 4, "data.timeout": 9.0, "data.retries": 1},
        {"drafting.gamma": 3, "maxgram.n": 4, "cascade.leniency": 2.0},
    ],
)
def test_settings_that_alter_no_step_may_change_midway(tmp_path, change):
    train(tmp_path)
    state, _ = train(tmp_path, **{"train.steps": 7}, **change)
    assert state.step == 7


def test_a_servers_address_may_change_but_a_server_may_not_be_added(tmp_path):
    def check(there, here):
        recipes = ({"data": {"server": server}} for server in (there, here))
        check_continued(tmp_path, {"recipe": next(recipes)}, next(recipes))

    check("http://a:8000/v1", "http://b:8000/v1")
    with pytest.raises(RecipeError, match=r"made with data.server = None, now it is http://b"):
        check(None, "http://b:8000/v1")


def test_a_target_may_be_given_by_another_path_to_the_same_folder_only(tmp_path, monkeypatch):
    def check(there, here):
        recipes = ({"target": {"model": model}} for model in (there, here))
        check_continued(tmp_path, {"recipe": next(recipes)}, next(recipes))

    for name in ("mine", "other", "tiny"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    check("mine", "mine/")
    check("mine", str(tmp_path / "mine"))
    for model in ("other", "owner/mine"):
        with pytest.raises(RecipeError, match=f"target.model = mine, now it is {model}"):
            check("mine", model)
    with pytest.raises(RecipeError, match=r"target.model = tiny, now it is ./tiny"):
        check("tiny", "./tiny")  # the bundled one against a folder of that name


def test_a_setting_missing_in_an_older_run_counts_as_its_default():
    there, here = {"train": {"seed": 1}}, {"train": {"seed": 1, "threads": None, "rollout": 1}}
    assert differences(there, here, FREE) == {}
    here["train"]["rollout"] = 2
    assert differences(there, here, FREE) == {"train.rollout": (1, 2)}


# -- complete or absent ----------------------------------------------------------------------------


def make_checkpoints(out, keep=2, model=None):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator()
    accelerator.prepare(model or torch.nn.Linear(2, 2))
    return Checkpoints(out, {"a": 1}, 3, accelerator, keep)


def test_half_written_folders_are_not_taken_for_checkpoints(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    assert checkpoints.newest() is None
    (tmp_path / "checkpoints" / ".writing-9").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-8").mkdir()  # without its state.json
    assert checkpoints.newest() is None
    checkpoints.save(TrainState(step=7))
    assert checkpoints.newest().name == "step-7"


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    for step in (5, 20, 100):
        checkpoints.save(TrainState(step=step))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-100", "step-20"]
    assert checkpoints.resume() == TrainState(step=100)


def test_leftovers_of_a_killed_write_or_deletion_are_removed(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    checkpoints.save(TrainState(step=7))
    for name in (".writing-9", ".deleted-step-5"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "model.safetensors").write_text("a part")
    assert checkpoints.resume() == TrainState(step=7)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-7"]


def test_a_checkpoint_set_aside_by_a_killed_replacement_is_restored(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    checkpoints.save(TrainState(step=7))
    newest = tmp_path / "checkpoints" / "step-7"
    newest.rename(newest.with_name(".deleted-step-7"))
    assert checkpoints.resume() == TrainState(step=7)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-7"]


def test_random_states_are_restored(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    checkpoints.save(TrainState(step=1))
    drawn = [(torch.rand(3).tolist(), np.random.rand(), random.random()) for _ in range(2)]
    checkpoints.resume()
    again = [(torch.rand(3).tolist(), np.random.rand(), random.random()) for _ in range(2)]
    assert drawn == again


def test_an_unreadable_state_is_named(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    checkpoints.save(TrainState(step=1))
    (tmp_path / "checkpoints" / "step-1" / "state.json").write_text("{")
    with pytest.raises(CacheError, match=r"step-1 is damaged: state.json is not what was saved"):
        checkpoints.resume()
    (tmp_path / "checkpoints" / "step-1" / "SHA256SUMS").unlink()
    states = ('{"state": 7}', '{"state": {}}', '{"state": {"speed": 1}}')
    for text in ("{", "[]", "7", *states, "[" * 10**5):
        (tmp_path / "checkpoints" / "step-1" / "state.json").write_text(text)
        with pytest.raises(CacheError, match=r"step-1/state.json cannot be read .*; no other is w"):
            checkpoints.resume()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_a_flipped_bit_in_the_newest_checkpoint_resumes_from_the_one_before(tmp_path, capsys, file):
    changes = {"train.steps": 12, "train.save_every": 3, "train.eval_every": 1}
    _, whole = train(tmp_path / "whole", **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", evaluate=crash_at(10), **changes)
    folder = tmp_path / "cut" / "checkpoints"
    content = bytearray((folder / "step-9" / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "step-9" / file).write_bytes(content)
    _, cut = train(tmp_path / "cut", **changes)
    said = capsys.readouterr().err
    assert f"step-9 is damaged: {file} is not what was saved" in said
    assert "going on from step-6" in said
    assert_equal(whole, cut)
    assert {path.name for path in folder.iterdir()} == {".damaged-step-9", "step-9", "step-12"}


@pytest.mark.parametrize(
    ("share", "what", "save_every"),
    [(1.5, "step-12", 3), (0.5, "step-12", 3), (0.5, "step-12", 100)],
    ids=["optimiser", "weights", "last"],
)
def test_a_full_disk_leaves_the_last_complete_checkpoint_and_says_how_to_resume(
    tmp_path, share, what, save_every
):
    """A limit on file sizes stands for a full disk, with the same kind of error."""
    changes = {"train.steps": 12, "train.save_every": 3, "train.eval_every": 3}
    _, whole = train(tmp_path / "whole", **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", evaluate=crash_at(12), **changes)
    weights = (tmp_path / "cut" / "falcon" / "model.safetensors").stat().st_size
    changes["train.save_every"] = save_every
    limit = int(share * weights)
    steps = (f"{key}={value}" for key, value in changes.items())
    full = spawn(tmp_path / "cut", *steps, largest_file=limit)
    _, errors = full.communicate()
    assert full.returncode == 2, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: out of disk: ")
    assert f"{what} " in last
    assert last.endswith("make room, and the same command goes on from step-9")
    assert "step-9" in {path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()}
    assert not list((tmp_path / "cut").rglob(".writing-*"))
    state, cut = train(tmp_path / "cut", **changes)
    assert state.step == 12
    assert_equal(whole, cut)


def test_a_disk_too_full_for_the_drafter_loses_no_step(tmp_path, monkeypatch):
    def full(drafter, folder):
        raise CacheError("out of disk")

    changes = {"train.steps": 4, "train.save_every": None, "train.eval_every": None}
    monkeypatch.setattr("specdraft.train.fit.run.save_drafter", full)
    with pytest.raises(CacheError):
        train(tmp_path / "cut", **changes)
    assert read_state(tmp_path / "cut" / "checkpoints" / "step-4")["state"]["step"] == 4


def test_a_disk_that_is_too_small_for_the_first_checkpoint_says_by_how_much(tmp_path):
    train(tmp_path / "whole", **{"train.steps": 2})
    written = sum(path.stat().st_size for path in (tmp_path / "whole").glob("checkpoints/*/*"))
    expected = expected_bytes(make_head())
    assert expected < written < expected + 40_000  # random states and names
    limit = (tmp_path / "whole" / "falcon" / "model.safetensors").stat().st_size // 2
    early = ["train.steps=2", "train.save_every=1"]
    _, errors = spawn(tmp_path / "cut", *early, largest_file=limit).communicate()
    needed = f"needs {of_bytes(expected)} and "
    assert f"out of disk: {tmp_path}/cut/checkpoints/step-1 {needed}" in errors
    assert errors.strip().endswith("make room, and the same command goes on from the start")


def test_a_disk_too_small_for_a_checkpoint_fails_before_the_first_step(tmp_path, monkeypatch):
    usage, steps = namedtuple("usage", "total used free"), []
    free = expected_bytes(make_head()) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))
    with pytest.raises(CacheError, match=r"out of disk: .*/checkpoints needs .* short; "):
        train(tmp_path, evaluate=lambda _, step: steps.append(step), **{"train.eval_every": 1})
    assert not steps


def test_a_failed_save_leaves_the_old_head_unchanged(tmp_path, monkeypatch):
    save_drafter(make_head(), tmp_path / "head")
    before = {p.name: p.read_bytes() for p in (tmp_path / "head").iterdir()}
    failing = make_head()
    monkeypatch.setattr(failing, "save_pretrained", lambda _: (_ for _ in ()).throw(OSError(28)))
    with pytest.raises(OSError, match="28"):
        save_drafter(failing, tmp_path / "head")
    assert {p.name: p.read_bytes() for p in (tmp_path / "head").iterdir()} == before
    FalconHead.from_pretrained(tmp_path / "head")


def test_a_save_that_is_killed_at_any_file_leaves_the_old_head_or_the_new_one(
    tmp_path, monkeypatch
):
    heads, replace = (make_head(), make_head()), Path.replace
    with torch.no_grad():
        for weight in heads[1].parameters():
            weight.add_(1.0)
    for most in itertools.count():
        folder, made = tmp_path / f"head-{most}", []
        save_drafter(heads[0], folder)

        def limited(path, to, made=made, most=most):
            if len(made) == most:
                raise KeyboardInterrupt
            made.append(to)
            return replace(path, to)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", limited)
            save_drafter(heads[1], folder)
            break
        kept = FalconHead.from_pretrained(folder).state_dict()
        wholes = [all(torch.equal(kept[n], x) for n, x in h.state_dict().items()) for h in heads]
        assert wholes in ([True, False], [False, True])
    assert most >= 3  # config, weights and checksums


def test_only_a_second_ctrl_c_skips_a_save_that_has_not_begun(capfd):
    with StopRequest(saves=True) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):  # from launcher and terminal
            signal.raise_signal(number)
        with stop.saving():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("saving after this step ..")


@pytest.fixture
def signals_heard():
    """Handle signals even if a shell made this background command ignore them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupted:
    """An object whose destructor is interrupted by a signal."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_during_a_destructor_is_not_lost(signals_heard, capfd):
    with StopRequest(), pytest.raises(Terminated):
        time.sleep(10 * isinstance(Interrupted(), Interrupted))
    assert capfd.readouterr().err == ""


def test_after_ctrl_c_signals_of_the_ended_launcher_are_ignored(monkeypatch, signals_heard):
    with StopRequest():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(os, "getppid", lambda: 1)  # the launcher got the same Ctrl-C
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def stopped_at(step, evaluated):
    """An evaluation that a signal interrupts at one step."""

    def evaluate(head, now):
        if now == step:
            signal.raise_signal(signal.SIGTERM)
        evaluated.append(now)
        return {"tokens_per_step": 1.0 + now % 4}

    return evaluate


@pytest.mark.parametrize("step", [4, 12])
def test_an_interrupted_evaluation_is_repeated(tmp_path, step):
    changes = {"train.steps": 12, "train.eval_every": 4, "train.log_every": 5}
    _, whole = train(tmp_path / "whole", evaluate=stopped_at(99, []), **changes)
    evaluated = []
    with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}"):
        train(tmp_path / "cut", evaluate=stopped_at(step, evaluated), **changes)
    assert evaluated == [*range(4, step, 4)]
    assert (tmp_path / "cut" / "checkpoints" / f"step-{step}").exists()
    _, cut = train(tmp_path / "cut", evaluate=stopped_at(99, evaluated), **changes)
    assert evaluated == [4, 8, 12]
    assert_equal(whole, cut)
    for kind in ("train", "eval"):
        once, twice = (log_lines(tmp_path / name, kind) for name in ("whole", "cut"))
        names = once[0].keys() - {"minutes", "tokens_per_second", "data_wait"}
        assert [[r[n] for n in names] for r in once] == [[r[n] for n in names] for r in twice]


def test_a_run_stopped_during_its_last_save_ends_after_it(tmp_path, monkeypatch):
    save = Checkpoints.save

    def told_to_stop(*arguments):
        signal.raise_signal(signal.SIGTERM)
        save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", told_to_stop)
    with pytest.raises(KeyboardInterrupt, match="trained to step 6"):
        train(tmp_path)
    assert (tmp_path / "checkpoints" / "step-6").exists()


def test_damaged_log_lines_are_dropped_and_the_run_goes_on(tmp_path):
    train(tmp_path)
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\xda\xff\n[1]\n{}\n" + log.read_bytes())
    train(tmp_path, **{"train.steps": 9})
    assert [record["step"] for record in log_lines(tmp_path)] == [3, 6, 9]
