"""Sampled drafts: siblings have the claimed distribution, and outputs that of the target."""

import itertools
from collections import defaultdict
from decimal import Decimal, getcontext
from functools import cache

import pytest
import torch
from decoding import completions, decode, prompts
from enumeration import ROOT, branches, law_error, play, random_laws
from random_models import random_target
from test_medusa import random_heads
from test_rules_in_decoder import WARP, check_law, drafter_for, fits

from specdraft.eval.drafters.beam import Beams, StochasticBeam, conditioned, step
from specdraft.eval.drafters.branching import Branching
from specdraft.eval.drafters.drawing import DRAFTER_STREAM, draw
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.sampling import derive_seed, gumbel, uniform
from specdraft.eval.engine.tree import Draws, Topology, Tree, chain

KINDS = ["alike", "mismatched", "some zeros"]
COUNT = 100_000  # samples in a chi-square test
in_law = pytest.mark.parametrize("kind", KINDS)


# -- the noise of a beam ---------------------------------------------------------------------------


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Standard Gumbel noise of a shape, its last dimension the tokens."""
    places = torch.arange(torch.Size(shape[:-1]).numel()).view(shape[:-1])
    return gumbel(seed, places, shape[-1])


def test_conditioned_noise_has_the_parents_noise_as_maximum_and_keeps_the_order():
    children = noise(1, 500, 7) + torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    for shift in (-300.0, -3.0, 0.0, 3.0, 300.0):
        parent = children.max(-1).values + shift
        found = conditioned(parent, children)
        torch.testing.assert_close(found.max(-1).values, parent, rtol=0, atol=1e-12)
        assert found.isfinite().all()
        # Far above the parent's noise, they get too close for float64 to tell apart.
        best = children.argsort(-1, descending=True)
        falling = found.gather(-1, best).diff(dim=-1)
        assert (falling <= 0).all()
        assert shift < -3 or (falling < 0).all()


def test_conditioned_noise_equals_its_formula_in_exact_arithmetic():
    getcontext().prec = 400  # for differences of exponentials of hundreds
    children = noise(2, 40, 5) * 20
    parents = noise(3, 1, 40)[0] * 20
    for parent, siblings in zip(parents, children, strict=True):
        top = max(Decimal(float(x)) for x in siblings)
        found = conditioned(parent[None], siblings[None])[0]
        for value, ours in zip(siblings, found, strict=True):
            total = (-Decimal(float(parent))).exp() - (-top).exp()
            total += (-Decimal(float(value))).exp()
            assert float(ours) == pytest.approx(float(-total.ln()), rel=1e-12, abs=1e-12)


def test_a_beam_keeps_impossible_children_impossible_and_refuses_too_large_a_width():
    logs = torch.tensor([[-0.1, float("-inf"), -2.0]]).double()
    start = torch.zeros(1).double()
    chosen = step(Beams(start, start), logs, noise(4, 1, 3), 3)
    assert chosen.tokens[..., 2] == 1
    assert chosen.beams.noisy[2] == float("-inf")
    assert not chosen.beams.noisy.isnan().any()
    with pytest.raises(ValueError, match="a beam of 4 out of 1 x 3"):
        step(Beams(start, start), logs, None, 4)


# -- siblings without replacement ------------------------------------------------------------------


def plackett_luce(law: torch.Tensor, width: int) -> dict[tuple[int, ...], float]:
    """Probability of every ordered sample without replacement."""
    found = {}
    for order in itertools.permutations(range(len(law)), width):
        left, share = float(law.sum()), 1.0
        for token in order:
            share *= float(law[token]) / left
            left -= float(law[token])
        found[order] = share
    return found


def assert_drawn_from(samples: torch.Tensor, law: dict[tuple, float]) -> None:
    """Chi-square test of samples [N, W] against probabilities of tuples."""
    cells = {key: n for n, key in enumerate(law)}
    seen = torch.zeros(len(law))
    for key, count in zip(*samples.unique(dim=0, return_counts=True), strict=True):
        seen[cells[tuple(key.tolist())]] = count
    assert fits(seen, torch.tensor(list(law.values())).double())


def test_gumbel_top_k_draws_siblings_without_replacement():
    logits = torch.tensor([1.0, 0.0, -0.5, 0.3, 2.0])
    request = Request([1], 1, temperature=1.0, seed=5, rule="recursive")
    tokens, law = draw(logits.expand(COUNT, -1), request, torch.zeros(COUNT), (7, 1), 3)
    torch.testing.assert_close(law[0], logits.double().softmax(-1))
    assert_drawn_from(tokens, plackett_luce(law[0], 3))


def test_iid_siblings_are_independent():
    logits = torch.tensor([1.0, 0.0, -0.5, 2.0])
    request = Request([1], 1, temperature=1.0, seed=5, rule="kseq")
    tokens, law = draw(logits.expand(COUNT, -1), request, torch.zeros(COUNT), (7, 1), 3)
    triples = itertools.product(range(4), repeat=3)
    assert_drawn_from(tokens, {t: float(law[0][list(t)].prod()) for t in triples})


def searched(laws, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two levels of many stochastic beam searches: tokens of level 1, parents (as tokens of level
    1) and tokens of level 2, each [N, W]."""
    vocab = len(laws[()])
    start = torch.zeros(COUNT, 1).double()
    first = laws[()].log().expand(COUNT, 1, vocab)
    one = step(Beams(start, start), first, noise(seed, COUNT, 1, vocab), min(width, vocab))
    after = torch.stack([laws[(token,)].log() for token in range(vocab)])
    logs = after[one.tokens]  # [N, W, V]
    two = step(one.beams, logs, noise(seed + 1, *logs.shape), width)
    return one.tokens, one.tokens.gather(1, two.parents), two.tokens


