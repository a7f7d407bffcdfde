"""Mistakes that raise acceptance and break the output, seen in published code: all are caught.

Each is planted on purpose and has to show in the enumerated law, by far more than rounding. Where
the mistake pays, the exact rule on the same draft accepts less: its figures alone would look good.
"""

import pytest
import torch
from enumeration import drawn, law_error, play, random_laws

from specdraft.eval.engine.accept import kseq, multistep, recursive, sample_and_walk, walk
from specdraft.eval.engine.sampling import warp
from specdraft.eval.engine.tree import Draws, Topology, Tree, chain

WRONG = 1e-3
THREE, TWO_BY_TWO = Topology([-1, 0, 0, 0]), Topology([-1, 0, 0, 1, 1, 2, 2])
# A tree with its vocabulary: the node that shows the mistake best, and what the proofs use most.
in_both = pytest.mark.parametrize(("topology", "vocab"), [(THREE, 4), (TWO_BY_TWO, 3)])


def rule_of(node_rule):
    """A rule for trees from `node_rule(p, q, siblings, chance)`, the token after a node."""

    def rule(tree, tokens, p, chance):
        def pick(node):
            siblings = [tokens[child] for child in tree.topology.children[node]]
            return node_rule(p(node), tree.draws.after(node), siblings, chance)

        return walk(tree.topology, tokens, pick)

    return rule


def siblings_by_rejection(renormalise, residual_of):
    """Rejection of siblings without replacement, with what is asked for done or forgotten."""

    def node_rule(p, q, siblings, chance):
        original = q
        for token in siblings:
            if chance.accept(float((p[token] / q[token]).clamp(max=1))):
                return token
            p = (p - residual_of(original, q)).clamp(min=0)
            p, q = p / p.sum(), q.clone()
            q[token] = 0
            q = q / q.sum() if renormalise else q
        return chance.choice(p)

    return rule_of(node_rule)


@in_both
def test_done_in_full_that_rejection_is_the_exact_rule(topology, vocab):
    """What is planted below is nothing but the mistake."""
    p, q = random_laws("alike", vocab, 3)
    draft = drawn(topology, "without_replacement", q)
    full = siblings_by_rejection(renormalise=True, residual_of=lambda original, q: q)
    ours, theirs = (play(rule, draft, p) for rule in (full, recursive))
    assert law_error(ours.law, p, 3) <= 1e-12
    assert abs(ours.accepted - theirs.accepted) <= 1e-12


def test_top_k_drafts_verified_with_ratios_are_caught():
    p, q = random_laws("alike", 4, 2)
    best = q[()].topk(3).indices
    claim = Draws("without_replacement", q[()][None], [0, -1, -1, -1])

    def top_k(chance):
        return Tree(THREE, best, claim), [0, *best.tolist()]

    mistaken, exact = play(recursive, top_k, p), play(sample_and_walk, top_k, p)
    assert law_error(mistaken.law, p, 2) > WRONG
    assert law_error(exact.law, p, 2) <= 1e-12
    assert mistaken.accepted > exact.accepted + WRONG


def test_the_residual_of_draws_with_replacement_for_draws_without_is_caught():
    p, q = random_laws("alike", 4, 2)
    draft = drawn(THREE, "without_replacement", q)
    rule = siblings_by_rejection(renormalise=True, residual_of=lambda original, q: original)
    mistaken, exact = play(rule, draft, p), play(recursive, draft, p)
    assert law_error(mistaken.law, p, 2) > WRONG
    assert mistaken.accepted > exact.accepted + WRONG


@in_both
@pytest.mark.parametrize("rule", [multistep, kseq])  # multistep: as if q were not renormalised
def test_a_rule_for_draws_with_replacement_on_draws_without_is_caught(rule, topology, vocab):
    p, q = random_laws("alike", vocab, 3)
    mistaken = play(rule, drawn(topology, "without_replacement", q, claim="iid"), p)
    exact = play(recursive, drawn(topology, "without_replacement", q), p)
    assert law_error(mistaken.law, p, 3) > WRONG
    assert mistaken.accepted > exact.accepted + WRONG


@in_both
def test_the_rule_for_draws_without_replacement_on_draws_with_is_caught(topology, vocab):
    p, q = random_laws("alike", vocab, 3)
    mistaken = play(recursive, drawn(topology, "iid", q, claim="without_replacement"), p)
    assert law_error(mistaken.law, p, 3) > WRONG


@in_both
def test_forgetting_to_renormalise_q_is_caught(topology, vocab):
    p, q = random_laws("alike", vocab, 3)
    draft = drawn(topology, "without_replacement", q)
    rule = siblings_by_rejection(renormalise=False, residual_of=lambda original, q: q)
    mistaken, exact = play(rule, draft, p), play(recursive, draft, p)
    assert law_error(mistaken.law, p, 3) > WRONG
    assert mistaken.accepted > exact.accepted + WRONG


def test_dropping_a_sampled_token_after_looking_at_its_confidence_is_caught():
    """A draft that stops before an unlikely sample; here what looks better is the share of drafted
    tokens that is accepted."""
    p, q = random_laws("alike", 3, 3, seed=1)  # where confidence and acceptance go together
    draft = drawn(chain(2), "iid", q)

    def confident(chance):
        tree, tokens = draft(chance)
        sure = 0
        while sure < 2 and tree.draws.after(sure)[tokens[sure + 1]] > 0.3:
            sure += 1
        return Tree(chain(sure), tree.tokens, tree.draws), tokens

    mistaken, exact = play(recursive, confident, p), play(recursive, draft, p)
    assert law_error(mistaken.law, p, 3) > WRONG
    assert law_error(exact.law, p, 3) <= 1e-12
    assert mistaken.accepted / mistaken.drafted > exact.accepted / exact.drafted + WRONG


def test_a_bonus_from_unwarped_logits_is_caught():
    """Accepts as often as the exact rule; the text is hotter than asked for."""
    raw, q = random_laws("alike", 4, 2)
    p = {text: warp(law.log(), 0.6, top_k=2).double().softmax(-1) for text, law in raw.items()}

    def rule(tree, tokens, target, chance):
        path, bonus = recursive(tree, tokens, target, chance)
        if tree.topology.children[path[-1]]:
            return path, bonus
        return path, chance.choice(raw[tuple(tokens[node] for node in path[1:])])

    draft = drawn(chain(1), "iid", q)
    mistaken, exact = play(rule, draft, p), play(recursive, draft, p)
    assert law_error(mistaken.law, p, 2) > WRONG
    assert law_error(exact.law, p, 2) <= 1e-12
    assert torch.isclose(torch.tensor(mistaken.accepted), torch.tensor(exact.accepted))
