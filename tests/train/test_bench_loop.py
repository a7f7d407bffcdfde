"""The loop's cost is timed with the head of any recipe."""

import pytest
from accelerate.state import AcceleratorState

from specdraft.recipes.load import load_recipe
from specdraft.train.bench_loop import Bench

SMALL = ["data.limit=8", "train.batch_size=2", "train.log_every=1", "train.threads=1"]


@pytest.mark.parametrize("name", ["tiny_eagle3", "tiny_eagle"])
def test_the_head_is_of_the_recipes_kind(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    recipe = load_recipe(name, SMALL)
    bench = Bench.make(recipe, 1, tmp_path)
    assert bench.kind.name == recipe.kind
    speed, _ = bench.loop()
    assert speed > 0
    assert bench.step(glancing=False) > 0
