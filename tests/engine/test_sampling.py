"""Warping of logits, Gumbel noise, and seeded choices."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdraft.eval.engine.sampling import (
    MANY_LOGITS,
    SeededChance,
    _mix,
    _mix_int,
    gumbel,
    most_probable,
    sample,
    uniform,
    warp,
)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.6, 8, 0.5)]
)
def test_warping_equals_that_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    assert torch.equal(warp(logits, temperature, top_k, top_p), theirs(None, logits))


def test_noise_depends_only_on_seed_position_and_token_id():
    positions = torch.tensor([5, 900, 2**31])
    together = gumbel(7, positions, 40)
    for n, position in enumerate(positions):
        assert torch.equal(gumbel(7, position, 40), together[n])
    assert not torch.equal(gumbel(8, positions, 40), together)
    assert len(set(gumbel(7, torch.arange(50), 50).flatten().tolist())) == 2500


def test_the_noise_is_independent_gumbel_noise():
    """exp(-exp(-G)) is uniform: Kolmogorov-Smirnov distance over 200000 draws, and no
    correlation between neighbouring positions, ids or seeds."""
    noise = gumbel(3, torch.arange(400), 500)
    uniform = (-(-noise).exp()).exp()
    ordered = uniform.flatten().sort().values
    expected = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (ordered - expected).abs().max() < 1.63 / len(ordered) ** 0.5  # 1% level
    others = gumbel(4, torch.arange(400), 500)
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, others)):
        pair = torch.stack((a.flatten(), b.flatten()))
        assert abs(torch.corrcoef(pair)[0, 1]) < 3 / pair.shape[1] ** 0.5


def test_the_largest_noise_is_finite_and_never_draws_an_excluded_token():
    """Its 53 bits are all ones, which as a fraction would be rounded to 1; splitmix64 gives them
    to token 5 for this seed and position."""
    seed, position = 15170671552396645864, 7
    noise = gumbel(seed, torch.tensor(position), 8)
    assert noise.isfinite().all()
    assert noise.argmax() == 5
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, -9.0, 0.0, 0.0])
    assert sample(logits, position, seed, 1.0, 2, 1.0) in (1, 2)
    assert sample(logits, position, seed, 1.0, 0, 1.0) == 5


def test_seeded_sampling_follows_the_warped_distribution():
    """Chi-square of 20000 positions against the warped p, at the 0.1% level."""
    logits = torch.tensor([1.0, 0.5, -0.3, 2.0, -4.0, 0.0])
    p = warp(logits, 0.8, 5, 0.95).softmax(-1)
    draws = [sample(logits, n, 11, 0.8, 5, 0.95) for n in range(20000)]
    counts = torch.bincount(torch.tensor(draws), minlength=6)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    expected = p[kept] * 20000
    chi2 = float(((counts[kept] - expected) ** 2 / expected).sum())
    limits = {2: 13.82, 3: 16.27, 4: 18.47}  # degrees of freedom -> 0.1% quantile
    assert chi2 < limits[int(kept.sum()) - 1]


def test_the_int_and_tensor_mixers_are_splitmix64():
    """The first outputs of the reference implementation (Vigna) for seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(3)]
    assert [_mix_int(state) for state in states] == expected
    signed = torch.tensor([state - 2**64 * (state >= 2**63) for state in states])
    assert [value % 2**64 for value in _mix(signed).tolist()] == expected


def chi_square(counts, probs):
    """Chi-square of counts against probabilities, in standard deviations above its mean."""
    kept = probs > 0
    assert counts[~kept].sum() == 0
    expected = probs[kept] * counts.sum()
    freedom = int(kept.sum()) - 1
    chi2 = ((counts[kept] - expected) ** 2 / expected).sum()
    return float(chi2 - freedom) / (2 * freedom) ** 0.5