def test_a_beam_is_a_sample_of_sequences_without_replacement():
    _, laws = random_laws("alike", 4, 2)
    _, parents, tokens = searched(laws, 3, seed=11)
    pairs = torch.cat([laws[()][token] * laws[(token,)] for token in range(4)])
    assert_drawn_from(parents * 4 + tokens, plackett_luce(pairs, 3))


def test_siblings_that_stay_in_a_beam_are_drawn_without_replacement():
    _, laws = random_laws("alike", 5, 2, seed=3)
    _, parents, tokens = searched(laws, 4, seed=21)
    compared = 0
    for parent in range(5):
        mine = parents == parent
        for number in (2, 3):
            rows = mine.sum(1) >= number
            rank = mine[rows].cumsum(1) * mine[rows]
            siblings = torch.stack([tokens[rows][rank == n + 1] for n in range(number)], 1)
            if len(siblings) < 500:
                continue
            compared += 1
            # A sibling in the beam is drawn from the tokens that those before it left.
            expected = torch.zeros(5).double()
            groups = siblings[:, :-1].unique(dim=0, return_counts=True)
            for before, count in zip(*groups, strict=True):
                left = laws[(parent,)].clone()
                left[before] = 0
                expected += count * left / left.sum()
            seen = torch.bincount(siblings[:, -1], minlength=5)
            assert fits(seen, expected / expected.sum())
    assert compared > 5


# -- a truncated beam is lossless ------------------------------------------------------------------


def ranked_leaves(q, width: int):
    """RSD-S defined bottom-up: every text of two tokens has its noise, and a prefix the largest of
    its texts. A beam is the best texts of its length, so the order of the texts, a sample without
    replacement, determines it. Only as many texts are drawn as matter."""
    vocab = len(q[()])
    texts = list(itertools.product(range(vocab), repeat=2))
    rows = {text: row for row, text in enumerate(q)}

    def draft(chance):
        left = torch.stack([q[()][a] * q[(a,)][b] for a, b in texts])
        order = []
        while left.any() and (len({a for a, _ in order}) < width or len(order) < width):
            order.append(texts[chance.choice(left)])
            left[texts.index(order[-1])] = 0
        first = list(dict.fromkeys(a for a, _ in order))[:width]
        second = order[:width]
        parents = [-1, *[0] * len(first), *(1 + first.index(a) for a, _ in second)]
        tokens = [ROOT, *first, *(b for _, b in second)]
        sources = [rows[()], *(rows[(a,)] for a in first), *[-1] * len(second)]
        draws = Draws("without_replacement", torch.stack(list(q.values())), sources)
        return Tree(Topology(parents), torch.empty(0), draws), tokens

    return draft


@in_law
def test_recursive_rejection_of_a_truncated_beam_is_lossless(kind):
    """Every branch is enumerated: the order of the texts, acceptance, the bonus."""
    p, q = random_laws(kind, 3, 3)
    played = play(RULES["recursive"].rule, ranked_leaves(q, 2), p)
    assert law_error(played.law, p, 3) <= 1e-12
    alone = play(RULES["recursive"].rule, ranked_leaves(q, 1), p)
    assert law_error(alone.law, p, 3) <= 1e-12
    assert played.accepted > alone.accepted


