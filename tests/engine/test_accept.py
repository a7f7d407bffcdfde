"""Every acceptance rule preserves the target's distribution, proved by enumeration."""

import itertools
from collections import defaultdict

import pytest
import torch
from enumeration import KINDS, branches, drawn, law_error, play, random_laws

from specdraft.eval.engine.accept import (
    RULES,
    block,
    kseq,
    multistep,
    recursive,
    review,
    sample_and_walk,
    walk,
)
from specdraft.eval.engine.sampling import SeededChance, derive_seed
from specdraft.eval.engine.tree import Draws, Topology, Tree, chain

EXACT = 1e-12
SIBLINGS = {count: Topology([-1] + [0] * count) for count in (1, 2, 3)}
TREES = {
    "2,2": Topology([-1, 0, 0, 1, 1, 2, 2]),
    "3,1": Topology([-1, 0, 0, 0, 1, 2, 3]),
    "irregular": Topology([-1, 0, 1, 0, 1, 3, 5, 4]),
}
HOW = {"walk": "iid", "recursive": "without_replacement", "multistep": "iid", "kseq": "iid"}
every_tree_rule = pytest.mark.parametrize("name", HOW)
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_the_greedy_walk_emits_exactly_the_tokens_of_plain_decoding():
    """Targets over three tokens, and every drafted tree of depth two."""
    topology = Topology([-1, 0, 0, 1, 1, 2])
    vocabulary = range(3)
    contexts = [(), *((a,) for a in vocabulary), *itertools.product(vocabulary, repeat=2)]
    accepted = set()
    for index, says in enumerate(itertools.product(vocabulary, repeat=len(contexts))):
        if index % 1999:  # these 798 of 3**13 give any three contexts all 27 answers
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


@every_kind
@every_tree_rule
@pytest.mark.parametrize(("count", "vocab"), [(1, 5), (2, 4), (3, 3), (3, 4)])
def test_sibling_drafts_leave_the_targets_distribution_unchanged(name, count, vocab, kind):
    for seed in (1, 7):
        p, q = random_laws(kind, vocab, 2, seed)
        played = play(RULES[name].rule, drawn(SIBLINGS[count], HOW[name], q), p)
        assert law_error(played.law, p, 2) <= EXACT


@every_kind
@pytest.mark.parametrize("name", [*HOW, "block"])
def test_a_chain_leaves_the_targets_distribution_unchanged(name, kind):
    for how in ("iid", "without_replacement"):  # the same for single samples
        p, q = random_laws(kind, 3, 4)
        played = play(RULES[name].rule, drawn(chain(3), how, q), p)
        assert law_error(played.law, p, 4) <= EXACT


@every_kind
@every_tree_rule
@pytest.mark.parametrize("shape", TREES)
def test_a_tree_leaves_the_targets_distribution_unchanged(name, shape, kind):
    topology = TREES[shape]
    length = max(topology.depths) + 1
    p, q = random_laws(kind, 3, length)
    played = play(RULES[name].rule, drawn(topology, HOW[name], q), p)
    assert law_error(played.law, p, length) <= EXACT


@every_tree_rule
def test_a_draft_distribution_shared_by_all_nodes_of_a_depth_is_lossless_too(name):
    """A semi-autoregressive head does not know which tokens were picked inside a block."""
    p, q = random_laws("alike", 3, 3)
    q = {text: q[(0,) * len(text)] for text in q}
    played = play(RULES[name].rule, drawn(TREES["2,2"], HOW[name], q), p)
    assert law_error(played.law, p, 3) <= EXACT


@every_tree_rule
def test_drawing_a_whole_draft_at_once_gives_the_same_distribution_as_drawing_it_lazily(name):
    """The proofs do not depend on the enumeration's lazy drawing."""
    p, q = random_laws("alike", 3, 3)
    lazily = drawn(Topology([-1, 0, 0, 1, 2]), HOW[name], q)

    def at_once(chance):
        tree, tokens = lazily(chance)
        return tree, [*tokens]  # reading a token draws it

    ours, theirs = (play(RULES[name].rule, how, p) for how in (lazily, at_once))
    assert ours.law.keys() == theirs.law.keys()
    assert ours.law == pytest.approx(theirs.law, abs=EXACT)


def plain_rejection(tree, tokens, p, chance):
    """Token-wise rejection along a chain, as Leviathan et al. (2022) write it."""
    for node in range(len(tokens) - 1):
        target, drafted, token = p(node), tree.draws.after(node), tokens[node + 1]
        if not chance.accept(min(1.0, float(target[token] / drafted[token]))):
            return [*range(node + 1)], chance.choice((target - drafted).clamp(min=0))
    return [*range(len(tokens))], chance.choice(p(len(tokens) - 1))


