"""Tuning halves its candidates, never sees a benchmark prompt, and writes a valid recipe part."""

from math import prod

import pytest
import torch
import yaml

from specdraft.data.prompts import load_prompts, tuning_prompts, validation_prompts
from specdraft.eval.measure.tuning import (
    Scorer,
    apply_setting,
    look_up,
    overrides,
    recipe_part,
    sample_settings,
    successive_halving,
)
from specdraft.eval.methods.registry import space_of
from specdraft.eval.methods.trained import Trained
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe

RECIPE = "recipes/tiny_cascade.yaml"


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


def test_the_tuning_split_is_disjoint_from_the_measured_and_validation_prompts(tiny):
    for limit in (1, 40, 160):
        recipe = load_recipe(RECIPE, [f"eval.limit={limit}"])
        parts = [load_prompts(recipe, tiny.tokenizer), validation_prompts(recipe, tiny.tokenizer)]
        parts.append(tuning_prompts(recipe, tiny.tokenizer, 1000))
        ids = [prompt.id for part in parts for prompt in part]
        assert len(ids) == len(set(ids)) == 200
        few = tuning_prompts(recipe, tiny.tokenizer, 5)
        assert len({prompt.category for prompt in few}) == len(few) == 5
    for everything in ("eval.limit=null", "eval.limit=190"):
        with pytest.raises(DataError, match=r"eval\.limit = .*no prompt of tiny_chat is left"):
            tuning_prompts(load_recipe(RECIPE, [everything]), tiny.tokenizer, 5)


def test_halving_keeps_the_better_half_and_doubles_the_prompts():
    asked = []

    def measure(candidate: int, budget: int) -> float:
        asked.append((candidate, budget))
        # Few prompts cannot tell candidates 6 and 7 apart; many can.
        return 6.5 if budget < 16 and candidate in (6, 7) else candidate

    rungs = list(successive_halving(range(12), measure, 2, 16))
    assert [(budget, len(scored)) for budget, scored in rungs] == [(2, 12), (4, 6), (16, 3)]
    assert sorted(one for _, one in rungs[1][1]) == [6, 7, 8, 9, 10, 11]
    assert rungs[-1][1][0] == (11, 11)
    assert len(asked) == 12 + 6 + 3
    assert list(successive_halving([5], measure, 2, 16)) == [(16, [(5, 5)])]


def test_candidates_are_valid_and_distinct_and_start_with_the_recipes_own():
    places = ["cascade.students=[a, b]", "cascade.k=[[4, 2, 1], [0, 2, 0], [0, 0, 3]]"]
    recipe = load_recipe(RECIPE, places)
    found = sample_settings(recipe, "cascade", 30)
    assert found[0] == {
        "cascade.k.0.0": 4, "cascade.k.0.1": 2, "cascade.k.0.2": 1,
        "cascade.k.1.1": 2, "cascade.k.1.2": 0, "cascade.k.2.2": 3, "cascade.copy_match": None,
        "cascade.leniency": 1.0,
    }  # fmt: skip
    assert len(found) == 30 == len({tuple(setting.items()) for setting in found})
    assert sample_settings(recipe, "cascade", 30) == found
    for setting in found:
        own = apply_setting(recipe, setting)
        assert all(look_up(own, path) == value for path, value in setting.items())
        assert own.eval == recipe.eval


def test_leniency_is_not_tuned_with_a_single_student():
    found = sample_settings(load_recipe(RECIPE), "cascade", 10_000)
    assert "cascade.leniency" not in found[0]
    sizes = [len(values) for values in space_of(load_recipe(RECIPE), "cascade").values()]
    assert len(found) == prod(sizes)


def test_a_method_without_a_tuning_space_is_refused_with_the_known_ones():
    with pytest.raises(RecipeError, match="nothing to fit of 'plain'; known: prompt_lookup"):
        sample_settings(load_recipe(RECIPE), "plain", 5)


def test_part_of_a_recipe_can_be_given_as_a_file_or_as_overrides(tmp_path):
    recipe = load_recipe(RECIPE)
    best = {"cascade.k.0.0": 6, "cascade.k.1.1": 7, "drafting.theta_prob": 0.2}
    part = recipe_part(recipe, best)
    assert part == {"cascade": {"k": [[6, 2], [0, 7]]}, "drafting": {"theta_prob": 0.2}}
    path = tmp_path / "best.yaml"
    path.write_text(yaml.safe_dump(part))
    expected = apply_setting(recipe, best)
    assert load_recipe(RECIPE, [str(path)]) == load_recipe(RECIPE, overrides(part)) == expected
    assert load_recipe(RECIPE, [str(path), "drafting.theta_prob=0.0"]).drafting.theta_prob == 0.0
    path.write_text("cascade: {l: 2}")
    with pytest.raises(RecipeError, match=r"cascade\.l is an unknown key"):
        load_recipe(RECIPE, [str(path)])
    with pytest.raises(RecipeError, match=r"gone\.yaml: cannot be read"):
        load_recipe(RECIPE, ["gone.yaml"])


def test_settings_are_scored_against_plain_decoding(tiny):
    recipe = load_recipe(RECIPE, ["eval.max_new_tokens=12"])
    ones = torch.ones(tiny.vocab_size, dtype=torch.long)
    table = MaxGramTable.of_counts(MaxGramConfig(tiny.vocab_size), ones, ones, ones)
    trained = Trained(table=table, student=tiny, cascade=(tiny,))
    prompts = tuning_prompts(recipe, tiny.tokenizer, 2)
    for method in ("cascade", "ssd"):
        by_swi = Scorer(recipe, method, tiny, trained, prompts, "swi")
        # The target as its own student costs a target forward per pass: nothing is gained.
        assert 0 < by_swi(sample_settings(recipe, method, 1)[0], 1) < 1.5
    free = Scorer(recipe, "maxgram", tiny, trained, prompts, "swi")
    assert free({"maxgram.n": 5}, 2) >= 1.0
    assert Scorer(recipe, "maxgram", tiny, trained, prompts, "wall")({"maxgram.n": 1}, 1) > 0
