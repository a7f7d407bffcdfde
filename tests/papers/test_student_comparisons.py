"""Figures of the papers: trees of equal length or budget, and the divergence of merges by tau."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoding import decode, plain_tokens, prompts
from random_models import random_target

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Completion, Request, Step
from specdraft.eval.engine.timing import Timing
from specdraft.eval.engine.tree import path_to
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.methods.registry import Setup, make_drafter
from specdraft.eval.methods.trained import Trained
from specdraft.eval.papers.gsd import ComparingGSD, merges, sweep
from specdraft.eval.papers.rsd import (
    Shape,
    at_budget,
    at_length,
    best_of,
    compare,
    factorings,
    standard_error,
)
from specdraft.models.student import finished_student, make_student
from specdraft.models.target import Target
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import DraftingSection, StudentSection


def nodes(branching: tuple[int, ...]) -> int:
    return sum(math.prod(branching[: depth + 1]) for depth in range(len(branching)))


@pytest.mark.parametrize("budget", [6, 10, 14])
def test_all_branching_factors_of_a_budget_are_found(budget):
    every = {
        factors
        for depth in range(2, budget)
        for factors in itertools.combinations_with_replacement(range(budget // 2, 0, -1), depth)
        if nodes(factors) == budget and factors[0] > 1
    }
    assert set(factorings(budget)) == every


@pytest.mark.parametrize("budget", [6, 10, 14, 21, 30])
def test_every_shape_has_its_budgets_nodes_or_its_lengths_depth(budget):
    target, recipe = random_target(), load_recipe("recipes/tiny_distill.yaml")

    def drafter(shape):
        own = replace(recipe, drafting=shape.section(DraftingSection()))
        return make_drafter(shape.method, Setup(own, target, Trained(student=target), 1, 64))

    assert {drafter(shape).max_nodes for shape in at_budget(budget)} == {budget}
    for length in (2, 3, 5):
        assert {drafter(shape).depth for shape in at_length(length)} == {length}


def test_the_standard_error_agrees_with_resampling_prompts():
    chance = random.Random(1)
    done = []
    for number in range(60):
        steps = [Step(chance.randint(1, 5), 0, 0, 0) for _ in range(chance.randint(3, 30))]
        done.append(Completion(number, [0] * sum(step.emitted for step in steps), steps))
    ratios = []
    for _ in range(2000):
        again = chance.choices(done, k=len(done))
        ratios.append(sum(len(d.tokens) for d in again) / sum(len(d.steps) for d in again))
    mean = sum(ratios) / len(ratios)
    spread = (sum((r - mean) ** 2 for r in ratios) / len(ratios)) ** 0.5
    assert standard_error([Outcome(done, 1.0, Timing())]) == pytest.approx(spread, rel=0.1)
    assert standard_error([Outcome(done[:1], 1.0, Timing())]) is None


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny):
    """A recipe with a finished student: two unchanged layers of the target."""
    folder, target = tmp_path_factory.mktemp("run"), tiny
    make_student(StudentSection(keep_layers=[0, 11]), target).save_pretrained(folder / "student")
    options = ["eval.limit=3", "eval.max_new_tokens=10", "eval.temperature=1", "train.threads=1"]
    return load_recipe("recipes/tiny_distill.yaml", [*options, f"output.dir={folder}"])


def test_shapes_are_compared_on_the_same_prompts(recipe, tiny):
    shapes = [Shape("ssd", length=3), Shape("rsd_c", (2, 1)), Shape("rsd_s", width=2, length=2)]
    rows = [*compare(recipe, tiny, {"budget 4": shapes}, [0])]
    assert [(row["method"], row["shape"]) for row in rows] == [
        ("ssd", "1 x 3"), ("rsd_c", "2-1"), ("rsd_s", "2 x 2")
    ]  # fmt: skip
    assert {row["acceptance"] for row in rows} == {"recursive"}
    assert {row["outputs"] for row in rows} == {3}
    assert all(row["standard_error"] >= 0 for row in rows)
    best = max((row for row in rows if row["method"] == "rsd_c"), key=lambda r: r["tokens"])
    cell = best_of(rows)["RSD-C"].figures["budget 4"]
    assert (cell["mean"], cell["shape"]) == (best["tokens_per_step"], "2-1")


def test_every_prompt_is_decoded_with_every_seed(recipe, tiny):
    recipe = replace(recipe, eval=replace(recipe.eval, temperature=1.0))
    shapes = {"length 3": [Shape("rsd_s", width=2, length=3)]}
    (every,), *single = ([*compare(recipe, tiny, shapes, seeds)] for seeds in ([0, 2], [0], [2]))
    for key in ("outputs", "tokens", "steps"):
        assert every[key] == sum(row[key] for (row,) in single)
    assert len({row["steps"] for (row,) in single}) > 1


def test_a_larger_tau_merges_less(recipe, tiny):
    student = finished_student(recipe.student, Path(recipe.output.dir) / "student", tiny)
    rows = sweep(recipe, tiny, student, [0, 1], {"tokens/step": "tokens_per_step"})
    assert list(rows) == ["tau 0", "tau 1"]
    first = rows["tau 0"].figures
    assert first["merged/step"]["mean"] > rows["tau 1"].figures["merged/step"]["mean"]
    assert first["KL"]["mean"] > 0
    assert merges([], 5) == {"merged/step": {"mean": 0}}
    assert merges([1.0, 3.0], 4)["KL"] == {"mean": 2, "standard_error": 1}


def test_the_divergence_of_a_merge_compares_its_two_texts():
    """Computing it does not change the output."""
    target, student = random_target(), random_target(seed=3, sharpness=3.0)
    prompt = prompts()[1]
    drafter = ComparingGSD(student, 1, 64, 1, 5, depth=3, theta_prob=0.1, theta_sib=0.1)
    growths, harvest = [], drafter.harvest
    drafter.harvest = lambda row, growth: growths.append(growth) or harvest(row, growth)
    decoder = Decoder(target, drafter, 1, 512)
    assert decode(decoder, [Request(prompt, 20)]) == [plain_tokens(target, prompt, 20)]
    growth, expected = growths[0], []
    for node, first in enumerate(growth.graph.shared):
        if first >= 0:
            laws = []
            for end in (node, first):
                text = [growth.tokens[n] for n in path_to(end, growth.parents)]
                logits = student.model(torch.tensor([prompt + text])).logits[0, -1]
                laws.append(logits.double().log_softmax(-1))
            expected.append(float((laws[0].exp() * (laws[0] - laws[1])).sum()))
    assert expected
    assert drafter.divergences[: len(expected)] == pytest.approx(expected, abs=1e-5)