def test_stochastic_beam_search_has_the_distribution_of_the_ranked_texts():
    """Over whole trees, each level in order."""
    _, q = random_laws("alike", 3, 2)
    law = defaultdict(float)
    for (tree, tokens), weight in branches(ranked_leaves(q, 2)):
        first, nodes = tokens[1:3], range(3, 5)
        second = [tokens[tree.topology.parents[n]] * 3 + tokens[n] for n in nodes]
        law[(*first, *second)] += weight
    assert sum(law.values()) == pytest.approx(1)
    one, parents, tokens = searched(q, 2, seed=31)
    assert_drawn_from(torch.cat((one, parents * 3 + tokens), 1), dict(law))


# -- SSD -------------------------------------------------------------------------------------------


def ended_chain(q, rule: str, theta: float, keep: bool = True):
    """SSD's draft; `keep=False` drops the token that ends it."""

    def draft(chance):
        text, laws = (), []
        while len(text) < 2:
            laws.append(q[text])
            text = (*text, chance.choice(laws[-1]))
            if laws[-1][text[-1]] < theta:
                if not keep:
                    text = text[:-1]
                break
        draws = Draws(RULES[rule].drafts, torch.stack(laws), [*range(len(text)), -1])
        return Tree(chain(len(text)), torch.empty(0), draws), (ROOT, *text)

    return draft


@in_law
@pytest.mark.parametrize("rule", [name for name in RULES if name != "walk"])
def test_ending_a_sampled_chain_after_an_improbable_token_is_lossless(rule, kind):
    p, q = random_laws(kind, 3, 3)
    theta = float(torch.stack(list(q.values())).median())
    played = play(RULES[rule].rule, ended_chain(q, rule, theta), p)
    assert law_error(played.law, p, 3) <= 1e-12
    assert 1 < played.drafted < 2
    dropped = play(RULES[rule].rule, ended_chain(q, rule, theta, keep=False), p)
    assert law_error(dropped.law, p, 3) > 1e-6


# -- in the decoder --------------------------------------------------------------------------------

# method -> (drafter, options, rules its drafts are sampled for)
DRAWERS = {
    "ssd": (SSD, {"gamma": 3, "theta": 0.1}, ("recursive", "multistep", "kseq", "block")),
    "branching": (Branching, {"branching": (3, 2)}, ("recursive", "multistep", "kseq")),
    "chains": (Branching, {"branching": (3, 1)}, ("kseq", "multistep", "recursive")),
    "apart": (Branching, {"branching": (3, 2), "merged": False}, ("multistep", "kseq")),
    "beam": (StochasticBeam, {"depth": 3, "width": 4}, ("recursive",)),
}
CASES = [(name, rule) for name, (_, _, rules) in DRAWERS.items() for rule in rules]


@pytest.fixture(scope="module")
def target():
    return random_target()


@cache
def stranger():
    """A student that is not the target."""
    return random_target(seed=3)


def drawer(name: str, rows: int):
    kind, options, _ = DRAWERS[name]
    return kind(stranger(), rows, 128, **options)


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_outputs_follow_the_targets_distribution(target, name, rule):
    check_law(target, drawer(name, 100), rule, 100, 500)


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_sampled_output_does_not_depend_on_neighbours(target, name, rule):
    requests = [Request(p, 9, seed=n, rule=rule, **WARP) for n, p in enumerate(prompts(4))]
    decoder = Decoder(target, drawer(name, 1), 1, 128)
    alone = [decode(decoder, [request], accepts=False)[0] for request in requests]
    together = decode(Decoder(target, drawer(name, 3), 3, 128, prefill=9), requests)
    assert together == alone


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_samples_of_a_student_that_is_the_target_are_all_accepted(target, name, rule):
    """The first sibling is drawn from q = p, so it is accepted at every depth."""
    kind, options, _ = DRAWERS[name]
    drafter = kind(target, 2, 128, **options | ({"theta": 0.0} if kind is SSD else {}))
    requests = [Request(p, 12, seed=n, rule=rule, **WARP) for n, p in enumerate(prompts(3))]
    done = completions(Decoder(target, drafter, 2, 128), requests)
    assert all(step.accepted == step.depth for one in done for step in one.steps)


