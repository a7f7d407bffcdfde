"""Rejection rules in the decoder: the target's distribution, and no effect of other rows."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from decoding import PATHS, decode, prompts
from random_models import VOCAB, random_head, random_target

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.maxgram import PromptLookup

WARP = {"temperature": 4.0, "top_k": 12, "top_p": 0.95}
CHAIN = StaticTree.chain(4, 2)


def drafter_for(rule: str, target, rows: int) -> FalconDrafter:
    tree = CHAIN if rule == "block" else StaticTree(PATHS, 2)
    return FalconDrafter(random_head(target, 2), target, tree, rows, 128)


@pytest.fixture(scope="module")
def target():
    return random_target()


@cache
def exact_law(target, prompt: tuple[int, ...]) -> torch.Tensor:
    """P(t1, t2, t3) [V, V, V] of the warped target, by running every continuation."""
    from specdraft.eval.engine.sampling import warp

    grid = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    ids = torch.cat((torch.tensor(prompt).expand(len(grid), -1), grid), 1)
    logits = target.model(ids).logits[:, -3:]
    p = warp(logits, *WARP.values()).double().softmax(-1).view(VOCAB, VOCAB, 3, VOCAB)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


@pytest.mark.parametrize("rule", RULES)
def test_outputs_follow_the_targets_distribution(target, rule):
    check_law(target, drafter_for(rule, target, 100), rule, 100)


def check_law(target, drafter, rule: str, rows: int, count: int = 1000) -> None:
    """Chi-square over the 400 likeliest continuations of three tokens, at the 0.1% level."""
    prompt = prompts(2)[1]
    requests = (Request(prompt, 3, seed=n, rule=rule, **WARP) for n in range(count))
    decoder = Decoder(target, drafter, rows, 128)
    done = list(decoder.run(requests))
    accepted = sum(step.accepted for c in done for step in c.steps)
    assert accepted > count / 50  # drafts are accepted
    tokens = torch.tensor([c.tokens for c in done])
    cells = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    law = exact_law(target, tuple(prompt)).flatten()
    big = law * count >= 5
    assert 10 < big.sum() < 400
    assert fits(torch.bincount(cells, minlength=len(law)), law)


def fits(seen: torch.Tensor, law: torch.Tensor) -> bool:
    """Whether counts [C] pass a chi-square test against probabilities [C] at the 0.1% level."""
    seen, expected = seen.double(), law * seen.sum()
    if seen[law == 0].sum() > 0:
        return False
    big = expected >= 5
    if rest := float(expected[~big].sum()):
        expected = torch.cat((expected[big], torch.tensor([rest])))
        seen = torch.cat((seen[big], seen[~big].sum()[None]))
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(seen) - 1
    # Wilson and Hilferty's approximation of the 0.1% quantile.
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_output_does_not_depend_on_neighbours(target, rule):
    requests = [Request(p, 12, seed=n, rule=rule, **WARP) for n, p in enumerate(prompts())]
    decoder = Decoder(target, drafter_for(rule, target, 1), 1, 128)
    alone = [decode(decoder, [request], accepts=False)[0] for request in requests]
    decoder = Decoder(target, drafter_for(rule, target, 3), 3, 128, prefill=9)
    assert decode(decoder, requests) == alone


def test_a_rule_that_does_not_fit_the_drafter_is_refused(target):
    for drafter, rule in (
        (PromptLookup(1, 5, 1), "recursive"),
        (drafter_for("recursive", target, 1), "block"),
        (None, "nonsense"),
    ):
        request = Request([1, 2], 4, temperature=1.0, rule=rule)
        done = next(iter(Decoder(target, drafter, 1, 64).run([request])))
        assert f"request 0: rule '{rule}' is not for these drafts" in str(done.error)
        greedy = replace(request, temperature=0.0)  # needs no rule
        assert next(iter(Decoder(target, drafter, 1, 64).run([greedy]))).error is None