def test_seeded_choices_follow_their_probabilities():
    """Over calls of one step, over steps and over seeds; a token of 1e-9 is never drawn."""
    probs = torch.tensor([0.0, 0.3, 0.05, 0.0, 0.4, 1e-9, 0.25, 0.0]).double()
    one = SeededChance(3, 17)
    draws = {
        "calls": [one.choice(probs) for _ in range(8000)],
        "steps": [SeededChance(3, start).choice(probs) for start in range(8000)],
        "seeds": [SeededChance(seed, 17).choice(probs) for seed in range(8000)],
    }
    probs[5] = 0
    for drawn in draws.values():
        counts = torch.bincount(torch.tensor(drawn), minlength=8)
        assert chi_square(counts, probs) < 4


def test_a_choice_takes_unnormalised_probabilities_and_refuses_all_zeros():
    probs = torch.tensor([0.0, 0.3, 0.2])
    for start in range(50):
        assert SeededChance(1, start).choice(probs) == SeededChance(1, start).choice(7 * probs)
    with pytest.raises(ValueError, match="all 4 probabilities are zero"):
        SeededChance(1, 0).choice(torch.zeros(4))


def test_seeded_acceptance_has_the_given_probability_also_0_and_1():
    chance = SeededChance(5, 0)
    share = sum(chance.accept(0.3) for _ in range(8000)) / 8000
    assert abs(share - 0.3) < 4 * (0.21 / 8000) ** 0.5
    assert all(chance.accept(1.0) and not chance.accept(0.0) for _ in range(1000))


def test_choices_depend_only_on_seed_start_and_call_number():
    probs = torch.ones(10**6)

    def draws(*counters):
        chance = SeededChance(*counters)
        return [chance.choice(probs) for _ in range(5)]

    assert draws(3, 40) == draws(3, 40)
    families = [draws(3, 40), draws(3, 41), draws(4, 40), draws(40, 3)]
    assert len({token for family in families for token in family}) == 20


def test_the_streams_are_independent_of_each_other_and_of_gumbel_noise():
    """Correlations over 2500 pairs of counters, for every suspicious pairing of counters."""
    noise = gumbel(3, torch.arange(50), 50)
    level = (-(-noise).exp()).exp().flatten()  # back to uniform

    def grid(number):
        return torch.tensor([number(a, b) for a in range(50) for b in range(50)]).double()

    def call(seed, start, stream, number):
        return uniform(seed, stream, start, number + 1)

    others = {
        "start and call": grid(lambda a, b: call(3, a, 0, b)),
        "call and start": grid(lambda a, b: call(3, b, 0, a)),
        "another stream": grid(lambda a, b: call(3, a, 1, b)),
        "stream and start": grid(lambda a, b: call(3, b, a, 0)),
        "another seed": grid(lambda a, b: call(4, a, 0, b)),
        "bare": grid(lambda a, b: uniform(3, a, b)),
    }
    table = torch.corrcoef(torch.stack((level, *others.values())))
    # Shared numbers (say, where a = b in transposed grids) would give a correlation >= 0.02.
    assert (table - torch.eye(len(table))).abs().max() < 4 / 2500**0.5
    for name, values in others.items():
        assert not torch.isin(values, level).any(), name


@pytest.mark.parametrize("shape", [(MANY_LOGITS + 1,), (3, MANY_LOGITS)])
def test_the_most_probable_token_of_a_large_vocabulary_is_found(shape):
    logits = torch.zeros(shape)
    logits[..., 1234] = logits[..., 4321] = 1.0
    assert most_probable(logits).tolist() == torch.full(shape[:-1], 1234).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_for_the_most_probable_token_go_to_the_lowest_id(dtype):
    logits = torch.randint(-3, 3, (4, 5, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0] = float("-inf")
    best = most_probable(logits)
    assert best.shape == (4, 5)
    for row, token in zip(logits.flatten(0, 1).tolist(), best.flatten().tolist(), strict=True):
        assert token == row.index(max(row))
