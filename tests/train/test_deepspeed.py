"""DeepSpeed ZeRO-2 on two CPU processes: what one plain process trains, also when it is cut off.

As a script it is the job of tests/train/test_loop.py, without a compilation that DeepSpeed begins
with.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_loop
from test_checkpoint import wait_for
from test_loop import assert_close, end, log_lines, train

from specdraft.models.falcon import FalconHead
from specdraft.train.fit.checkpoint import read_state

deepspeed = pytest.importorskip("deepspeed", reason="needs pip install 'specdraft[deepspeed]'")
ROOT = Path(__file__).parents[2]
STEPS = {"train.steps": 12, "train.log_every": 1}


def launch(out, *arguments):
    """Start the job as the launch config says, on two CPU processes in place of eight GPUs."""
    config = "recipes/accelerate/deepspeed_zero2.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    launcher += ["--num_processes", "2", "--main_process_port", "0"]
    job = [__file__, str(out), "train.accumulation=2", *(f"{k}={v}" for k, v in STEPS.items())]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)  # with it accelerate leaves DeepSpeed out
    return subprocess.Popen(
        [*launcher, *job, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_under_zero2_that_is_stopped_and_resumed_equals_plain_training(tmp_path, monkeypatch):
    first = launch(tmp_path / "zero", "pace=0.05")  # slow rows leave time to stop it
    try:
        wait_for((tmp_path / "zero" / "log.jsonl").exists, first)
        wait_for(lambda: (tmp_path / "zero" / "log.jsonl").read_text().count("\n") > 2, first)
    finally:
        first.terminate()
        end(first)
    (checkpoint,) = (tmp_path / "zero" / "checkpoints").iterdir()
    assert 2 < read_state(checkpoint)["state"]["step"] < 12
    shards = {path.name for path in checkpoint.rglob("*_optim_states.pt")}
    assert shards == {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
    assert not (tmp_path / "zero" / "head").exists()

    resumed = launch(tmp_path / "zero")
    errors = end(resumed)
    assert resumed.returncode == 0, errors
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _, plain = train(tmp_path / "plain", **STEPS)
    # Plain files that need no DeepSpeed; what differs is the order in which gradients are added.
    assert_close(plain, FalconHead.from_pretrained(tmp_path / "zero" / "head").state_dict())
    for a, b in zip(log_lines(tmp_path / "plain"), log_lines(tmp_path / "zero"), strict=True):
        assert (a["step"], a["lr"]) == (b["step"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def main():
    # It is for inference alone, and takes a compiler a minute of each machine's first run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    test_loop.main()


if __name__ == "__main__":
    main()