@pytest.mark.parametrize("kind", ["alike", "mismatched", "some zeros"])
@pytest.mark.parametrize("rule", [recursive, multistep, kseq])
def test_on_a_chain_every_rejection_rule_is_plain_token_wise_rejection(rule, kind):
    """For every draft, each outcome has the same probability, not only the overall distribution."""
    p, q = random_laws(kind, 3, 4)

    def outcomes(rule):
        law = defaultdict(float)

        def once(chance):
            tree, tokens = drawn(chain(3), "iid", q)(chance)
            drafted = tuple(tokens)
            return drafted, *rule(tree, tokens, lambda node: p[tokens.text(node)], chance)

        for (drafted, path, bonus), weight in branches(once):
            law[drafted, len(path), bonus] += weight
        return {key: weight for key, weight in law.items() if weight > EXACT}

    assert outcomes(rule) == pytest.approx(outcomes(plain_rejection), abs=EXACT)


@every_kind
def test_block_verification_never_accepts_less_than_token_wise_rejection(kind):
    gains = []
    for seed in range(5):
        p, q = random_laws(kind, 3, 4, seed)
        draft = drawn(chain(3), "iid", q)
        gains.append(play(block, draft, p).accepted - play(recursive, draft, p).accepted)
    assert min(gains) >= -EXACT
    assert (max(gains) > 1e-3) == (kind in ("alike", "mismatched", "some zeros"))


def test_more_siblings_raise_acceptance_and_kseq_finds_its_best_rho():
    """K-SEQ against a scan of rho, without those that leave a negative residual."""
    for seed in range(5):
        p, q = random_laws("alike", 4, 2, seed)
        one, three = (
            [play(rule, drawn(SIBLINGS[count], how, q), p).accepted for rule, how in RIVALS]
            for count in (1, 3)
        )
        assert all(many > few for few, many in zip(one, three, strict=True))
        best = 0.0
        for rho in torch.linspace(1, 3, 401).tolist():
            taken = torch.minimum(q[()], p[()] / rho)
            beta = float(taken.sum())
            some = 1 - (1 - beta) ** 3
            if (p[()] - taken * some / beta).min() >= 0:
                best = max(best, some)
        assert three[2] >= best - 1e-9


RIVALS = [(recursive, "without_replacement"), (multistep, "iid"), (kseq, "iid")]


@pytest.mark.parametrize("name", RULES)
def test_with_seeded_choices_the_first_token_is_distributed_as_p(name):
    """2000 requests; as in the decoder, drafts and decisions have a stream each of one seed."""
    p, q = random_laws("alike", 12, 3)
    topology = chain(2) if name == "block" else SIBLINGS[2]
    counts, size = torch.zeros(12), 2000
    for seed in range(size):
        draft = drawn(topology, HOW.get(name, "iid"), q)
        tree, tokens = draft(SeededChance(derive_seed(seed, 1), 40))
        chance = SeededChance(seed, 40)
        path, bonus = RULES[name].rule(tree, tokens, lambda n: p[tokens.text(n)], chance)  # noqa: B023
        counts[tokens[path[1]] if len(path) > 1 else bonus] += 1
    expected = size * p[()]
    assert ((counts - expected).abs() < 4 * (expected * (1 - p[()])).sqrt()).all()


def candidates(topology, tokens):
    """A deterministic draft: no draw, no probabilities."""
    return lambda chance: (Tree(topology, torch.tensor(tokens)), [0, *tokens])


@every_kind
def test_sampling_and_walking_equals_rejection_with_point_mass_drafts(kind):
    p, _ = random_laws(kind, 4, 2)
    walked = play(sample_and_walk, candidates(SIBLINGS[2], [2, 1]), p)
    assert law_error(walked.law, p, 2) <= EXACT

    def rejection(tree, tokens, target, chance):
        law, one_hot = target(0), torch.eye(4, dtype=torch.double)
        for node in (1, 2):
            if chance.accept(float(law[tokens[node]])):
                return [0, node], chance.choice(target(node))
            law = (law - one_hot[tokens[node]]).clamp(min=0)
            law = law / law.sum()
        return [0], chance.choice(law)

    point_masses = play(rejection, candidates(SIBLINGS[2], [2, 1]), p)
    assert walked.accepted == pytest.approx(point_masses.accepted, abs=EXACT)
    assert walked.law == pytest.approx(point_masses.law, abs=EXACT)


def test_sampling_and_walking_is_lossless_on_an_irregular_tree_with_repeated_tokens():
    topology = TREES["irregular"]
    p, _ = random_laws("alike", 3, 5)
    for tokens in ([0, 1, 2, 2, 1, 0, 0], [1, 1, 1, 1, 0, 2, 2]):
        assert law_error(play(sample_and_walk, candidates(topology, tokens), p).law, p, 5) <= EXACT


# -- review --------------------------------------------------------------------------------------