def assert_never_shared(drafter, rule: str, target, count=100, blocks=False) -> None:
    """At a temperature that makes all distributions uniform, the first children of two nodes, of
    one draft or of two steps, are equal as often as two fair dice agree. (With `blocks`, nodes of
    one depth share what one pass of a head draws: only nodes on one path are compared.)"""
    requests = [Request([1, 2], 12, 1e6, seed=n, rule=rule) for n in range(count)]
    drawn = defaultdict(dict)  # (step, ranks down to a first child) -> request -> its token
    for done in completions(Decoder(target, drafter, 32, 128), requests):
        for number, made in enumerate(done.steps):
            paths = Topology(made.parents).rank_paths[1:]
            for path, token in zip(paths, made.tokens, strict=True):
                if path[-1] == 0:
                    drawn[number, path][done.index] = token
    compared = 0
    for (one, some), (other, others) in itertools.combinations(drawn.items(), 2):
        both = some.keys() & others.keys()
        beside = one[0] == other[0] and one[1] != other[1][: len(one[1])]
        if len(both) >= count / 2 and not (blocks and beside):
            compared += 1
            assert sum(some[n] == others[n] for n in both) < 0.15 * len(both), (one, other)
    assert compared >= 6


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_nodes_and_steps_never_share_their_noise(target, name, rule):
    kind, options, _ = DRAWERS[name]
    options = options | ({"theta": 0.0} if kind is SSD else {})
    assert_never_shared(kind(stranger(), 32, 128, **options), rule, target)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "walk"])
def test_the_passes_of_a_falcon_tree_never_share_their_noise(target, rule):
    assert_never_shared(drafter_for(rule, target, 32), rule, target, blocks=True)


@pytest.mark.parametrize("rule", ["recursive", "block"])
def test_the_steps_of_medusa_heads_never_share_their_noise(target, rule):
    tree = StaticTree.chain(3, 3)
    drafter = MedusaDrafter(random_heads(target, 3), target, tree, 32)
    assert_never_shared(drafter, rule, target, blocks=True)


def test_drafts_and_rules_never_share_a_random_number():
    """No distribution would show it: drafts mix the result of `derive_seed` twice more."""
    for seed, start, number in itertools.product((0, 7), (1, 40), (0, 1, 2, 9)):
        key = derive_seed(seed, DRAFTER_STREAM, start, number) + (1 << 63)
        assert ((key >> 12) + 0.5) * 2.0**-52 != uniform(seed, 0, start, number)


def test_among_equal_iid_siblings_the_first_gets_the_children_of_all(target):
    """Chains drawn independently become a tree whose first twin has the children of both."""
    student = random_target(seed=3, sharpness=1.0)
    drafter, twins = Branching(student, 1, 128, (4, 1, 1)), 0
    for seed in range(20):
        drafter.start(0, Request([1, 2], 9, 1.0, seed=seed, rule="kseq"))
        with torch.inference_mode():
            tree = drafter.draft([0])[0]
        children, tokens = tree.topology.children, [None, *tree.tokens.tolist()]
        assert [tree.topology.depths.count(depth) for depth in (1, 2, 3)] == [4, 4, 4]
        for siblings in children:
            names = [tokens[node] for node in siblings]
            for node, name in zip(siblings, names, strict=True):
                first = siblings[names.index(name)]
                if tree.topology.depths[node] < 3:
                    inside = sum(len(children[n]) for n in siblings if tokens[n] == name)
                    assert len(children[node]) == (inside if node == first else 0)
                    twins += node != first
            assert len(siblings) == len(names)
    assert twins > 5


def test_unmerged_equal_siblings_have_children_of_their_own():
    drafter = Branching(random_target(seed=3), 1, 128, (4, 2), merged=False)
    twins = 0
    for seed in range(10):
        drafter.start(0, Request([1, 2], 9, 1.0, seed=seed, rule="multistep"))
        with torch.inference_mode():
            tree = drafter.draft([0])[0]
        twins += 4 - len(set(tree.tokens[:4].tolist()))
        assert [len(children) for children in tree.topology.children] == [4, *[2] * 4, *[0] * 8]
    assert twins > 5


def test_tokens_that_cannot_be_drawn_are_not_drafted():
    student = stranger()
    for kind, options, rules in DRAWERS.values():
        for rule in rules:
            drafter = kind(student, 1, 128, **options)
            drafter.start(0, Request([1, 2], 9, 1.0, top_k=2, seed=3, rule=rule))
            with torch.inference_mode():
                tree = drafter.draft([0])[0]
            children, tokens = tree.topology.children, [None, *tree.tokens.tolist()]
            assert children[0]
            for node, siblings in enumerate(children):
                for child in siblings:
                    assert tree.draws.after(node)[tokens[child]] > 0
