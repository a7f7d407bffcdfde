"""A small model in a large one: what it says, and what drafts for it, stays as it was."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from decoding import PATHS, completions, prompts
from random_models import random_head, random_target
from test_medusa import random_heads

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.enlarged.heads import enlarged_head, enlarged_medusa
from specdraft.models.enlarged.target import enlarged_target
from specdraft.models.falcon import FalconHead
from specdraft.models.shapes import TargetShape
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, TargetError

CPU = torch.device("cpu")
# Of a small target: hidden 16, 2 layers, heads of 4, 4 of them, 2 of keys and values, inner 32.
SHAPES = {
    "each query head its keys": TargetShape(128, 5, 8, 8, 96, 61),
    "groups as they were": TargetShape(48, 3, 6, 3, 40, 29),
    "groups that are larger": TargetShape(192, 2, 12, 2, 32, 23),
    "tied": TargetShape(128, 5, 8, 8, 96, 61, tied=True),
}
SHAPE = SHAPES["each query head its keys"]
CHOICES = [*product(("lstm", "linear", "biased"), ("own", "both", "newest"))]


def small_target(**changes) -> Target:
    """Of which the first token never comes, whatever else does."""
    target = random_target(**changes)
    with torch.no_grad():
        # All features have something in common.
        common = torch.randn(target.hidden_size, generator=torch.Generator().manual_seed(5))
        target.embedding.weight.add_(4 * common)
        target.model.model.norm.weight.uniform_(0.5, 1.5)
        feature = target.features(torch.arange(target.vocab_size)[None])[0].mean(0)
        target.lm_head.weight[0] = -40 * feature / feature.norm()
    return target


@pytest.fixture(scope="module")
def small() -> Target:
    return small_target()


def enlarged(target: Target, shape: TargetShape = SHAPE) -> Target:
    return enlarged_target(target, shape, "larger", torch.float32, CPU)


@pytest.fixture(scope="module")
def large(small) -> Target:
    return enlarged(small)


@pytest.fixture(scope="module")
def of_no_more_tokens(small) -> Target:
    """A head with random weights may well draft the first token, and those that are as probable."""
    return enlarged(small, replace(SHAPE, vocab_size=small.vocab_size))


def requests() -> list[Request]:
    """Greedy and sampled ones."""
    settings = [{}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1.0}]
    return [
        Request(prompt, 12, seed=number, **settings[number % 3])
        for number, prompt in enumerate(prompts())
    ]


def steps(target: Target, drafter) -> list:
    done = completions(Decoder(target, drafter, 3, 128), requests(), accepts=False)
    return [[(step.tokens, step.drafted, step.accepted) for step in one.steps] for one in done]


@pytest.mark.parametrize("which", SHAPES)
def test_features_are_those_of_the_small_target_and_zeros(small, which):
    large, ids = enlarged(small, SHAPES[which]), torch.tensor(prompts()[-2:][0])[None]
    layers = (1,)
    expected = small.features(ids, layers=layers).unflatten(-1, (2, -1))
    found = large.features(ids, layers=layers).unflatten(-1, (2, -1))
    assert found.shape[-1] == SHAPES[which].hidden_size
    torch.testing.assert_close(found[..., : small.hidden_size], expected, atol=1e-4, rtol=1e-4)
    assert not found[..., small.hidden_size :].any()
    logits = large.logits(found[..., 0, :])
    torch.testing.assert_close(
        logits[..., : small.vocab_size], small.logits(expected[..., 0, :]), atol=1e-3, rtol=1e-4
    )
    # A token that the small target lacks is as probable as its first.
    torch.testing.assert_close(
        logits[..., small.vocab_size :], logits[..., :1].expand_as(logits[..., small.vocab_size :])
    )


def test_an_enlarged_target_has_the_weights_that_its_shape_says(large):
    assert sum(weight.numel() for weight in large.model.parameters()) == SHAPE.parameters
    # Layers that were added are no zeros, which a machine may multiply faster.
    assert all(
        part.weight.any()
        for part in (
            large.model.model.layers[-1].self_attn.q_proj,
            large.model.model.layers[-1].mlp.up_proj,
        )
    )


def test_it_writes_what_the_small_target_writes(small, large):
    assert steps(large, None) == steps(small, None)


@pytest.mark.parametrize(("fusion", "reads"), CHOICES)
@pytest.mark.parametrize("coupling", ["none", "markov", "recurrent"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_head_drafts_what_it_drafted(small, of_no_more_tokens, fusion, reads, coupling, k):
    if k == 1 and (reads, coupling) != ("own", "none"):
        pytest.skip("a block of one slot has neither")
    parts = {"fusion": fusion, "reads": reads, "coupling": coupling, "feature_scale": 1.7}
    check_head(small, of_no_more_tokens, random_head(small, k, **parts))


@pytest.mark.parametrize(
    "changes",
    [
        {"feature_layers": [1]},
        {"draft_vocab": 9},
        {"input_norm": False},
        {"layers": 2, "window": 7},
        {"feature_layers": [1], "fusion": "linear", "reads": "both", "coupling": "recurrent"},
    ],
    ids=str,
)
def test_so_does_a_head_of_any_settings(small, of_no_more_tokens, changes):
    check_head(small, of_no_more_tokens, random_head(small, 2, **changes))


def check_head(small: Target, large: Target, head: FalconHead) -> None:
    bigger = enlarged_head(head, large)
    assert (bigger.config.heads, bigger.config.intermediate_size) == (8, 96)

    def drafter(target: Target, head: FalconHead) -> FalconDrafter:
        return FalconDrafter(head, target, StaticTree(PATHS, head.config.block_size), 3, 128)

    assert steps(large, drafter(large, bigger)) == steps(small, drafter(small, head))
    assert bigger.hash() == head.hash()
    with pytest.raises(TargetError, match="trained for larger"):
        bigger.check_target(small.identity())


@pytest.mark.parametrize("lm_heads", ["own", "shared"])
def test_so_do_medusa_heads(small, large, lm_heads):
    heads = random_heads(small, layers=2, lm_heads=lm_heads)
    if heads.lm_heads is not None:
        with torch.no_grad():
            heads.lm_heads[:, 0] = small.lm_head.weight[0]
    bigger = enlarged_medusa(heads, large)
    tree = StaticTree(PATHS, max(map(len, PATHS)))
    expected = steps(small, MedusaDrafter(heads, small, tree, 3))
    assert steps(large, MedusaDrafter(bigger, large, tree, 3)) == expected


def test_so_does_a_student(small, large):
    student = small_target(seed=7)
    bigger = enlarged(student, TargetShape(48, 3, 6, 6, 40, SHAPE.vocab_size))
    expected = steps(small, SSD(student, 3, 128, 4))
    assert steps(large, SSD(bigger, 3, 128, 4)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"hidden_size": 12, "heads": 3, "kv_heads": 3},
            "its width is 16, and that of the shape 12",
        ),
        ({"intermediate_size": 31}, "its inner is 32"),
        ({"hidden_size": 48, "heads": 8}, "have 4 dimensions, which must divide the 6"),
        ({"heads": 2, "kv_heads": 2}, "take 4 groups of the shape, which has 2, 2 of keys"),
        ({"layers": 1}, "has layers = 2, and the shape 1"),
        ({"vocab_size": 22}, "has vocab_size = 23, and the shape 22"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(small, changes, expected):
    with pytest.raises(RecipeError, match=expected):
        enlarged(small, replace(SHAPE, **changes))
