"""The chunked loss against an eager version that keeps all logits and uses autograd."""

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, smooth_l1_loss

from specdraft.train.objectives.losses import head_loss

WEIGHTS = {"feature_scale": 2.5, "feature_weight": 1.3, "distill_weight": 0.1, "soft_weight": 0.9}


def sample(passes=2, count=11, hidden=6, vocab=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tokens = torch.randint(vocab, (count,), generator=generator)
    return draw(passes, count, hidden), draw(count, hidden), tokens, draw(vocab, hidden)


LK = [0.0, 0.3, 1.0]  # shares


def eager(predicted, features, tokens, lm_head, lk=0.0, counts=None):
    """The same loss by its definition, pass by pass."""
    total, counts = 0.0, torch.ones(predicted.shape[:2]) if counts is None else counts
    target = (features @ lm_head.T).softmax(-1)
    for one, count in zip(predicted, counts, strict=True):
        logits = one @ lm_head.T
        scale = WEIGHTS["feature_scale"]
        regression = smooth_l1_loss(one / scale, features / scale, reduction="none").mean(-1).sum()
        divergence = kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1)
        shared = torch.minimum(logits.softmax(-1), target).sum(-1)
        soft = (1 - lk) * divergence - lk * shared.log()
        hard = cross_entropy(logits, tokens, reduction="none", ignore_index=-1)
        distill = WEIGHTS["soft_weight"] * soft + (1 - WEIGHTS["soft_weight"]) * hard
        total = total + WEIGHTS["feature_weight"] * regression
        total = total + WEIGHTS["distill_weight"] * (count * distill).sum()
    return total / len(predicted)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("lk", LK)
@pytest.mark.parametrize("elements", [1, 60, 1 << 20])
def test_value_and_gradient_equal_the_eager_loss_for_every_chunk_size(elements, lk, weighed):
    predicted, features, tokens, lm_head = sample()
    ours, theirs = predicted.clone().requires_grad_(), predicted.clone().requires_grad_()
    counts = torch.rand(predicted.shape[:2], generator=torch.Generator().manual_seed(1))
    options = {"lk_weight": lk, "weigh": (lambda _: counts) if weighed else None}
    sums = head_loss(ours, features, tokens, lm_head, **WEIGHTS, **options, elements=elements)
    expected = eager(theirs, features, tokens, lm_head, lk, counts if weighed else None)
    sums.total.backward()
    expected.backward()
    torch.testing.assert_close(sums.total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("lk", LK)
def test_a_token_beyond_the_draft_vocabulary_has_no_ce(lk, weighed):
    """Other tokens are unaffected; p and p^ are distributions over the draft vocabulary."""
    predicted, features, tokens, lm_head = sample()
    drafted = torch.tensor([0, 3, 4, 7])
    place = {int(token): n for n, token in enumerate(drafted)}
    places = torch.tensor([place.get(int(token), -1) for token in tokens])
    assert 2 < (places < 0).sum() < 9
    ours, theirs = predicted.clone().requires_grad_(), predicted.clone().requires_grad_()
    counts = torch.rand(predicted.shape[:2], generator=torch.Generator().manual_seed(1))
    options = {"lk_weight": lk, "weigh": (lambda _: counts) if weighed else None, "partial": True}
    sums = head_loss(ours, features, places, lm_head[drafted], **WEIGHTS, **options, elements=30)
    expected = eager(theirs, features, places, lm_head[drafted], lk, counts if weighed else None)
    sums.total.backward()
    expected.backward()
    torch.testing.assert_close(sums.total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert not sums.correct[:, places < 0].any()


@pytest.mark.parametrize("lk", LK)
def test_closed_form_gradient_passes_gradcheck(lk):
    predicted, *given = sample(count=4)

    def distill(x):
        weights = WEIGHTS | {"feature_weight": 0.0, "distill_weight": 1.0}
        return head_loss(x, *given, **weights, lk_weight=lk, elements=40).total

    assert torch.autograd.gradcheck(distill, predicted.requires_grad_())


def test_parts_and_correct_positions_are_reported():
    predicted, features, tokens, lm_head = sample()
    sums = head_loss(predicted, features, tokens, lm_head, **WEIGHTS)
    logits = predicted @ lm_head.T
    assert torch.equal(sums.correct, logits.argmax(-1) == tokens)
    hard = torch.stack([cross_entropy(one, tokens, reduction="sum") for one in logits]).mean()
    torch.testing.assert_close(sums.hard, hard)
    distill = WEIGHTS["soft_weight"] * sums.soft + (1 - WEIGHTS["soft_weight"]) * sums.hard
    total = WEIGHTS["feature_weight"] * sums.feature + WEIGHTS["distill_weight"] * distill
    torch.testing.assert_close(sums.total, total)


def test_the_weighing_function_gets_the_parts_autograd_would_compute():
    predicted, features, tokens, lm_head = sample()
    asked = []

    def weigh(parts):
        asked.append(parts)
        return parts["hard"] * 0.0

    weights = WEIGHTS | {"feature_weight": 0.0}
    sums = head_loss(predicted, features, tokens, lm_head, **weights, weigh=weigh, elements=60)
    hard = [cross_entropy(one @ lm_head.T, tokens, reduction="none") for one in predicted]
    torch.testing.assert_close(asked[0]["hard"], torch.stack(hard))
    assert sums.total == 0 < sums.hard


@pytest.mark.parametrize("lk", LK)
def test_a_perfect_prediction_costs_nothing_but_the_hard_part(lk):
    _, features, tokens, lm_head = sample()
    perfect = features[None].clone()
    sums = head_loss(perfect, features, tokens, lm_head, **WEIGHTS, lk_weight=lk)
    assert sums.feature == 0
    assert abs(sums.soft) < 1e-12


def test_no_supervised_position_gives_zero_loss_and_zero_gradient():
    predicted, features, tokens, lm_head = sample()
    predicted.requires_grad_()
    none = slice(0, 0)
    sums = head_loss(predicted[:, none], features[none], tokens[none], lm_head, **WEIGHTS)
    sums.total.backward()
    assert sums.total == 0
    assert not predicted.grad.any()


def test_bfloat16_lm_head_gives_a_float32_loss_close_to_the_eager_one():
    predicted, features, tokens, lm_head = sample(dtype=torch.float32)
    expected = eager(predicted, features, tokens, lm_head)
    predicted.requires_grad_()
    sums = head_loss(predicted, features.bfloat16(), tokens, lm_head.bfloat16(), **WEIGHTS)
    sums.total.backward()
    assert sums.total.dtype == predicted.grad.dtype == torch.float32
    torch.testing.assert_close(sums.total, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("lk", LK)
def test_extreme_logits_stay_finite(lk):
    predicted, features, tokens, lm_head = sample(dtype=torch.float32)
    predicted = (predicted * 1e3).requires_grad_()
    sums = head_loss(predicted, features * 1e3, tokens, lm_head, **WEIGHTS, lk_weight=lk)
    sums.total.backward()
    assert torch.isfinite(sums.total)
    assert torch.isfinite(predicted.grad).all()
