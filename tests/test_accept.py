"""Acceptance leaves the target's distribution alone: the walk, the warp and the noise."""

import itertools

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdraft.eval.accept import gumbel, sample, walk, warp
from specdraft.eval.tree import Topology


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


def test_noise_depends_on_seed_position_and_id_alone():
    positions = torch.tensor([5, 900, 2**31])
    together = gumbel(7, positions, 40)
    for n, position in enumerate(positions):
        assert torch.equal(gumbel(7, position, 40), together[n])
    assert not torch.equal(gumbel(8, positions, 40), together)
    assert len(set(gumbel(7, torch.arange(50), 50).flatten().tolist())) == 2500


def test_the_noise_is_gumbel():
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


def test_the_walk_emits_exactly_what_the_target_would_say_alone():
    """Every target over three tokens and every drafted tree of depth two: by enumeration."""
    topology = Topology([-1, 0, 0, 1, 1, 2])
    vocabulary = range(3)
    contexts = [(), *((a,) for a in vocabulary), *itertools.product(vocabulary, repeat=2)]
    accepted = set()
    for index, says in enumerate(itertools.product(vocabulary, repeat=len(contexts))):
        if index % 97:  # 19683 targets times 243 trees: every 97th target is enough
            continue
        target = dict(zip(contexts, says, strict=True))
        for drafts in itertools.product(vocabulary, repeat=5):
            tokens = [9, *drafts]
            texts = [(), *((t,) for t in tokens[1:3])]
            texts += [texts[p] + (tokens[n],) for n, p in ((3, 1), (4, 1), (5, 2))]
            path, bonus = walk(topology, tokens, lambda node: target[texts[node]])  # noqa: B023
            emitted = [*(tokens[node] for node in path[1:]), bonus]
            alone: tuple[int, ...] = ()
            while len(alone) < len(emitted):
                alone += (target[alone],)
            assert tuple(emitted) == alone
            accepted.add(len(path) - 1)
    assert accepted == {0, 1, 2}
