"""An lm_head with a bias is refused before anything is made: training reads only its matrix."""

import pytest
import torch
from accelerate.state import AcceleratorState
from random_families import MLP, random_model
from torch import nn

from specdraft.models.student import make_student
from specdraft.models.target import Target
from specdraft.recipes.errors import TargetError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import StudentSection
from specdraft.train.distill import train
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.heads import head_kind, train_head

BIASED = "its lm_head has a bias"


def biased_target() -> Target:
    model = Target.load("tiny").model
    model.lm_head.bias = nn.Parameter(torch.ones(model.config.vocab_size))
    return Target(model, Target.load("tiny").tokenizer, "biased")


def run(name, tmp_path):
    """Run the stages of a bundled recipe on a target that has a bias."""
    places = [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    few = ["data.limit=20", "train.steps=1", "train.eval_every=null"]
    recipe, target = load_recipe(name, [*places, *few]), biased_target()
    AcceleratorState._reset_state(True)
    accelerator = make_accelerator(recipe)
    if recipe.student.given:
        train(recipe, accelerator, lambda: target)
    else:
        train_head(head_kind("falcon"), recipe, accelerator, lambda: target)


@pytest.mark.parametrize("name", ["tiny", "tiny_distill"])
def test_an_lm_head_with_a_bias_is_refused_before_any_cache_is_made(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(TargetError, match=f"biased: {BIASED}"):
        run(name, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_student_whose_lm_head_has_a_bias_is_refused():
    target = Target(random_model("Phi", **MLP), None, "phi")  # has one, as has its student
    with pytest.raises(TargetError, match=f"a student of phi: {BIASED}"):
        make_student(StudentSection(keep_layers=[0, 2]), target)
