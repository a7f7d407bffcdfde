"""On a GPU training takes the same steps as on the CPU, and also works in bfloat16."""

from collections.abc import Callable

import pytest
import test_distill
import test_medusa
import torch
from random_models import moved, random_eagle3, random_target
from test_distill import MIXED, ToyTexts
from test_features import make_target
from test_loop import ToyRows, make_ends, make_head, make_recipe
from test_tokens import chats, write
from test_tokens import recipe as cached
from torch import nn

from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.token_builder import build_tokens
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.student import make_student
from specdraft.models.target import Target
from specdraft.train.objectives.ahead import TokensAhead
from specdraft.train.objectives.csgd import CoupledGlancing
from specdraft.train.objectives.distillation import Distillation
from specdraft.train.objectives.training_time_test import TrainingTimeTest

# A drafter on a device, its objective, and its training rows.
Case = tuple[nn.Module, object, list[dict]]
QUIET = {"loss.feature_noise": 0.0, "glance.start": 0.4}  # noise is drawn on the features' device


def falcon(device: torch.device, k: int = 3, changes: dict | None = None, **shape) -> Case:
    ends, head = make_ends(), make_head(k, **shape)
    ends = TargetEmbeddings(ends.embedding.to(device), ends.lm_head_weight.to(device))
    recipe = make_recipe("runs/toy", **QUIET, **(changes or {}))
    return head.to(device), CoupledGlancing(recipe, ends, head.config), ToyRows(count=6).rows


def eagle3(device: torch.device) -> Case:
    target = random_target(layers=4)
    head, rows = random_eagle3(target).train(), ToyTexts(count=6).rows
    for row in rows:
        features = target.features(row["input_ids"][None], layers=head.config.feature_layers)
        row["features"] = features[0].clone()
    recipe = make_recipe("runs/toy", **QUIET)
    return head.to(device), TrainingTimeTest(recipe, moved(target, device), head.config), rows


def medusa(device: torch.device) -> Case:
    target, recipe = random_target(), test_medusa.make_recipe(**{"medusa.soft_weight": 0.3})
    heads, rows = test_medusa.random_heads(target, 3).train(), ToyTexts(target, 6).rows
    return heads.to(device), TokensAhead(recipe, moved(target, device)), rows


def student(device: torch.device, **changes) -> Case:
    target, recipe = random_target(sharpness=3.0), test_distill.make_recipe(**changes)
    made = make_student(recipe.student, target).to(device)
    return made, Distillation(recipe, made, moved(target, device)), ToyTexts(count=8).rows


CASES: dict[str, Callable[[torch.device], Case]] = {
    "falcon": falcon,
    "linear": lambda device: falcon(device, fusion="linear"),
    "both": lambda device: falcon(device, reads="both", coupling="recurrent", fusion="linear"),
    "newest": lambda device: falcon(device, reads="newest", coupling="markov", layers=2),
    "own": lambda device: falcon(device, coupling="recurrent", fusion="linear", window=4),
    "paced": lambda device: falcon(device, changes={"loss.pace_smoothing": 0.1}),
    "eagle": lambda device: falcon(device, 1, fusion="linear", input_norm=False),
    "eagle3": eagle3,
    "medusa": medusa,
    "student": student,
    "on policy": lambda device: student(device, **MIXED),
}


def losses(case: Case, device: torch.device, steps: int = 2) -> list[float]:
    """The mean loss at each of some optimiser steps."""
    drafter, objective, rows = case
    optimizer, found = torch.optim.SGD(drafter.parameters(), lr=0.05), []
    for step in range(steps):
        batch = objective.collate(rows, [(0, step, n) for n in range(len(rows))]).to(device)
        plan = objective.plan(drafter, batch, 0.0)
        total, sums = objective.loss(drafter, batch, *plan)
        loss = total / sums["counted"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        objective.report(sums)
        found.append(float(loss.detach()))
    assert all(weight.isfinite().all() for weight in drafter.parameters())
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_training_steps_equal_those_of_the_cpu(device, name):
    cpu = torch.device("cpu")
    found, expected = (losses(CASES[name](place), place, 3) for place in (device, cpu))
    assert found == pytest.approx(expected, rel=1e-3)
    assert len({*expected}) == 3


@pytest.mark.parametrize("name", CASES)
def test_the_loss_in_bfloat16_stays_close(device, name):
    exact, case = losses(CASES[name](device), device, 1), CASES[name](device)
    drafter = case[0]  # only its forward, as accelerate does
    drafter.forward = torch.autocast(device.type, torch.bfloat16)(drafter.forward)
    found = losses(case, device)
    assert all(map(torch.isfinite, torch.tensor(found)))
    assert found[0] == pytest.approx(exact[0], rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_feature_cache_equals_that_of_the_cpu(device, tmp_path, dtype):
    """With many shards, each assembled while the one before is written."""
    target, texts = make_target(), write(tmp_path / "texts.jsonl", chats(24))
    caches = []
    for place in ("cpu", device):
        there = Target(target.model.to(place), target.tokenizer, target.name)
        options = {"cache_dir": str(tmp_path / f"on-{place}"), "feature_layers": [1]}
        settings = cached(tmp_path, texts, feature_dtype=dtype, **options)
        tokens = build_tokens(settings, target.tokenizer)
        caches.append(build_features(settings, tokens, there, shard_bytes=8192))
    first, second = caches
    assert len(first.manifest["shards"]) == len(second.manifest["shards"]) > 3
    far = (
        1e-4 if dtype == "float32" else 2 / 127 * max(row["features"].abs().max() for row in first)
    )
    for own, other in zip(first, second, strict=True):
        assert torch.equal(own["input_ids"], other["input_ids"])
        torch.testing.assert_close(own["features"], other["features"], rtol=1e-4, atol=float(far))
