"""DeepSpeed's ZeRO on two CPU processes equals one plain process, also when interrupted.

As a script it runs the job of tests/train/test_loop.py, or after "student" a distillation, without
DeepSpeed's initial compilation.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import pytest
import test_distill
import test_loop
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from commands import ROOT, end, start_ranks
from random_models import random_target
from test_checkpoint import wait_for
from test_loop import assert_close, log_lines, train
from transformers import AutoModelForCausalLM

from specdraft.models.falcon import FalconHead
from specdraft.train.fit.checkpoint import read_state

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs pip install 'specdraft[deepspeed]'"
)
STEPS = {"train.steps": 12, "train.log_every": 1}
PROCESSES = ["--num_processes", "2", "--main_process_port", "0", __file__]
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def job(out, *arguments):
    return [str(out), "train.accumulation=2", *(f"{k}={v}" for k, v in STEPS.items()), *arguments]


def launching(stage, folder):
    """The launch config's arguments; ZeRO-3 partitions even the smallest weights."""
    config = json.loads((ROOT / f"recipes/deepspeed/zero{stage}.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (file := folder / "deepspeed.json").write_text(json.dumps(config))
    settings = ["--config_file", f"recipes/accelerate/deepspeed_zero{stage}.yaml"]
    return [*settings, "--deepspeed_config_file", str(file), *PROCESSES]


def launch(settings, *arguments):
    """Start the job by the launch config, on two CPU processes instead of eight GPUs."""
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *settings, *arguments],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks(monkeypatch, settings, *arguments):
    """The same without the launcher, in the environment it would set."""
    monkeypatch.chdir(ROOT)
    parsed = launch_command_parser().parse_args([*settings, *arguments])
    args, *_ = _validate_launch_command(parsed)
    args.deepspeed_fields_from_accelerate_config = ""
    _, environment = prepare_deepspeed_cmd_env(args)
    del environment["PYTHONPATH"]
    return start_ranks(__file__, *arguments, **environment | ENVIRONMENT)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_under_zero_that_is_stopped_and_resumed_equals_plain_training(
    stage, tmp_path, monkeypatch
):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # it would disable DeepSpeed
    settings = launching(stage, tmp_path)
    slow = job(tmp_path / "zero", "pace=0.05")  # slow rows leave time to stop it
    # The launcher's termination of workers does not depend on the stage: one stage tests it.
    first = [launch(settings, *slow)] if stage == 3 else ranks(monkeypatch, settings, *slow)
    try:
        wait_for((tmp_path / "zero" / "log.jsonl").exists, first[0])
        wait_for(lambda: (tmp_path / "zero" / "log.jsonl").read_text().count("\n") > 2, first[0])
    finally:
        for process in first:
            process.terminate()
        for process in first:
            process.communicate(timeout=300)
    (checkpoint,) = (tmp_path / "zero" / "checkpoints").iterdir()
    assert 2 < read_state(checkpoint)["state"]["step"] < 12
    for what, parts in {"optim": 2, "model": 2 if stage == 3 else 0}.items():  # files per rank
        assert len(list(checkpoint.rglob(f"*zero_pp_rank_*_{what}_states.pt"))) == parts
    assert not (tmp_path / "zero" / "falcon" / "config.json").exists()

    resumed = ranks(monkeypatch, settings, *job(tmp_path / "zero"))
    errors = end(resumed)
    assert [rank.returncode for rank in resumed] == [0, 0], errors
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _, plain = train(tmp_path / "plain", **STEPS)
    # Plain files that need no DeepSpeed; only the order in which gradients are added differs.
    assert_close(plain, FalconHead.from_pretrained(tmp_path / "zero" / "falcon").state_dict())
    for a, b in zip(log_lines(tmp_path / "plain"), log_lines(tmp_path / "zero"), strict=True):
        assert (a["step"], a["lr"]) == (b["step"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_under_zero_equals_plain_training_with_autocast(stage, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    bfloat16 = job(tmp_path / "zero", 'train.precision="bfloat16"')
    both = ranks(monkeypatch, launching(stage, tmp_path), *bfloat16)
    errors = end(both)
    assert [rank.returncode for rank in both] == [0, 0], errors
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    train(tmp_path / "plain", **STEPS, **{"train.precision": "bfloat16"})
    head = FalconHead.from_pretrained(tmp_path / "zero" / "falcon")
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    for a, b in zip(log_lines(tmp_path / "plain"), log_lines(tmp_path / "zero"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)


def test_a_student_under_zero3_equals_plain_training(tmp_path, monkeypatch):
    """Its loss is computed in its forward, and backward needs the whole lm_head again."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    both = ranks(monkeypatch, launching(3, tmp_path), "student", str(tmp_path / "zero"))
    errors = end(both)
    assert [rank.returncode for rank in both] == [0, 0], errors
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _, plain = test_distill.train(tmp_path / "plain")
    zero = AutoModelForCausalLM.from_pretrained(tmp_path / "zero" / "student").state_dict()
    assert_close({name.removeprefix("model."): w for name, w in plain.items()}, zero)


def main():
    import deepspeed

    # Only inference needs it, and it compiles for a minute on a machine's first run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if sys.argv[1] == "student":
        test_distill.train(sys.argv[2])
        return
    model = random_target().model
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        test_loop.main()
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_close(model.state_dict(), loaded.state_dict())  # decoding needs a whole target


if __name__ == "__main__":
    main()
