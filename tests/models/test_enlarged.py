"""A small model inside a large one: its outputs, and drafts for it, stay the same."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from decoding import PATHS, completions, prompts
from random_models import random_head, random_target
from test_medusa import random_heads
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.enlarged.heads import enlarged_head, enlarged_medusa
from specdraft.models.enlarged.target import enlarged_target
from specdraft.models.falcon import FalconHead
from specdraft.models.sar.coupling import COUPLINGS
from specdraft.models.sar.fusion import FUSIONS
from specdraft.models.sar.reading import READINGS
from specdraft.models.shapes import TargetShape
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, TargetError

CPU = torch.device("cpu")
# The small target: hidden 16, 2 layers, 4 heads of size 4, 2 KV heads, MLP 32.
SHAPES = {
    "each query head its keys": TargetShape(128, 5, 8, 8, 96, 61),
    "groups as they were": TargetShape(48, 3, 6, 3, 40, 29),
    "groups that are larger": TargetShape(192, 2, 12, 2, 32, 23),
}
SHAPE = SHAPES["each query head its keys"]
BLOCKS = [(1, "own", "none"), *product((2, 3), READINGS, COUPLINGS)]


EPS = 0.2  # norm_eps, large enough to matter


def small_target(**changes) -> Target:
    """It never emits the first token."""
    target = random_target(**changes)
    target.config.rms_norm_eps = EPS
    with torch.no_grad():
        for part in target.model.modules():
            if isinstance(part, LlamaRMSNorm):
                part.variance_epsilon = EPS
                part.weight.uniform_(0.5, 1.5)
        # All features get a common part.
        common = torch.randn(target.hidden_size, generator=torch.Generator().manual_seed(5))
        target.embedding.weight.add_(4 * common)
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
    """For heads, which may draft the first token, and with it the added ones, equally probable."""
    return enlarged(small, replace(SHAPE, vocab_size=small.vocab_size))


def requests() -> list[Request]:
    """Greedy and sampled requests."""
    settings = [{}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1.0}]
    return [
        Request(prompt, 12, seed=number, **settings[number % 3])
        for number, prompt in enumerate(prompts())
    ]


def steps(target: Target, drafter) -> list:
    done = completions(Decoder(target, drafter, 3, 128), requests(), accepts=False)
    return [[(step.tokens, step.drafted, step.accepted) for step in one.steps] for one in done]


@pytest.mark.parametrize("which", SHAPES)
def test_features_are_those_of_the_small_target_padded_with_zeros(small, which):
    check_features(small, enlarged(small, SHAPES[which]), SHAPES[which].hidden_size)


def test_so_are_features_of_a_target_with_tied_embeddings():
    tiny = Target.load("tiny")
    tied = enlarged(tiny, TargetShape(256, 13, 8, 4, 400, 2100, tied=True))
    assert tied.lm_head.weight is tied.embedding.weight
    check_features(tiny, tied, 256)


def check_features(small: Target, large: Target, width: int) -> None:
    ids = torch.tensor(prompts()[-1:])
    close = partial(torch.testing.assert_close, atol=1e-3, rtol=1e-4)
    # The last feature, and with it that of layer 1.
    expected, *lower = small.features(ids, layers=(1,)).split(small.hidden_size, -1)
    found, *states = large.features(ids, layers=(1,)).split(width, -1)
    for ours, theirs in zip((found, *states), (expected, *lower), strict=True):
        close(ours[..., : small.hidden_size], theirs)
        assert not ours[..., small.hidden_size :].any()
    known, more = large.logits(found).tensor_split([small.vocab_size], -1)
    close(known, small.logits(expected))
    # A token the small target lacks is as probable as its padding token, or its first one.
    close(more, known[..., :1].expand_as(more))


def test_an_enlarged_target_has_its_shapes_parameters_and_no_zero_weights(large):
    assert sum(weight.numel() for weight in large.model.parameters()) == SHAPE.parameters
    # Added layers have no zeros, which might multiply faster and distort timings.
    last = large.model.model.layers[-1]
    assert last.self_attn.q_proj.weight.all()
    assert last.mlp.up_proj.weight.all()


def test_an_enlarged_target_gives_the_small_targets_output(small, large):
    assert steps(large, None) == steps(small, None)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("k", "reads", "coupling"), BLOCKS)
def test_an_enlarged_head_drafts_the_same(small, of_no_more_tokens, fusion, reads, coupling, k):
    parts = {"fusion": fusion, "reads": reads, "coupling": coupling, "feature_scale": 1.7}
    check_head(small, of_no_more_tokens, k, **parts)


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
def test_an_enlarged_head_of_other_settings_drafts_the_same(small, of_no_more_tokens, changes):
    check_head(small, of_no_more_tokens, 2, **changes)


def check_head(small: Target, large: Target, block_size: int, **settings) -> None:
    head = random_head(small, block_size, norm_eps=EPS, **settings)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    bigger = enlarged_head(head, large)
    assert (bigger.config.heads, bigger.config.intermediate_size) == (8, 96)

    def drafter(target: Target, head: FalconHead) -> FalconDrafter:
        return FalconDrafter(head, target, StaticTree(PATHS, head.config.block_size), 3, 128)

    assert steps(large, drafter(large, bigger)) == steps(small, drafter(small, head))
    assert bigger.hash() == head.hash()
    with pytest.raises(TargetError, match="trained for larger"):
        bigger.check_target(small.identity())


@pytest.mark.parametrize("lm_heads", ["own", "shared"])
def test_enlarged_medusa_heads_give_the_same_drafts(small, large, lm_heads):
    heads = random_heads(small, layers=2, lm_heads=lm_heads)
    if heads.lm_heads is not None:
        with torch.no_grad():
            heads.lm_heads[:, 0] = small.lm_head.weight[0]
    bigger = enlarged_medusa(heads, large)
    tree = StaticTree(PATHS, max(map(len, PATHS)))
    expected = steps(small, MedusaDrafter(heads, small, tree, 3))
    assert steps(large, MedusaDrafter(bigger, large, tree, 3)) == expected


def test_an_enlarged_student_gives_the_same_drafts(small, large):
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
