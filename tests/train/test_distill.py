"""Distillation: the same update however the batch is split, on-policy text, and a whole run.

As a script it is the job that other processes of these tests run:
python tests/train/test_distill.py OUT
"""

import json
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import ROOT, end, run_here, start_ranks
from decoding import plain_tokens
from random_models import VOCAB, random_target
from test_loop import assert_close, log_lines
from transformers import AutoModelForCausalLM

from specdraft.eval.methods.registry import problems
from specdraft.models.student import make_student
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.batches import Loader, SamplingPlan
from specdraft.train.fit.loop import fit
from specdraft.train.objectives.distillation import Distillation
from specdraft.train.objectives.on_policy import OnPolicy, answer_starts, check_prompts
from specdraft.train.objectives.text import collate_text

RECIPES = ROOT / "recipes"
MIXED = {"distill.on_policy": 0.5, "distill.max_new_tokens": 5, "distill.jsd": 0.5}


class ToyTexts:
    """Random rows: a prompt, then one or two answers; with features if a target is given."""

    key = None

    def __init__(self, target=None, count=16):
        generator = torch.Generator().manual_seed(7)
        self.rows = []
        for _ in range(count):
            length, start = (int(torch.randint(n, (), generator=generator)) for n in (8, 4))
            ids = torch.randint(VOCAB, (length + 9,), generator=generator)
            mask = torch.arange(len(ids)) >= start + 2
            mask[-4:-2] = False
            row = {"input_ids": ids, "loss_mask": mask}
            if target:
                row["features"] = target.features(ids[None])[0].clone()
            self.rows.append(row)
        self.lengths = [len(row["input_ids"]) for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def make_recipe(out="runs/toy", **changes):
    """A small recipe; changes are "section.key": value."""
    tree = {
        "name": "toy",
        "data": {"sources": ["tiny"], "max_length": 24},
        "student": {"layers": 1, "hidden": 8, "heads": 2, "intermediate": 12},
        "optim": {"lr": 1.0e-2},
        "train": {"steps": 4, "batch_size": 8, "log_every": 2, "threads": 1},
        "output": {"dir": str(out)},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    if {"student.keep_layers", "student.model"} & changes.keys():
        tree["student"] = {k: v for k, v in tree["student"].items() if f"student.{k}" in changes}
    return from_dict(tree)


def train(out, data=None, evaluate=None, target=None, teacher=None, student=None, **changes):
    """Run `fit` in this process; return its state and the student's final weights.

    teacher: given to the objective instead of the whole target.
    """
    AcceleratorState._reset_state(True)
    recipe, target = make_recipe(out, **changes), target or random_target(sharpness=3.0)
    student = student or make_student(recipe.student, target, recipe.train.seed)
    objective = Distillation(recipe, student, teacher or target)
    accelerator = make_accelerator(recipe)
    state = fit(student, data or ToyTexts(), objective, recipe, accelerator, evaluate)
    return state, {name: tensor.clone() for name, tensor in student.state_dict().items()}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# -- the same update however the batch is split ----------------------------------------------------


@pytest.mark.parametrize("changes", [{}, MIXED], ids=["off_policy", "mixed"])
def test_eight_micro_batches_of_one_row_equal_one_of_eight_rows(tmp_path, changes):
    _, whole = train(tmp_path / "whole", **changes)
    _, cut = train(tmp_path / "cut", **changes, **{"train.accumulation": 8})
    assert_close(whole, cut)
    for a, b in zip(log_lines(tmp_path / "whole"), log_lines(tmp_path / "cut"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"])
        assert a.get("on_policy") == b.get("on_policy")


def test_two_processes_equal_one(tmp_path):
    train(tmp_path / "one", **MIXED)
    two = start_ranks(__file__, tmp_path / "two")
    errors = end(two)
    assert [rank.returncode for rank in two] == [0, 0], errors
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "student") for name in ("one", "two")
    )
    assert_close(one.state_dict(), two.state_dict())
    for a, b in zip(log_lines(tmp_path / "one"), log_lines(tmp_path / "two"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["on_policy"] == b["on_policy"] > 0


class CrashError(Exception):
    """Stands for anything that ends a process between two steps."""


@pytest.mark.parametrize(
    "changes",
    [MIXED, {"student.keep_layers": [1], "student.training": "lora", "student.lora_rank": 2}],
    ids=["mixed", "lora"],
)
def test_a_crashed_run_continues_bit_for_bit(tmp_path, changes):
    def crash_at(step):
        def evaluate(student, now):
            if now == step:
                raise CrashError
            return {"tokens_per_step": 1.0 + now}

        return evaluate

    changes = changes | {"train.steps": 6, "train.save_every": 2, "train.eval_every": 3}
    _, whole = train(tmp_path / "whole", evaluate=crash_at(99), **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", evaluate=crash_at(3), **changes)
    state, cut = train(tmp_path / "cut", evaluate=crash_at(99), **changes)
    assert state.step == 6
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in cut.items())
    assert log_lines(tmp_path / "whole")[-1]["loss"] == log_lines(tmp_path / "cut")[-1]["loss"]


def test_a_tied_student_continues_bit_for_bit(tmp_path):
    target = random_target()
    target.model.lm_head.weight = target.model.get_input_embeddings().weight
    target.config.tie_word_embeddings = True
    changes = {"student.keep_layers": [0], "optim.schedule": "constant", "optim.warmup": 0.0}
    _, whole = train(tmp_path / "whole", target=target, **changes)
    train(tmp_path / "cut", target=target, **changes, **{"train.steps": 2})
    state, cut = train(tmp_path / "cut", target=target, **changes)
    assert state.step == 4
    assert all(torch.equal(whole[name], tensor) for name, tensor in cut.items())


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd", "total_variation", "lk"])
def test_a_divergence_brings_the_student_closer_to_the_target(tmp_path, objective):
    weights = {"distill.forward_kl": 0.0, f"distill.{objective}": 1.0}
    changes = {"student.keep_layers": [0, 1], "train.steps": 40, "train.log_every": 5}
    target = random_target(sharpness=3.0)
    student = make_student(make_recipe(**changes).student, target)
    torch.manual_seed(0)
    with torch.no_grad():  # a perturbed copy of the target, to be taught again
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    train(tmp_path, target=target, student=student, **weights, **changes)
    first, *_, last = log_lines(tmp_path)
    assert last[objective] < 0.6 * first[objective]
    assert last["accuracy"][0] > first["accuracy"][0]
    assert first["loss"] == first[objective]


def test_training_is_the_same_with_cached_features_and_with_a_running_target(tmp_path):
    target = random_target(sharpness=3.0)
    _, cached = train(tmp_path / "a", data=ToyTexts(target), target=target)
    _, online = train(tmp_path / "b", target=target)
    assert_close(cached, online)


def test_with_features_only_the_targets_embeddings_and_lm_head_are_needed(tmp_path):
    target = random_target()
    train(tmp_path, data=ToyTexts(target), target=target, teacher=target.embeddings())
    assert log_lines(tmp_path)[-1]["loss"] > 0


def test_cross_entropy_alone_never_runs_the_target(tmp_path):
    changes = {"distill.forward_kl": 0.0, "distill.cross_entropy": 1.0}
    train(tmp_path, teacher=object(), **changes)
    assert log_lines(tmp_path)[-1]["loss"] == log_lines(tmp_path)[-1]["cross_entropy"] > 0


def test_shared_embeddings_are_not_trained(tmp_path):
    changes = {"student.keep_layers": [1], "student.embeddings": "shared"}
    target = random_target()
    before = target.embedding.weight.clone()
    _, weights = train(tmp_path, target=target, **changes)
    assert torch.equal(weights["model.model.embed_tokens.weight"], before)
    assert torch.equal(target.embedding.weight, before)
    old = make_student(make_recipe(**changes).student, target).state_dict()
    assert not torch.equal(weights["model.model.norm.weight"], old["model.model.norm.weight"])


# -- on-policy text --------------------------------------------------------------------------------


def load_batch(recipe, student, target, accumulation=1):
    objective = Distillation(recipe, student, target)
    texts = ToyTexts()
    plan = SamplingPlan(texts.lengths, 8, seed=0)
    batches = Loader(texts, plan, objective.collate, accumulation).load(0)
    return batches, [objective.plan(student, batch, 0.0) for batch in batches]


def test_the_position_before_each_token_of_the_loss_mask_is_supervised_and_no_other():
    recipe, target = make_recipe(), random_target()
    (batch,), _ = load_batch(recipe, make_student(recipe.student, target), target)
    for number, length in enumerate(batch.lengths):
        row = batch.row(number)
        origin = next(r for r in ToyTexts().rows if torch.equal(r["input_ids"], row["input_ids"]))
        assert torch.equal(row["loss_mask"], origin["loss_mask"])
        assert torch.equal(batch.supervised[number, : length - 1], origin["loss_mask"][1:])
        assert not batch.supervised[number, length - 1 :].any()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_student_answers_the_given_share_of_rows(share):
    changes = {"distill.on_policy": share, "distill.sample_temperature": 0.0}
    recipe, target = make_recipe(**changes, **{"distill.max_new_tokens": 6}), random_target()
    student = make_student(recipe.student, target)
    (batch,), ((rewritten, counted),) = load_batch(recipe, student, target)
    changed = 0
    for number in range(8):
        old, new = batch.row(number), rewritten.row(number)
        starts = answer_starts(new["loss_mask"])
        if torch.equal(old["input_ids"], new["input_ids"]):
            continue
        changed += 1
        (start,) = starts
        assert start in answer_starts(old["loss_mask"])
        prompt, answer = new["input_ids"][:start].tolist(), new["input_ids"][start:].tolist()
        assert prompt == old["input_ids"][:start].tolist()
        assert answer == plain_tokens(student, prompt, min(6, 24 - start))
        assert counted[number].sum() == len(answer)
    assert changed == rewritten.written
    assert changed == {0.0: 0, 1.0: 8}.get(share, changed)
    assert 0 < changed < 8 or share != 0.5


def test_a_students_answer_to_a_row_does_not_depend_on_other_rows():
    recipe, target = make_recipe(**MIXED), random_target()
    student = make_student(recipe.student, target)
    _, ((whole, _),) = load_batch(recipe, student, target)
    _, parts = load_batch(recipe, student, target, accumulation=4)
    rows = [part.row(n) for part, _ in parts for n in range(len(part.lengths))]
    for number, row in enumerate(rows):
        assert torch.equal(row["input_ids"], whole.row(number)["input_ids"])


def test_seed_step_and_slot_choose_which_answer_of_a_row_the_student_rewrites():
    changes = {"distill.on_policy": 1.0, "distill.max_new_tokens": 6, "data.max_length": 12}
    recipe, target = make_recipe(**changes), random_target()
    writer, mask = OnPolicy(recipe, make_student(recipe.student, target)), torch.zeros(16)
    mask[[3, 4, 9, 10, 13]] = 1  # three answers, the last beyond max_length
    row = {"input_ids": torch.arange(16), "loss_mask": mask.bool()}

    def written(seed: int, step: int) -> list[list[int]]:
        batch = writer(collate_text([row] * 8, [(seed, step, slot) for slot in range(8)]))
        return [batch.row(n)["loss_mask"].tolist() for n in range(8)]

    cut = {start: [False] * start + [True] * min(6, 12 - start) for start in (3, 9)}
    found = [written(seed, step) for seed in (0, 1) for step in (0, 1)]
    assert all(own in (cut[3], cut[9]) for batch in found for own in batch)
    assert all(found.count(batch) == 1 and cut[3] in batch and cut[9] in batch for batch in found)


def test_on_policy_answers_use_the_students_current_weights():
    changes = {"distill.on_policy": 1.0, "distill.sample_temperature": 0.0}
    recipe, target = make_recipe(**changes), random_target()
    student = make_student(recipe.student, target)
    (batch,), _ = load_batch(recipe, student, target)
    writer = OnPolicy(recipe, student)
    before = writer(batch)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = writer(batch)
    start = answer_starts(after.row(0)["loss_mask"])[0]
    ids = after.row(0)["input_ids"].tolist()
    assert ids[start:] == plain_tokens(student, ids[:start], len(ids) - start)
    assert not torch.equal(before.row(0)["input_ids"], after.row(0)["input_ids"])


def test_rows_without_a_prompt_are_refused_on_policy():
    texts = ToyTexts()
    check_prompts(texts)
    for row in texts.rows:
        row["loss_mask"] = torch.arange(len(row["input_ids"])) >= 1
    with pytest.raises(DataError, match="none of the first 16 rows has a prompt"):
        check_prompts(texts)


# -- recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["student.layers=2"], "student.keep_layers = [0, 11] and student.layers = 2: set exactly"),
        (["student.keep_layers=[]"], "student.keep_layers = []: must be layers"),
        (["student.keep_layers=[3,1]"], "in ascending order"),
        (["student.hidden=64"], "student.hidden = 64: needs a config of its own: student.layers"),
        (["student.training=none"], "student.training = 'none': needs a pretrained student"),
        (["student.lora_targets=[]"], "name at least one linear layer"),
        (["student.keep_layers=null"], "eval.methods: ssd drafts with a student"),
        (
            ["student.keep_layers=null", "student.layers=1", "student.embeddings=shared"],
            "student.embeddings = 'shared': needs student.keep_layers",
        ),
        (
            ["student.keep_layers=null", "student.layers=1", "student.training=lora"],
            "student.training = 'lora': adapts existing weights",
        ),
        (["distill.beta=0"], "distill.beta = 0.0: must be above 0 and below 1"),
        (["distill.beta=1.5"], "distill.beta = 1.5: must be >= 0 and <= 1"),
        (["distill.on_policy=1.1"], "distill.on_policy = 1.1: must be >= 0 and <= 1"),
        (["distill.on_policy=-0.1"], "distill.on_policy = -0.1: must be >= 0 and <= 1"),
        (["distill.forward_kl=0"], "nothing to train on; one must be above 0"),
        (["distill.temperature=0"], "distill.temperature = 0: must be >= 0.01"),
        (
            ["distill.on_policy=0.5", "data.format=text"],
            "distill.on_policy = 0.5: a text has no prompt",
        ),
        (["train.steps=null"], "train.steps and train.epochs are both null"),
    ],
)
def test_invalid_settings_are_refused_when_the_recipe_is_read(overrides, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPES / "tiny_distill.yaml", overrides, check=problems)
    assert message in str(caught.value)


# -- a whole run -----------------------------------------------------------------------------------


def test_a_run_leaves_a_measured_student_that_can_be_benchmarked_again(tmp_path):
    small = ["train.steps=4", "train.batch_size=4", "train.eval_every=2", "data.limit=8"]
    small += ["eval.limit=2", "eval.validation=2", "eval.max_new_tokens=12"]
    places = [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    places += ["distill.on_policy=0.5", "distill.max_new_tokens=8"]
    done = run_here("train/distill.py", "recipes/tiny_distill.yaml", *small, *places)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"recipe.yaml", "log.jsonl", "tensorboard", "checkpoints", "student"}
    rows = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [row["method"] for row in rows] == ["plain", "generate", "prompt_lookup", "ssd"]
    assert all(row["identical"] + row["near_ties"] == 2 for row in rows)
    assert rows[-1]["mbsu"] < rows[-1]["tokens_per_step"]
    assert {p.name.partition("-")[0] for p in (tmp_path / "cache").iterdir()} == {"tokens"}
    options = ["--methods", "plain,ssd", "--batch-sizes", "1,2", "--temperatures", "1"]
    bench = run_here("eval/bench.py", "recipes/tiny_distill.yaml", *small, *places, *options)
    assert bench.returncode == 0, bench.stderr[-2000:]
    measured = tmp_path / "run" / "bench" / "tiny_chat-b1+2-t1" / "report.json"
    rows = json.loads(measured.read_text())["runs"]
    assert all(row["identical"] + row["near_ties"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/tiny.yaml"], "tiny: no student; set one of student.layers"),
        (["recipes/tiny_distill.yaml", "eval.methods=[ssd,falcon_tree]"], "falcon_tree needs a"),
    ],
)
def test_bad_input_gives_one_clear_message_before_any_training(arguments, message):
    done = run_here("train/distill.py", *arguments, "--dry-run")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], **MIXED, **{"train.accumulation": 2})
