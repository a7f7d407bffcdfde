"""A head drafts in its target's dtype or the recipe's, and outputs stay the same."""

from functools import cache

import pytest
import torch
from decoding import decode, prompts
from random_models import random_eagle3, random_head, random_target
from test_dynamic import FREE
from test_row_pass import HEADS, head_of

from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.pass_options import PassOptions
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.recipes.schema import EvalSection

HALF = torch.bfloat16


@pytest.fixture(scope="module")
def target():
    return random_target()


def drafters(head, target, rows: int, dtype=HALF):
    """A chain, a tree and dynamic drafts of a head."""
    k = head.config.block_size
    tree = StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], k)
    for shape in (StaticTree.chain(5, k), tree):
        yield FalconDrafter(head, target, shape, rows, 128, options=PassOptions(dtype=dtype))
    yield DynamicFalcon(head, target, FREE, rows, 128, options=PassOptions(dtype=dtype))


def asked(drawn: bool) -> list[Request]:
    settings = {"temperature": 1.3, "top_k": 15} if drawn else {}
    return [Request(prompt, 15, seed=n, **settings) for n, prompt in enumerate(prompts(4))]


@cache
def said_by(target, drawn: bool) -> list[list[int]]:
    return decode(Decoder(target, None, 1, 128), asked(drawn))


def check_outputs(target, drafter, rows: int, ways=(False, True)) -> None:
    """Greedy and sampled outputs are the target's own, whatever is drafted."""
    decoder = Decoder(target, drafter, rows, 128)
    for drawn in ways:
        assert decode(decoder, asked(drawn), accepts=False) == said_by(target, drawn)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_half_precision_head_changes_no_output(target, name, rows):
    """A greedy row alone takes the single-row function; sampled and several rows are packed."""
    head = head_of(target, name)
    for drafter in drafters(head, target, rows):
        assert {weight.dtype for weight in drafter.head.parameters()} == {HALF}
        assert drafter.pool.dtype is HALF
        check_outputs(target, drafter, rows, (False, True) if rows == 1 else (False,))
        assert drafter.forwards > 0
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}


@torch.inference_mode()
def test_a_half_precision_eagle3_head_changes_no_output():
    target = random_target(layers=4)
    for drafter in drafters(random_eagle3(target), target, 2):
        assert {weight.dtype for weight in drafter.head.parameters()} == {HALF}
        check_outputs(target, drafter, 2)


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_half_precision_predictions_are_close_to_those_in_float32(target, name):
    head, text = head_of(target, name), torch.arange(3, 33) % target.vocab_size
    found = []
    for dtype in (torch.float32, HALF):
        chain, *_ = drafters(head, target, 1, dtype)
        features = target.features(text[None], layers=chain.feature_layers)[0]
        chain.start(0, Request([3], 9))
        chain.observe(0, [*text[1:].tolist(), 7], features)
        found.append([chain.read_alone(0).hidden])
        chain.start(0, Request([3], 9))
        chain.observe(0, [*text[1:].tolist(), 7], features)
        found[-1].append(chain._read([0])[0])
    for precise, other in zip(*found, strict=True):
        assert other.dtype is HALF
        precise, other = (each.flatten(0, -2)[0].float() for each in (precise, other))
        assert 0 < (other - precise).abs().max() < 0.05 * precise.abs().max()


def test_a_head_with_a_recurrent_state_stays_in_float32(target):
    for drafter in drafters(random_head(target, 2), target, 2):  # an LSTM
        assert drafter.dtype is torch.float32
        check_outputs(target, drafter, 2)


def test_a_heads_dtype_is_the_targets_unless_the_recipe_sets_one(target):
    assert PassOptions.of(EvalSection(), target) == PassOptions(False, torch.float32)
    assert PassOptions.of(EvalSection(head_dtype="bfloat16", compile=True), target) == PassOptions(
        True, HALF
    )
    coarse = random_target()
    coarse.model.to(HALF)
    assert PassOptions.of(EvalSection(), coarse) == PassOptions(False, HALF)
