"""FSDP on two CPU processes equals one plain process, also when resumed.

As a script it runs the job of tests/train/test_loop.py, or after "student" a distillation.
"""

import json
import sys

import pytest
import test_distill
import test_loop
import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from commands import ROOT, end, start_ranks
from test_loop import assert_close, log_lines, train
from transformers import AutoModelForCausalLM

from specdraft.models.falcon import FalconHead
from specdraft.train.fit.checkpoint import read_state

CONFIG = str(ROOT / "recipes/accelerate/fsdp.yaml")
# A config's threshold, lowered so that even the smallest modules are above it.
LAUNCH = ["--config_file", CONFIG, "--num_processes", "2", "--fsdp_min_num_params", "1", __file__]


def fsdp(monkeypatch, *arguments):
    """Run the job by the launch config, on two CPU processes instead of eight GPUs."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # it would disable FSDP
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(LAUNCH))
    environment = prepare_multi_gpu_env(args) | {"OMP_NUM_THREADS": "1"}
    settings = {name: environment[name] for name in environment if "FSDP" in name}
    ranks = start_ranks(__file__, *map(str, arguments), **settings)
    errors = end(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_a_head_resumed_under_fsdp_equals_plain_training(tmp_path, monkeypatch):
    same = {"optim.schedule": "constant", "glance.enabled": False}  # independent of the total
    for steps in (3, 6):
        given = [f"{key}={json.dumps(value)}" for key, value in same.items()]
        fsdp(monkeypatch, tmp_path / "fsdp", *given, f"train.steps={steps}")
    state = read_state(tmp_path / "fsdp" / "checkpoints" / "step-6")
    assert (state["processes"], state["engine"]) == (2, "FSDP")
    _, plain = train(tmp_path / "plain", **same)
    assert_close(plain, FalconHead.from_pretrained(tmp_path / "fsdp" / "falcon").state_dict())


def test_bfloat16_under_fsdp_equals_plain_training_with_autocast(tmp_path, monkeypatch):
    fsdp(monkeypatch, tmp_path / "fsdp", 'train.precision="bfloat16"', "train.log_every=1")
    train(tmp_path / "plain", **{"train.precision": "bfloat16", "train.log_every": 1})
    head = FalconHead.from_pretrained(tmp_path / "fsdp" / "falcon")
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    pairs = [*zip(log_lines(tmp_path / "plain"), log_lines(tmp_path / "fsdp"), strict=True)]
    assert pairs[0][0]["loss"] == pytest.approx(pairs[0][1]["loss"], rel=1e-5)  # no rounding yet
    for a, b in pairs:
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)


def test_a_student_under_fsdp_equals_plain_training(tmp_path, monkeypatch):
    fsdp(monkeypatch, "student", tmp_path / "fsdp")
    _, plain = test_distill.train(tmp_path / "plain")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp" / "student").state_dict()
    assert_close({name.removeprefix("model."): w for name, w in plain.items()}, saved)


def main():
    # accelerate supports FSDP only on GPUs: pretend that this CPU is one.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    if sys.argv[1] == "student":
        test_distill.train(sys.argv[2])
    else:
        test_loop.main()


if __name__ == "__main__":
    main()
