"""The training loop can be timed with the head of any recipe."""

import json

import pytest
from accelerate.state import AcceleratorState
from commands import run_here

from specdraft.eval.costing.shapes import Shape
from specdraft.models.shapes import TargetShape, llama_config
from specdraft.recipes.load import load_recipe
from specdraft.train.bench_loop import Bench

LARGER = Shape("larger", llama_config(TargetShape(256, 13, 4, 4, 400, 2100), 512))
SMALL = ["data.limit=8", "train.batch_size=2", "train.log_every=1", "train.threads=1"]


@pytest.mark.parametrize("name", ["tiny_eagle3", "tiny_eagle"])
def test_the_timed_head_is_of_the_recipes_kind(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    recipe = load_recipe(name, SMALL)
    bench = Bench.make(recipe, 1, tmp_path)
    assert bench.kind.name == recipe.kind
    speed, _ = bench.loop()
    assert speed > 0
    assert bench.step(glancing=False) > 0


@pytest.mark.parametrize("name", ["tiny", "tiny_medusa"])
def test_a_given_shape_sets_the_size_of_features_and_head(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    recipe = load_recipe(name, SMALL)
    bench = Bench.make(recipe, 1, tmp_path, LARGER)
    assert bench.target.name == "tiny at the size of larger"
    assert bench.head.config.hidden_size == 256
    layers = 1 + len(recipe.data.feature_layers)
    assert bench.data[0]["features"].shape[1] == 256 * layers


def test_the_time_of_a_step_is_shown_and_written(tmp_path):
    (tmp_path / "larger.json").write_text(LARGER.config.to_json_string(use_diff=False))
    shape, out = ["--shape", str(tmp_path / "larger.json")], tmp_path / "out" / "loop.json"
    few = [*SMALL, "--steps", "1", "--repeats", "1", "--out", str(out)]
    done = run_here("train/bench_loop.py", "tiny", *few, *shape)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "tiny at the size of larger, a head of" in shown
    figures = json.loads(out.read_text())
    assert figures["target"] == "tiny at the size of larger"
    tokens, took = figures["tokens_per_optimiser_step"], figures["ms_per_optimiser_step"]
    assert took.keys() == {"loop", "step", "two passes", "one pass"}
    assert took["loop"] == pytest.approx(1000 * tokens / figures["medians"]["loop"])
    assert f"loop {took['loop']:.2f} ms" in shown
