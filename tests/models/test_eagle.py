"""EAGLE-1: the Falcon head with one token per pass and a linear layer, under its own name."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from decoding import check_as_plain
from random_models import random_head, random_target
from test_loop import ToyRows, log_lines, make_ends, make_head, make_recipe

from specdraft.eval.measure.methods import make_method
from specdraft.eval.methods.registry import Setup, load_trained, make_drafter, needs
from specdraft.eval.methods.trained import Trained
from specdraft.models.falcon import FalconHead
from specdraft.models.shapes import TargetShape, head_config
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.train.eagle import check
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.loop import fit
from specdraft.train.heads import head_kind
from specdraft.train.objectives.csgd import CoupledGlancing

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = RECIPES / "tiny_eagle.yaml"


@pytest.fixture(scope="module")
def target():
    return random_target()


def eagle(target, **changes) -> FalconHead:
    return random_head(target, 1, fusion="linear", input_norm=False, **changes)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["eagle_chain", "eagle_tree"])
def test_output_equals_that_of_plain_decoding(target, method, rows):
    recipe = load_recipe(RECIPE, [f"eval.batch_size={rows}"])
    setup = Setup(recipe, target, Trained(eagle(target)), rows, 128)
    drafter = make_drafter(method, setup)
    check_as_plain(target, drafter, rows)


def test_without_input_norm_only_the_first_layer_lacks_an_attention_norm(target):
    """test_export.py compares what it computes with Llama's own layer."""
    names = {name for name, _ in eagle(target, layers=2).named_parameters()}
    assert "layers.0.attention_norm" not in names
    assert {"layers.1.attention_norm", "layers.0.mlp_norm", "layers.1.mlp_norm"} <= names
    assert "layers.0.attention_norm" in dict(random_head(target).named_parameters())


def test_a_saved_head_is_loaded_for_the_eagle_methods(target, tmp_path):
    eagle(target).save_pretrained(tmp_path / "head")
    assert FalconHead.load_for(tmp_path / "head", target.identity()).config.is_eagle
    recipe = load_recipe(RECIPE, [f"output.dir={tmp_path}"])
    trained = load_trained(recipe, target)
    for name in ("eagle_tree", "eagle_chain:dynamic"):
        assert trained.networks(needs(name)) == [trained.head]


def test_training_lowers_the_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    changes = {"optim.lr": 1.0e-2, "train.steps": 60, "train.batch_size": 4}
    changes |= {"train.log_every": 20, "loss.soft_weight": 1.0, "loss.feature_noise": 0.0}
    recipe = make_recipe(tmp_path, **changes)
    head = make_head(1, fusion="linear", input_norm=False)
    objective = CoupledGlancing(recipe, make_ends(), head.config)
    fit(head, ToyRows(count=4), objective, recipe, make_accelerator(recipe))
    first, *_, last = log_lines(tmp_path)
    assert last["loss"] < 0.5 * first["loss"]
    assert last["glanced"] == 0.0  # a block of one has nothing to reveal


@pytest.mark.parametrize("name", ["tiny_eagle", "vicuna7b_eagle"])
def test_the_recipes_describe_eagle_heads(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    check(head_kind("eagle"), recipe)
    shape = TargetShape(64, 2, 4, 4, 128, 100)
    config = head_config(recipe, shape)
    assert config.is_eagle
    assert not config.input_norm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head.block_size=2"], r"head\.block_size = 2: EAGLE-1 has head\.block_size=1"),
        (["head.fusion=lstm"], r"head\.fusion = lstm: EAGLE-1 has head\.fusion=linear"),
        (["eval.methods=[ssd]", "student.layers=1"], "ssd needs a student"),
        (["eval.methods=[medusa_tree]", "medusa.heads=8"], "medusa_tree needs Medusa heads"),
    ],
)
def test_a_recipe_that_is_not_for_eagle_1_is_refused_before_any_training(overrides, message):
    with pytest.raises(RecipeError, match=message):
        check(head_kind("eagle"), load_recipe(RECIPE, overrides))


def test_another_head_is_refused_by_the_eagle_methods(target):
    for head, told in ((random_head(target, 2), "k = 2, lstm"), (random_head(target, 1), "k = 1")):
        with pytest.raises(RecipeError, match=rf"eagle_tree needs an EAGLE-1 head.*{told}"):
            make_method("eagle_tree", load_recipe(RECIPE), target, Trained(head), 64)
