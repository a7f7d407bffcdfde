"""Drafts of a head whose slots see the tokens before them: each node has its own distribution."""

import itertools

import pytest
import torch
from decoding import PATHS, prompts
from enumeration import drawn, law_error, play
from random_models import draft_logits, random_head, random_target
from test_rules_in_decoder import WARP, check_law

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.sampling import warp
from specdraft.eval.engine.tree import Topology, chain

HEADS = [("both", "recurrent"), ("newest", "recurrent"), ("own", "markov")]
REJECTING = {name: rule.drafts for name, rule in RULES.items() if rule.drafts != "any"}
every_head = pytest.mark.parametrize(("reads", "coupling"), HEADS)


@pytest.fixture(scope="module")
def target():
    return random_target()


def head_for(target, reads: str, coupling: str, k: int):
    return random_head(target, k, fusion="linear", reads=reads, coupling=coupling)


@every_head
@pytest.mark.parametrize("rule", ["recursive", "kseq"])
@torch.inference_mode()
def test_every_node_has_the_distribution_its_children_came_from(target, reads, coupling, rule):
    """Compared, for two rows at once, with whole-sequence forwards of the head for each token."""
    head = head_for(target, reads, coupling, 3)
    drafter = FalconDrafter(head, target, StaticTree(PATHS, 3), 2, 128)
    rows = list(enumerate(prompts(3)[1:]))
    for row, prompt in rows:
        drafter.start(row, Request(prompt, 9, seed=row, rule=rule, **WARP))
        features = target.features(torch.tensor([prompt[:-1]]))[0]
        drafter.observe(row, prompt[1:], features)
    for (_, prompt), tree in zip(rows, drafter.draft([0, 1]), strict=True):
        tokens, checked = [None, *tree.tokens.tolist()], set()
        for node, children in enumerate(tree.topology.children):
            if not children:
                continue
            path, above = [], node
            while above:
                path, above = [tokens[above], *path], tree.topology.parents[above]
            logits = draft_logits(head, target, prompt, path)
            expected = warp(logits, *WARP.values()).double().softmax(-1)
            torch.testing.assert_close(tree.draws.after(node), expected, atol=1e-5, rtol=1e-3)
            checked.add(tuple(path))
        assert len(checked) > 4


@every_head
@pytest.mark.parametrize("rule", REJECTING)
def test_a_coupled_draft_leaves_the_targets_distribution_unchanged(reads, coupling, rule):
    """Every branch of draft, decisions and bonus is enumerated, over two passes of the head."""
    small = random_target(vocab=3, sharpness=1.0)
    head, prompt = head_for(small, reads, coupling, 2), [0, 2, 1, 1, 0]
    topology = chain(3) if rule == "block" else Topology([-1, 0, 0, 1, 3])
    length, p, q = max(topology.depths) + 1, {}, {}
    for text in (t for n in range(length) for t in itertools.product(range(3), repeat=n)):
        with torch.inference_mode():
            p[text] = small.model(torch.tensor([[*prompt, *text]])).logits[0, -1]
        q[text] = draft_logits(head, small, prompt, list(text))
    p, q = ({t: x.double().softmax(-1) for t, x in laws.items()} for laws in (p, q))
    # Each token changes the distribution after it: no two nodes share one.
    assert all(not torch.allclose(q[(0,)], q[(other,)]) for other in (1, 2))
    played = play(RULES[rule].rule, drawn(topology, REJECTING[rule], q), p)
    assert law_error(played.law, p, length) <= 1e-12
    assert played.accepted > 0.3


def test_outputs_with_a_coupled_head_follow_the_targets_distribution(target):
    tree, rule = StaticTree(PATHS, 2), "recursive"
    head = head_for(target, "newest", "recurrent", 2)
    check_law(target, FalconDrafter(head, target, tree, 100, 128), rule, 100)
