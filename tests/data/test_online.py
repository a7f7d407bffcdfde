"""Online features give the same heads as a cache; every rank computes its rows one step ahead."""

import json
import queue

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import ROOT, run_here
from shallow import shallow_target
from test_checkpoint import CrashError, assert_equal, crash_at
from test_features import make_target
from test_loop import assert_close, log_lines, make_recipe
from test_tokens import chats, write

from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.features import OnlineFeatures, sample_scales
from specdraft.data.store.token_builder import build_tokens
from specdraft.eval.generation.answers import build_caches
from specdraft.models.student import make_student
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.batches import Loader, SamplingPlan
from specdraft.train.fit.loop import fit
from specdraft.train.heads import head_kind
from specdraft.train.objectives.distillation import Distillation
from specdraft.train.objectives.text import collate_text
from specdraft.train.plan import make_plan
from specdraft.train.plan_lines import plan_lines

KINDS = {
    "falcon": (head_kind("falcon"), {}),
    "few tokens": (head_kind("falcon"), {"head.draft_vocab": 20, "loss.lk_weight": 0.5}),
    "eagle": (head_kind("eagle"), {"head.block_size": 1, "head.fusion": "linear"}),
    "medusa": (head_kind("medusa"), {"medusa.heads": 3, "medusa.soft_weight": 0.5}),
}
ROWS = 24
ONLINE = {"data.features": "online"}
ALONE = {"train.accumulation": 8}  # one row per forward


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def source(tmp_path):
    rows = chats(ROWS)
    for number, row in enumerate(rows):
        row["messages"][0]["content"] += " Tell me more." * (number % 7)
    return write(tmp_path / "a.jsonl", rows)


@pytest.fixture
def made(tmp_path, source):
    """A recipe, its token cache and its target."""
    recipe, target = settings(tmp_path, source), make_target()
    return recipe, build_tokens(recipe, target.tokenizer), target


def settings(out, source, **changes):
    places = {"data.sources": [source], "data.cache_dir": f"{source}.cache"}
    return make_recipe(out, **{**places, "data.max_length": 256, **changes})


def train(out, source, kind="falcon", evaluate=None, **changes):
    """Train as a command does; return the state and the final weights."""
    AcceleratorState._reset_state(True)
    (kind, own), target = KINDS[kind], make_target()
    recipe = settings(out, source, **own, **changes)
    accelerator = make_accelerator(recipe)
    _, data = build_caches(recipe, target, accelerator)
    head = kind.make(recipe, target, data)
    objective = kind.objective(recipe, target.embeddings(), head)
    state = fit(head, data, objective, recipe, accelerator, evaluate)
    return state, {name: tensor.clone() for name, tensor in head.state_dict().items()}


