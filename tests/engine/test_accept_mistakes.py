"""Mistakes of published code that break the output, most of them raising acceptance, are caught.

Each is planted and has to change the enumerated distribution by far more than rounding. Where it
raises acceptance, the exact rule on the same draft accepts less: the mistake looks like a gain.
"""

import pytest
import torch
from enumeration import drawn, law_error, play, random_laws

from specdraft.eval.engine.accept import kseq, multistep, recursive, sample_and_walk, walk
from specdraft.eval.engine.sampling import warp
from specdraft.eval.engine.tree import Draws, Topology, Tree, chain

WRONG = 1e-3
THREE, TWO_BY_TWO = Topology([-1, 0, 0, 0]), Topology([-1, 0, 0, 1, 1, 2, 2])
# Trees with vocabulary sizes: one node that shows a mistake best, and the proofs' usual tree.
in_both = pytest.mark.parametrize(("topology", "vocab"), [(THREE, 4), (TWO_BY_TWO, 3)])


def rule_of(node_rule):
    """A rule for trees; `node_rule(p, q, siblings, chance)` gives the token after a node."""

    def rule(tree, tokens, p, chance):
        def pick(node):
            siblings = [tokens[child] for child in tree.topology.children[node]]
            return node_rule(p(node), tree.draws.after(node), siblings, chance)

        return walk(tree.topology, tokens, pick)

    return rule


def siblings_by_rejection(renormalise, residual_of):
    """Rejection of siblings drawn without replacement; the arguments can plant a mistake."""

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
def test_the_rejection_without_a_planted_mistake_is_the_exact_rule(topology, vocab):
    """So below only the planted mistake makes a difference."""
    p, q = random_laws("alike", vocab, 3)
    draft = drawn(topology, "without_replacement", q)
    full = siblings_by_rejection(renormalise=True, residual_of=lambda original, q: q)
    ours, theirs = (play(rule, draft, p) for rule in (full, recursive))
    assert law_error(ours.law, p, 3) <= 1e-12
    assert abs(ours.accepted - theirs.accepted) <= 1e-12


def test_verifying_deterministic_top_k_drafts_with_probability_ratios_is_caught():
    p, q = random_laws("alike", 4, 2)
    best = q[()].topk(3).indices
    claim = Draws("without_replacement", q[()][None], [0, -1, -1, -1])

    def top_k(chance):
        return Tree(THREE, best, claim), [0, *best.tolist()]

    mistaken, exact = play(recursive, top_k, p), play(sample_and_walk, top_k, p)
    assert law_error(mistaken.law, p, 2) > WRONG
    assert law_error(exact.law, p, 2) <= 1e-12
    assert mistaken.accepted > exact.accepted + WRONG


def test_a_with_replacement_residual_on_draws_without_replacement_is_caught():
    p, q = random_laws("alike", 4, 2)
    draft = drawn(THREE, "without_replacement", q)
    rule = siblings_by_rejection(renormalise=True, residual_of=lambda original, q: original)
    mistaken, exact = play(rule, draft, p), play(recursive, draft, p)
    assert law_error(mistaken.law, p, 2) > WRONG
    assert mistaken.accepted > exact.accepted + WRONG


@in_both
@pytest.mark.parametrize("rule", [multistep, kseq])  # multistep: as if q were not renormalised
def test_a_with_replacement_rule_on_draws_without_replacement_is_caught(rule, topology, vocab):
    p, q = random_laws("alike", vocab, 3)
    mistaken = play(rule, drawn(topology, "without_replacement", q, claim="iid"), p)
    exact = play(recursive, drawn(topology, "without_replacement", q), p)
    assert law_error(mistaken.law, p, 3) > WRONG
    assert mistaken.accepted > exact.accepted + WRONG


@in_both
def test_a_without_replacement_rule_on_draws_with_replacement_is_caught(topology, vocab):
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


def test_dropping_a_sampled_token_for_its_low_confidence_is_caught():
    """The draft stops before an unlikely sample, which raises the accepted share of its tokens."""
    p, q = random_laws("alike", 3, 3, seed=1)  # a seed with confident tokens accepted more often
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


def test_a_bonus_token_from_unwarped_logits_is_caught():
    """It accepts as often as the exact rule, but samples at too high a temperature."""
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
