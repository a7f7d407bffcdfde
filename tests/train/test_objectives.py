"""Each objective against an eager version that keeps all logits and uses autograd."""

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from specdraft.recipes.schema import DistillSection
from specdraft.train.objectives.chunked import Teacher
from specdraft.train.objectives.divergences import Mixture, objective_sums

COUNT, VOCAB = 7, 9
SINGLE = {
    "forward_kl": Mixture(forward_kl=1.0),
    "reverse_kl": Mixture(reverse_kl=1.0),
    "jsd": Mixture(jsd=1.0, beta=0.3),
    "total_variation": Mixture(total_variation=1.0),
    "lk": Mixture(lk=1.0),
    "cross_entropy": Mixture(cross_entropy=1.0),
}
MIXTURES = SINGLE | {
    "warm": Mixture(forward_kl=0.5, reverse_kl=0.2, lk=0.3, temperature=2.5),
    "cold": Mixture(jsd=0.7, total_variation=0.4, cross_entropy=0.3, beta=0.9, temperature=0.5),
}


def sample(count=COUNT, dtype=torch.float64, seed=0):
    """hidden [N, 6], lm_head [V, 6], tokens [N]; the target's features [N, 4], lm_head [V, 4]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tokens = torch.randint(VOCAB, (count,), generator=generator)
    return draw(count, 6), draw(VOCAB, 6), tokens, draw(count, 4), draw(VOCAB, 4)


def eager(hidden, lm_head, tokens, features, target_lm_head, mixture):
    """The mixture from its definitions."""
    logits = hidden @ lm_head.T
    p = (features @ target_lm_head.T / mixture.temperature).softmax(-1)
    q = (logits / mixture.temperature).softmax(-1)
    m = mixture.beta * p + (1 - mixture.beta) * q
    values = {
        "forward_kl": kl_div(q.log(), p, reduction="sum"),
        "reverse_kl": kl_div(p.log(), q, reduction="sum"),
        "jsd": mixture.beta * kl_div(m.log(), p, reduction="sum")
        + (1 - mixture.beta) * kl_div(m.log(), q, reduction="sum"),
        "total_variation": 1.0 * len(p) - torch.minimum(p, q).sum(),
        "lk": -torch.minimum(p, q).sum(-1).log().sum(),
        "cross_entropy": cross_entropy(logits, tokens, reduction="sum"),
    }
    total = sum(getattr(mixture, name) * value for name, value in values.items())
    return total, values


@pytest.mark.parametrize("elements", [1, 3 * VOCAB, 1 << 20])
@pytest.mark.parametrize("name", MIXTURES)
def test_value_and_gradients_equal_the_eager_version_for_every_chunk_size(name, elements):
    mixture, (hidden, lm_head, tokens, *target) = MIXTURES[name], sample()
    ours = [t.clone().requires_grad_() for t in (hidden, lm_head)]
    theirs = [t.clone().requires_grad_() for t in (hidden, lm_head)]
    sums = objective_sums(*ours, tokens, mixture, Teacher(*target), elements=elements)
    expected, values = eager(*theirs, tokens, *target, mixture)
    (3.0 * sums.total).backward()
    (3.0 * expected).backward()
    torch.testing.assert_close(sums.total, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)
    assert sums.parts.keys() == mixture.weights().keys()
    for part, value in sums.parts.items():
        torch.testing.assert_close(value, values[part], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MIXTURES)
def test_closed_form_gradients_pass_gradcheck(name):
    hidden, lm_head, tokens, *target = sample(count=3)

    def total(h, w):
        return objective_sums(
            h, w, tokens, MIXTURES[name], Teacher(*target), elements=2 * VOCAB
        ).total

    assert torch.autograd.gradcheck(total, (hidden.requires_grad_(), lm_head.requires_grad_()))


@pytest.mark.parametrize("name", [name for name in SINGLE if name != "cross_entropy"])
def test_a_student_that_is_the_target_has_zero_divergence_and_gradient(name):
    hidden, lm_head, tokens, *_ = sample()
    ours = [t.clone().requires_grad_() for t in (hidden, lm_head)]
    sums = objective_sums(*ours, tokens, SINGLE[name], Teacher(hidden, lm_head))
    sums.total.backward()
    assert sums.total.detach().abs() < 1e-12
    assert max(t.grad.abs().max() for t in ours) < 1e-12
    assert sums.agreed == COUNT


def test_a_frozen_lm_head_gets_no_gradient_and_changes_nothing():
    hidden, lm_head, tokens, *target = sample()
    both = [t.clone().requires_grad_() for t in (hidden, lm_head)]
    alone = hidden.clone().requires_grad_()
    objective_sums(*both, tokens, SINGLE["jsd"], Teacher(*target)).total.backward()
    objective_sums(alone, lm_head, tokens, SINGLE["jsd"], Teacher(*target)).total.backward()
    assert torch.equal(alone.grad, both[0].grad)
    assert lm_head.grad is None


def test_cross_entropy_needs_no_target():
    hidden, lm_head, tokens, *target = sample()
    alone = objective_sums(hidden, lm_head, tokens, SINGLE["cross_entropy"])
    beside = objective_sums(hidden, lm_head, tokens, SINGLE["cross_entropy"], Teacher(*target))
    assert alone.total == beside.total
    assert alone.agreed == ((hidden @ lm_head.T).argmax(-1) == tokens).sum()


def test_agreement_is_counted_against_the_targets_own_choice():
    hidden, lm_head, tokens, features, head = sample(count=40)
    sums = objective_sums(hidden, lm_head, tokens, SINGLE["forward_kl"], Teacher(features, head))
    expected = (hidden @ lm_head.T).argmax(-1) == (features @ head.T).argmax(-1)
    assert 0 < int(sums.agreed) == int(expected.sum()) < 40


def test_nothing_of_size_positions_times_vocabulary_is_kept_for_backward():
    hidden, lm_head, tokens, *target = sample()
    kept = []

    def note(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    given = hidden.requires_grad_(), lm_head.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        objective_sums(*given, tokens, MIXTURES["cold"], Teacher(*target))
    assert kept == [(1, COUNT, 6), (VOCAB, 6)]


def test_no_position_gives_zero_loss_and_zero_gradients():
    hidden, lm_head, tokens, features, head = sample()
    ours = [hidden[:0].clone().requires_grad_(), lm_head.requires_grad_()]
    sums = objective_sums(*ours, tokens[:0], MIXTURES["cold"], Teacher(features[:0], head))
    sums.total.backward()
    assert sums.total == 0
    assert not lm_head.grad.any()


def test_bfloat16_products_give_a_float32_loss_close_to_the_eager_one():
    given = sample(dtype=torch.float32)
    expected, _ = eager(*given, MIXTURES["warm"])
    ours = [t.clone().requires_grad_() for t in given[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        sums = objective_sums(
            *ours, given[2], MIXTURES["warm"], Teacher(*(t.bfloat16() for t in given[3:]))
        )
    sums.total.backward()
    assert sums.total.dtype == ours[0].grad.dtype == ours[1].grad.dtype == torch.float32
    torch.testing.assert_close(sums.total, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", MIXTURES)
def test_extreme_logits_stay_finite(name):
    hidden, lm_head, tokens, features, head = sample(dtype=torch.float32)
    ours = (hidden * 1e3).requires_grad_()
    sums = objective_sums(ours, lm_head, tokens, MIXTURES[name], Teacher(features * 1e3, head))
    sums.total.backward()
    assert torch.isfinite(sums.total)
    assert torch.isfinite(ours.grad).all()


def test_a_recipe_sets_its_mixture():
    section = DistillSection(forward_kl=0.0, jsd=0.25, cross_entropy=0.5, beta=0.1, temperature=2.0)
    assert Mixture.of(section) == Mixture(jsd=0.25, cross_entropy=0.5, beta=0.1, temperature=2.0)
    assert Mixture.of(section).weights() == {"jsd": 0.25, "cross_entropy": 0.5}