def reviewed(p, q, leniency=1.0):
    """Distribution of the final token, and how often the draft x ~ q passes; choice y ~ p."""
    law, passed = torch.zeros_like(p), 0.0

    def once(chance):
        token, choice = chance.choice(q), chance.choice(p)
        passes = review(token, choice, float(p[token]), float(q[token]), leniency)
        return passes, token if passes else choice

    for (passes, outcome), weight in branches(once):
        law[outcome] += weight
        passed += weight * passes
    return law, passed


@every_kind
def test_a_review_without_leniency_keeps_the_reviewers_distribution(kind):
    for seed in range(5):
        p, q = (law[()] for law in random_laws(kind, 4, 1, seed))
        for drafted_from in (q, *torch.eye(4, dtype=torch.double)):
            law, passed = reviewed(p, drafted_from)
            assert (law - p).abs().max() <= EXACT
            assert passed == pytest.approx(float(p @ drafted_from), abs=EXACT)


@every_kind
def test_leniency_keeps_a_token_whose_reviewer_probability_times_leniency_exceeds_its_own(kind):
    gains = []
    for seed in range(5):
        p, q = (law[()] for law in random_laws(kind, 5, 1, seed))
        law, passed = reviewed(p, q, 3.0)
        lenient = 3 * p > q
        refused = q @ torch.where(lenient, 0, 1 - p)
        expected = torch.where(lenient, q, q * p) + p * (q * ~lenient).sum() - p * q * ~lenient
        assert (law - expected).abs().max() <= EXACT
        assert passed == pytest.approx(1 - float(refused), abs=EXACT)
        gains.append(passed - reviewed(p, q)[1])
    assert (max(gains) > 1e-3) == (kind != "disjoint")


def test_a_greedy_review_keeps_the_argmax_and_what_leniency_lets_through():
    p, q = [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]

    def passing(leniency, others=q):
        return [t for t in range(3) if review(t, 0, p[t], others[t], leniency)]

    assert [passing(leniency) for leniency in (1.0, 2.0, 3.0)] == [[0], [0, 2], [0, 1, 2]]
    assert passing(4.0, [None] * 3) == [0]  # leniency never applies to copies


@pytest.mark.parametrize("leniency", [0.5, 0.0, float("nan")])
def test_a_review_stricter_than_exact_is_refused(leniency):
    with pytest.raises(ValueError, match=f"leniency is {leniency}; allowed: 1"):
        review(0, 0, 0.5, 0.5, leniency)


# -- which drafts a rule takes -------------------------------------------------------------------


def tree_drawn(topology, how):
    size = len(topology)
    draws = how and Draws(how, torch.full((1, 4), 0.25), [0] * size)
    return Tree(topology, torch.arange(size - 1), draws)


@pytest.mark.parametrize(
    ("name", "topology", "how", "message"),
    [
        ("recursive", SIBLINGS[2], None, "drawn without_replacement, not deterministic candidates"),
        ("recursive", SIBLINGS[2], "iid", "a tree drawn without_replacement, not drawn iid"),
        ("multistep", SIBLINGS[2], "without_replacement", "drawn iid, not drawn without_rep"),
        ("multistep", chain(1), None, "drawn iid, not deterministic candidates"),
        ("kseq", SIBLINGS[3], "without_replacement", "a tree drawn iid, not drawn without_rep"),
        ("block", SIBLINGS[2], "iid", "a chain drawn iid, not a tree with branches"),
        ("block", chain(2), None, "a chain drawn iid, not deterministic candidates"),
    ],
)
def test_a_rule_refuses_a_draft_it_is_not_exact_for(name, topology, how, message):
    tree = tree_drawn(topology, how)
    with pytest.raises(ValueError, match=f"rule '{name}' needs .*{message}"):
        RULES[name].rule(tree, range(len(topology)), None, SeededChance(0, 0))


def test_a_node_without_a_distribution_is_an_error_and_never_uses_another_nodes():
    draws = Draws("iid", torch.full((2, 4), 0.25), [0, -1, -1, -1, -1])
    tree = Tree(Topology([-1, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 2]), draws)
    sure = torch.tensor([1.0, 0, 0, 0]).double()
    with pytest.raises(ValueError, match=r"children of node 1 come from row -1 of 2"):
        multistep(tree, [9, 0, 0, 1, 2], lambda node: sure, SeededChance(0, 0))


@pytest.mark.parametrize("name", RULES)
def test_an_empty_draft_yields_only_the_bonus_token(name):
    tree = Tree(chain(0), torch.empty(0), Draws(RULES[name].drafts, torch.empty(0, 4), [-1]))
    sure = torch.tensor([0, 0, 1.0, 0]).double()
    assert RULES[name].rule(tree, [9], lambda node: sure, SeededChance(0, 0)) == ([0], 2)
