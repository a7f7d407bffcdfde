"""A head beside a table: plain decoding's tokens, and of each as much as it adds."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from decoding import decode, plain_tokens, prompts
from random_models import random_target
from test_dynamic import FREE, HEADS, drafted, head_for
from test_ngrams import followers_of, said

from specdraft.eval.drafters.beside import FalconBesideTable
from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.ngrams import LEAST
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.trust import KEEP, PRIOR, Trust
from specdraft.eval.pricing.beside import WorthBeside
from specdraft.eval.pricing.cost import CostModel
from specdraft.eval.pricing.evidence import DOUBT
from specdraft.eval.pricing.worth import USUAL, _ratios

DEAR_PASS = replace(FREE, draft=_ratios({"draft": 50.0, "passes": 50.0}))
every_head = pytest.mark.parametrize("name", HEADS)


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def answers(target):
    return [plain_tokens(target, prompt, 17) for prompt in prompts(4)]


@pytest.fixture(scope="module")
def known(answers):
    """A table of every other answer."""
    texts = [[*p, *a] for p, a in zip(prompts(4), answers, strict=True)]
    return followers_of(texts[::2] * 2, 4)


# -- plain decoding's tokens -----------------------------------------------------------------------


@every_head
@pytest.mark.parametrize(("rows", "costs"), [(1, FREE), (3, USUAL), (3, DEAR_PASS)])
def test_greedy_output_equals_that_of_the_model_without_a_cache(
    target, answers, known, name, rows, costs
):
    requests = [Request(prompt, 17) for prompt in prompts(4)]
    drafter = FalconBesideTable(head_for(target, name), target, known, costs, rows, 128)
    decoder = Decoder(target, drafter, rows, 512)
    for _ in range(2):  # of the second time it knows what the table was right about
        assert decode(decoder, requests, accepts=costs is not USUAL) == answers


@every_head
def test_sampled_output_equals_that_of_plain_seeded_sampling(target, known, name):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 12, seed=n, **settings) for n, p in enumerate(prompts(4))]
    expected = decode(Decoder(target, None, 1, 128), requests)
    drafter = FalconBesideTable(head_for(target, name), target, known, FREE, 3, 128)
    assert decode(Decoder(target, drafter, 3, 512), requests) == expected


# -- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["both", "eagle", "paper"])
@torch.inference_mode()
def test_behind_every_end_of_a_heads_draft_come_the_tables_tokens(target, known, name):
    head, lengths = head_for(target, name), set()
    for prompt in prompts(4):
        request = Request(prompt, 9)
        whole = DynamicFalcon(head, target, FREE, 1, 128, nodes=1000)
        alone = {*drafted(whole, request, target)}
        beside = FalconBesideTable(head, target, known, FREE, 1, 128)
        texts = {*drafted(beside, request, target)}
        # Passes stop where the table is as sure, and the best nodes are kept.
        own = texts & alone
        assert bool(own) == bool(alone)  # a head drafts behind the tokens of a block
        for text in texts - own:
            token, chance = said(known, [*prompt, *text[:-1]])
            assert text[-1] == token
            assert chance >= LEAST
        lengths.add(len(texts - own))
    assert lengths != {0}


@torch.inference_mode()
def test_where_a_pass_is_dear_the_table_drafts_alone(target, answers, known):
    prompt, answer = prompts(4)[2], answers[2]
    drafter = FalconBesideTable(head_for(target, "both"), target, known, DEAR_PASS, 1, 128)
    texts = drafted(drafter, Request(prompt, 9), target)  # nothing is known of passes yet
    assert drafter.forwards > 0
    for kind in drafter.worth.added:
        kind.add(0.0, 10_000)
    before = drafter.forwards
    texts = drafted(drafter, Request(prompt, 9), target)
    assert drafter.forwards == before
    assert sorted(map(len, texts)) == [*range(1, len(texts) + 1)]  # a chain
    assert len(texts) > 6
    assert max(texts, key=len) == tuple(answer[: len(texts)])


# -- what is worth a pass --------------------------------------------------------------------------

COSTS = CostModel(
    verify=_ratios({"forward": 1.0, "tokens from 1": 0.05, "tokens from 4": 0.1}),
    knots=(1, 4),
    loop=_ratios({"step": 0.0}),
    draft=_ratios({"draft": 0.2, "rows": 0.1, "passes": 0.05, "row passes": 0.3}),
)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_free_drafts_gain_is_that_of_its_best_beginning(rows):
    worth, rng = WorthBeside(COSTS, 3, 48), random.Random(1)
    for _ in range(50):
        worth.begin(range(rows), 100)
        chances = sorted((rng.random() for _ in range(rng.randrange(12))), reverse=True)
        plain = COSTS.verify_ms(rows, 1, 128)
        gains = [
            sum(chances[:n]) - worth.rate * (COSTS.verify_ms(rows, 1 + n, 128) - plain) / rows
            for n in range(len(chances) + 1)
        ]
        assert worth.gain(chances) == pytest.approx(max(gains))


def test_a_pass_is_made_for_the_most_rows_that_may_each_pay_their_share():
    """Compared with every subset of rows."""
    free = {0: [], 1: [0.9], 2: [0.9] * 3, 3: [0.95] * 9}
    sizes = set()
    for seed in range(40):
        rng, worth = random.Random(seed), WorthBeside(COSTS, 3, 48)
        for kind in worth.added:
            kind.gains, kind.drafts = 1e6 * rng.random(), 1e6  # means that are certain
        worth.begin(range(4), 100)
        kinds = {row: worth._kind(worth.gain(chances)) for row, chances in free.items()}
        assert len({*map(id, kinds.values())}) > 2
        able = [
            some
            for size in range(5)
            for some in combinations(range(4), size)
            if all(kinds[row].bound > worth._price_of(size) for row in some)
        ]
        chosen = worth.prefers(free)
        assert chosen == [*able[-1]]  # the largest: a pass over more rows is cheaper for each
        sizes.add(len(chosen))
    assert {0, 4} < sizes


def test_what_a_head_adds_is_noted_by_what_the_free_draft_was_worth():
    worth = WorthBeside(COSTS, 3, 48)
    worth.begin([5], 100)
    free = [0.9, 0.8, 0.7]
    gain = worth.gain(free)
    assert worth.prefers({5: free}) == [5]
    worth.goes_on([5], [[0.99]])
    drafted_chances = [0.95, 0.9, 0.85, 0.8, 0.75, 0.1, 0.001]
    cut = worth.choose([drafted_chances])
    kept = [chance for chance in drafted_chances if chance >= cut.least]
    assert 1 < len(kept) < 7
    nodes = COSTS.verify_ms(1, 1 + len(kept), 128) - COSTS.verify_ms(1, 1, 128)
    added = sum(kept) - worth.rate * (nodes + worth._later) - gain
    noted = [kind for kind in worth.added if kind.drafts]
    assert noted == [worth._kind(gain)]
    assert noted[0].gains == pytest.approx(added)
    assert noted[0].bound == pytest.approx(added + DOUBT)


# -- how far the table is trusted ------------------------------------------------------------------


def test_a_table_is_believed_as_far_as_its_words_have_come_true():
    rng, trust = random.Random(3), Trust(4)
    laws = {(1, 0.3): 0.1, (1, 0.9): 0.7, (4, 0.3): 0.5, (4, 0.9): 0.99}
    for (length, chance), true in laws.items():
        assert trust.chance(trust.kind(length, chance), chance) == chance  # nothing came yet
        for _ in range(2_000):
            trust.note(trust.kind(length, chance), rng.random() < true)
    for (length, chance), true in laws.items():
        believed = trust.chance(trust.kind(length, chance), chance)
        assert believed == pytest.approx(true, abs=0.05)
    assert trust.chance(trust.kind(2, 0.9), 0.9) == 0.9
    kinds = {trust.kind(n, c / 100) for n in (1, 2, 3, 4) for c in range(1, 101)}
    assert kinds == {*range(len(trust.came))}


def test_a_word_counts_less_the_older_it_is():
    trust = Trust(1)
    kind = trust.kind(1, 0.5)
    for came in (True, False, False):
        trust.note(kind, came)
    said_times = 1 + KEEP + KEEP**2
    expected = (PRIOR * 0.5 + KEEP**2) / (PRIOR + said_times)
    assert trust.chance(kind, 0.5) == pytest.approx(expected)
