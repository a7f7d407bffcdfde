"""A run at the size of a larger model: refusals, separate files, and what its report says."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from random_models import random_eagle3, random_head, random_target
from transformers import Qwen3Config

from specdraft.data.prompts import Prompt, load_prompts
from specdraft.eval.bench import place_of
from specdraft.eval.costing import room
from specdraft.eval.costing.enlarged import enlarge
from specdraft.eval.costing.shapes import Shape
from specdraft.eval.measure.report import evaluate
from specdraft.eval.measure.table import print_report
from specdraft.eval.methods.setup import tree_file
from specdraft.eval.methods.trained import Trained
from specdraft.eval.pricing.cost import costs_file
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.shapes import TargetShape, llama_config
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fitted_tree import fitted_tree
from specdraft.recipes.load import load_recipe
from specdraft.recipes.static_trees import TREE
from specdraft.recipes.terminal import Screen

LARGER = Shape("larger", llama_config(TargetShape(256, 13, 4, 4, 400, 2100), 512))
NAME = "tiny at the size of larger"


def recipe(folder: Path, *overrides: str):
    return load_recipe("tiny", [f"output.dir={folder}", "eval.limit=1", *overrides])


@pytest.fixture(scope="module")
def tiny() -> Target:
    return Target.load("tiny")


@pytest.fixture(scope="module")
def large(tiny, tmp_path_factory) -> Target:
    return enlarge(LARGER, recipe(tmp_path_factory.mktemp("run")), tiny, Trained())[0]


def test_an_enlarged_runs_costs_have_their_own_file_in_its_folder(tiny, large, tmp_path):
    own = recipe(tmp_path)
    assert costs_file(own, tiny) == tmp_path / "costs.json"
    assert costs_file(own, large) == tmp_path / "costs_tiny_at_the_size_of_larger.json"


def test_an_enlarged_runs_report_has_its_own_folder(tmp_path):
    bench = tmp_path / "bench"
    assert place_of("tiny", [recipe(tmp_path)]) == bench / "tiny_chat-b1-t0"
    assert place_of("tiny", [recipe(tmp_path)], LARGER) == bench / "tiny_chat-b1-t0-larger"


def test_an_enlarged_runs_report_names_the_size_and_has_the_same_acceptance(tiny, large, tmp_path):
    overrides = ("eval.max_new_tokens=12", "eval.methods=[plain,generate,hf_prompt_lookup]")
    answers = []
    for target in (tiny, large):
        own, prompt = recipe(tmp_path, *overrides), [prompt_of(target)]
        report = evaluate(own, target, Trained(), prompt, own.eval.methods)
        shown = StringIO()
        print_report(report, Screen(file=shown, width=100))
        assert report["target"] == target.name
        title = " ".join(shown.getvalue().split())
        assert (f", float32, {NAME}" in title) == (target is large)
        assert [run["identical"] for run in report["runs"]] == [1, 1, 1]
        answers.append([run["tokens_per_step"] for run in report["runs"]])
    assert answers[0] == answers[1]


def prompt_of(target: Target) -> Prompt:
    return load_prompts(load_recipe("tiny", ["eval.limit=1"]), target.tokenizer)[0]


def test_an_enlarged_head_keeps_the_tree_fitted_to_it(tiny, tmp_path):
    head = random_head(tiny, 2)
    head.folder = tmp_path
    (tmp_path / TREE).write_text("block_size: 2\npaths: [[0], [0, 0]]\n")
    own = recipe(tmp_path)
    _, trained = enlarge(LARGER, own, tiny, Trained(head=head))
    assert trained.head.hash() == head.hash()
    assert tree_file(own, trained) == str(fitted_tree(tmp_path, head.hash()))
    assert trained.weights() == Trained(head=head).weights()


def test_an_enlarged_table_fills_new_tokens_with_its_fallback(tiny, tmp_path):
    table = MaxGramTable(MaxGramConfig(tiny.vocab_size, fallback=5))
    for part in (table.next_id, table.seen, table.agreed):
        part.fill_(3)
    _, trained = enlarge(LARGER, recipe(tmp_path), tiny, Trained(table=table))
    assert trained.table.next_id.tolist() == [3] * 2048 + [5] * 52


def test_students_of_a_cascade_are_refused(tiny, tmp_path):
    with pytest.raises(RecipeError, match=r"cascade.students cannot be enlarged"):
        enlarge(LARGER, recipe(tmp_path), tiny, Trained(cascade=(tiny,)))


def test_an_eagle3_head_is_refused(tiny, tmp_path):
    with pytest.raises(RecipeError, match="EAGLE-3 head cannot be enlarged"):
        enlarge(LARGER, recipe(tmp_path), tiny, Trained(head=random_eagle3(random_target())))


def test_enlarging_to_or_from_another_family_is_refused(tiny, tmp_path):
    with pytest.raises(RecipeError, match="--shape other: a qwen3; models are enlarged to a Llama"):
        enlarge(Shape("other", Qwen3Config()), recipe(tmp_path), tiny, Trained())
    other = random_target()
    other.config.model_type = "mistral"
    with pytest.raises(RecipeError, match="random-0 is a mistral; only a Llama without biases"):
        enlarge(LARGER, recipe(tmp_path), other, Trained())


def test_a_size_too_large_for_memory_is_refused_before_it_is_made(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda device: 10**7)
    monkeypatch.setattr(Target, "__init__", None)
    with pytest.raises(RecipeError, match=f"{NAME}, float32: needs 0.1 GB of memory"):
        enlarge(LARGER, recipe(tmp_path), tiny, Trained())


def test_an_indivisible_head_size_is_refused_before_anything_is_made(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "__init__", None)
    head = random_head(tiny, 2)
    head.config = replace(head.config, heads=2, kv_heads=1)  # 64 dimensions each
    shape = Shape("odd", llama_config(TargetShape(384, 13, 4, 4, 400, 2100), 512))
    with pytest.raises(RecipeError, match="the head: its attention heads have 64 dimensions"):
        enlarge(shape, recipe(tmp_path), tiny, Trained(head=head))