# -- the same heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_same_forwards_a_head_equals_the_cached_one_bit_for_bit(tmp_path, source, kind):
    recipe, target = settings(tmp_path, source, **KINDS[kind][1]), make_target()
    build_features(recipe, build_tokens(recipe, target.tokenizer), target, batch_tokens=1)
    _, cached = train(tmp_path / "cached", source, kind, **ALONE)
    _, online = train(tmp_path / "online", source, kind, **ALONE, **ONLINE)
    assert_equal(cached, online)
    for a, b in zip(log_lines(tmp_path / "cached"), log_lines(tmp_path / "online"), strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


@pytest.mark.parametrize("kind", KINDS)
def test_with_padded_batches_a_head_equals_the_cached_one_up_to_rounding(tmp_path, source, kind):
    _, cached = train(tmp_path / "cached", source, kind)
    _, online = train(tmp_path / "online", source, kind, **ONLINE)
    assert_close(cached, online)
    for a, b in zip(log_lines(tmp_path / "cached"), log_lines(tmp_path / "online"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["accuracy"] == pytest.approx(b["accuracy"])


def test_a_student_trains_on_online_features_as_on_cached_ones(tmp_path, source):
    def student(out, **changes):
        AcceleratorState._reset_state(True)
        small = {"student.layers": 1, "student.hidden": 8, "student.heads": 2}
        recipe, target = settings(out, source, **small, **changes), make_target()
        accelerator, student = make_accelerator(recipe), make_student(recipe.student, target)
        _, data = build_caches(recipe, target, accelerator)
        # Embeddings alone cannot run: the features must come with the rows.
        objective = Distillation(recipe, student, target.embeddings())
        fit(student, data, objective, recipe, accelerator)
        return student.state_dict()

    assert_close(student(tmp_path / "cached"), student(tmp_path / "online", **ONLINE))


def test_a_row_is_what_the_target_computes_for_it_alone(made):
    recipe, tokens, target = made
    online = OnlineFeatures(recipe, tokens, target)
    assert len(online) == ROWS
    assert online.lengths == tokens.lengths
    for n, row in enumerate(online.__getitems__(list(range(ROWS)))):
        assert torch.equal(row["input_ids"], tokens[n]["input_ids"])
        assert torch.equal(row["loss_mask"], tokens[n]["loss_mask"])
        alone = target.features(row["input_ids"][None])[0]
        torch.testing.assert_close(row["features"], alone)
        assert torch.equal(online[n]["features"], alone)
    assert torch.equal(online[-1]["input_ids"], tokens[ROWS - 1]["input_ids"])
    with pytest.raises(IndexError):
        online[ROWS]


def test_online_features_have_the_dtype_of_a_cache(made, tmp_path, source):
    _, tokens, target = made
    half = settings(tmp_path, source, **{"data.feature_dtype": "bfloat16"})
    cached, online = build_features(half, tokens, target), OnlineFeatures(half, tokens, target)
    assert online[3]["features"].dtype == torch.bfloat16
    torch.testing.assert_close(online[3]["features"], cached[3]["features"])


def test_a_row_beyond_the_targets_context_is_refused(made):
    recipe, tokens, _ = made
    with pytest.raises(DataError, match=r"has a context of 16; set data.max_length=16"):
        OnlineFeatures(recipe, tokens, make_target(context=16))


# -- scales ----------------------------------------------------------------------------------------


def test_scales_of_a_small_corpus_equal_those_of_its_cache(made):
    assert OnlineFeatures(*made).scales == build_features(*made).scales


def test_scales_of_a_large_corpus_are_sampled_from_every_nth_row(made):
    _, tokens, target = made
    scales = sample_scales(tokens, target, sample=-(-sum(tokens.lengths) // 3))
    ids = torch.cat([tokens[n]["input_ids"] for n in range(0, ROWS, 3)])
    features = torch.cat([target.features(tokens[n]["input_ids"][None])[0]
                          for n in range(0, ROWS, 3)])  # fmt: skip
    assert scales["feature_scale"] == pytest.approx(features.std(correction=0).item(), rel=1e-4)
    assert scales["embed_scale"] == pytest.approx(
        target.embed(ids).std(correction=0).item(), rel=1e-4
    )
    assert scales != OnlineFeatures(*made).scales


# -- when, where and how often the target runs -----------------------------------------------------


@pytest.fixture
def watched(made, monkeypatch):
    """Online rows, and a queue of the ids of every forward of their target."""
    recipe, tokens, target = made
    forwards = queue.SimpleQueue()

    def features(ids, **options):
        forwards.put(ids)
        return Target.features(target, ids, **options)

    monkeypatch.setattr(target, "features", features)
    return OnlineFeatures(recipe, tokens, target), forwards


def test_the_next_step_is_computed_while_this_one_trains(watched):
    data, forwards = watched
    plan = SamplingPlan(data.lengths, batch_size=8, seed=0)
    steps = Loader(data, plan, collate_text).steps(0, 3)
    next(steps)
    ahead = [forwards.get(timeout=60) for _ in range(2)][1]  # not requested yet
    (batch,) = next(steps)
    assert torch.equal(ahead, batch.tokens)
    assert not batch.features.is_inference()


def test_a_rank_runs_the_target_once_per_micro_batch_on_its_own_rows(watched):
    data, forwards = watched
    plan = SamplingPlan(data.lengths, batch_size=8, seed=0)
    parts = []
    for rank in range(2):
        loader = Loader(data, plan, collate_text, accumulation=2, rank=rank, ranks=2)
        loaded = [*loader.load(1)]
        parts += loaded
        seen = [forwards.get(timeout=60) for _ in range(2)]
        assert len(loaded) == 2
        assert all(map(torch.equal, seen, (part.tokens for part in loaded)))
        assert forwards.empty()
    rows = [part.row(n)["input_ids"] for part in parts for n in range(2)]
    expected = [data.tokens[n]["input_ids"] for n in plan.rows(1)]
    assert len(expected) == 8
    assert all(torch.equal(*pair) for pair in zip(rows, expected, strict=True))


# -- resume ----------------------------------------------------------------------------------------


def test_a_crashed_run_continues_bit_for_bit(tmp_path, source):
    changes = {**ONLINE, "train.save_every": 2, "train.eval_every": 3, "train.log_every": 2}
    _, whole = train(tmp_path / "whole", source, evaluate=crash_at(99), **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", source, evaluate=crash_at(3), **changes)
    state, cut = train(tmp_path / "cut", source, evaluate=crash_at(99), **changes)
    assert state.step == 6
    assert_equal(whole, cut)
    assert log_lines(tmp_path / "whole")[-1]["loss"] == log_lines(tmp_path / "cut")[-1]["loss"]


@pytest.mark.parametrize("first", ["cached", "online"])
def test_a_checkpoint_is_not_resumed_with_the_other_kind_of_features(tmp_path, source, first):
    second = "online" if first == "cached" else "cached"
    train(tmp_path, source, **{"data.features": first})
    with pytest.raises(RecipeError, match=f"made with data.features = {first}, now it is {second}"):
        train(tmp_path, source, **{"data.features": second, "train.steps": 8})


# -- recipes, plans, commands ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vicuna7b", "vicuna7b_distill"])
def test_the_plan_says_that_no_features_are_stored_and_counts_the_target(name):
    path = ROOT / "recipes" / f"{name}.yaml"
    cached, recipe = load_recipe(path), load_recipe(path, ["data.features=online"])
    plan = make_plan(recipe, ranks=8)
    text = dict(plan_lines(plan, recipe, 8, 100e12))
    assert text["feature cache"] == "none: the target runs in training, 13.5 GB in every process"
    assert plan.memory_per_gpu == make_plan(cached, ranks=8).memory_per_gpu  # it evaluates, too
    alone = load_recipe(path, ["train.eval_every=null"])
    more = plan.memory_per_gpu - make_plan(alone, ranks=8).memory_per_gpu
    assert more == 2 * (plan.target.parameters - plan.target.embedding_parameters)


def test_a_run_loads_one_target_and_stores_no_features(tmp_path, monkeypatch):
    load, loaded = Target.of_recipe, []

    def counting(*arguments):
        loaded.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(Target, "of_recipe", counting)
    small = [
        "train.steps=2",
        "train.batch_size=4",
        "data.limit=24",
        "eval.limit=1",
        "eval.validation=2",
    ]
    small += ["eval.max_new_tokens=8", "eval.methods=[plain,falcon_tree]", "train.eval_every=null"]
    target = f"target.model={shallow_target(tmp_path / 'target')}"
    small += ["eval.tree=tiny_coupled_k3", target, "data.feature_layers=[1]"]
    places = [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    command = ["recipes/tiny.yaml", *small, *places, "data.features=online"]
    done = run_here("train/falcon.py", *command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(loaded) == 1  # and reused for the benchmark
    assert [p.name.partition("-")[0] for p in (tmp_path / "cache").iterdir()] == ["tokens"]
    rows = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [row["method"] for row in rows] == ["plain", "falcon_tree"]
    assert all(row["identical"] + row["near_ties"] == 1 for row in rows)

    shown = run_here("data/cache.py", *command)
    assert "none kept (data.features=online)" in shown.stdout, shown.stderr[-2000:]
    doctor = run_here("eval/doctor.py", *command, "--prompts", "1")
    assert doctor.returncode == 0, doctor.stdout
    assert "data.features=online: the target computes features in training" in doctor.stdout
    assert "0 fail, 6 skipped" in doctor.stdout
    assert not list((tmp_path / "cache").glob("features-*"))
