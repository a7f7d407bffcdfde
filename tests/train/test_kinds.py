"""Training any kind of drafter with any recipe: `specdraft train RECIPE --kind KIND`."""

import pytest
from commands import ROOT, run_here

from specdraft.eval.methods.registry import problems
from specdraft.models.kinds import low_middle_high
from specdraft.models.shapes import target_shape
from specdraft.recipes.find import BUNDLED, KINDS
from specdraft.recipes.load import load_recipe
from specdraft.train.kinds import named, trainers, with_kind
from specdraft.train.objectives.unread import NON_READERS, unread_settings

SCRIPTS = dict(
    zip(KINDS, ("falcon", "eagle", "eagle3", "medusa", "distill", "maxgram"), strict=True)
)
OF_NO_TRAINING = (
    "tiny_cascade",
    "tiny_cascades",
    "tiny_t5_cascades",
    "llama2_70b_draft",
)  # they set no steps
# Recipes whose target is a user's own folder, which may be missing.
OF_ONES_OWN = ("tinystories", "tinystories_distill", "tiny_t5")
TRAINED = [path.stem for path in BUNDLED.glob("*.yaml") if path.stem not in OF_NO_TRAINING]


def is_here(name: str) -> bool:
    return name not in OF_ONES_OWN or (ROOT / load_recipe(name).target.model).is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_every_recipe_can_train_every_kind(kind):
    for name in filter(is_here, TRAINED):
        arguments = with_kind([name, "--kind", kind])
        recipe = load_recipe(name, named(arguments)[1:], check=problems)
        assert trainers(arguments) == [f"train.{SCRIPTS[kind]}"], name
        assert kind == "table" or recipe.kind == kind, name
        shared = load_recipe(name)
        assert (recipe.target, recipe.optim, recipe.output) == (
            shared.target,
            shared.optim,
            shared.output,
        )


def test_a_users_overrides_win_and_options_are_kept():
    arguments = with_kind(["--dry-run", "own", "medusa.heads=3", "--kind=medusa"])
    assert (arguments[0], arguments[1], arguments[-1]) == ("--dry-run", "own", "medusa.heads=3")
    assert load_recipe("own", named(arguments)[1:]).medusa.heads == 3


def test_feature_layers_follow_from_a_target_given_as_an_override():
    arguments = with_kind(["own", "target.model=Qwen/Qwen3-8B", "--kind", "eagle3"])
    recipe = load_recipe("own", named(arguments)[1:])
    assert target_shape(recipe)[0].layers == 36
    assert recipe.data.feature_layers == (2, 18, 33)  # as in published heads


def test_the_target_may_be_given_in_a_partial_recipe_file(tmp_path):
    part = tmp_path / "larger.yaml"
    part.write_text("target: {model: Qwen/Qwen3-8B}\n")
    arguments = with_kind(["own", str(part), "--kind", "eagle3"])
    assert load_recipe("own", named(arguments)[1:]).data.feature_layers == (2, 18, 33)


@pytest.mark.parametrize("option", [["--processes", "8"], ["--processes=8"], ["--proc", "8"]])
def test_the_value_of_an_option_is_not_taken_for_a_recipe(option):
    arguments = [*option, "--dry-run", "tiny", "head.layers=2"]
    assert named(arguments) == ["tiny", "head.layers=2"]
    assert with_kind(arguments) == arguments
    (script,) = trainers(with_kind([*arguments, "--kind", "eagle"]))
    assert script == "train.eagle"


@pytest.mark.parametrize("count", range(2, 90))
def test_the_three_feature_layers_ascend_and_are_within_the_target(count):
    layers = low_middle_high(count)
    assert list(layers) == sorted({*layers})
    assert layers[0] >= 1
    assert layers[-1] < count
    assert len(layers) == 3 or count < 5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["data.holdout=6"], "set eval.limit=3, or data.holdout=20"),
        (["data.holdout=1", "eval.limit=1"], "on; set data.holdout=9"),
        (["eval.limit=null"], "set eval.limit=12, or data.holdout=32"),
    ],
)
def test_a_holdout_without_rows_left_for_validation_is_refused_early(changes, told):
    done = run_here("train/cli.py", "train", "own", "data.sources=[tiny]", *changes, "--dry-run")
    assert done.returncode == 2
    assert "all that is held out is measured" in done.stderr
    assert told in done.stderr


SMALL = ["data.limit=4", "train.steps=2", "train.batch_size=2", "train.threads=1", "eval.limit=1"]
SMALL += ["train.eval_every=null", "eval.validation=1", "eval.max_new_tokens=4", "optim.lr=0.1"]
CHANGED = ["train.rollout=3", "train.alignments=all", "loss.lk_weight=0.5", "loss.depth_decay=0.5"]


@pytest.mark.parametrize("kind", NON_READERS)
def test_what_is_told_to_be_unread_changes_no_weight(tmp_path, kind):
    recipe, script = f"tiny_{SCRIPTS[kind]}", f"train/{SCRIPTS[kind]}.py"
    weights = []
    for number, changes in enumerate([[], CHANGED]):
        places = [f"output.dir={tmp_path / str(number)}", f"data.cache_dir={tmp_path / 'cache'}"]
        done = run_here(script, recipe, *SMALL, *places, *changes)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (f"do not read {', '.join(CHANGED)}" in done.stderr) == bool(changes)
        weights += [(tmp_path / str(number) / kind / "model.safetensors").read_bytes()]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("samples", [1, 2])
def test_the_temperature_of_answers_is_told_to_be_unread_if_all_are_greedy(samples):
    settings = ["data.answers=target", "data.max_new_tokens=8", "data.temperature=0.7"]
    told = [*unread_settings(load_recipe("tiny", [*settings, f"data.samples={samples}"]))]
    greedy = "the first answer is greedy: data.temperature=0.7 is for others"
    assert told == [greedy] * (samples == 1)


def test_an_unknown_kind_is_refused_with_the_nearest():
    done = run_here("train/cli.py", "train", "tiny", "--kind", "eagel3")
    assert done.returncode == 2
    assert "--kind eagel3: no such kind; nearest is eagle3 (there are falcon, " in done.stderr
