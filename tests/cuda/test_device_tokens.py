"""On a GPU every drafting method gives plain decoding's tokens, which equal the CPU's."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
from decoding import PATHS, decode, plain_tokens, prompts
from random_models import moved, random_eagle3, random_head, random_target
from test_cascade import TWO, maxgram
from test_dynamic import FREE, drafter_for
from test_eagle import eagle
from test_lm_drafter import near
from test_medusa import DEPTH, random_heads
from test_tree_drafters import STRATEGIES, make

from specdraft.eval.drafters.best_first import BestFirst
from specdraft.eval.drafters.cascade import CascadeDrafter
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.padded import PADDINGS, PaddedDecoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.models.target import Target

CAPACITY = 512
SAMPLED = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
NARROW = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)]
CHAIN = [(0,) * n for n in range(1, 6)]


@dataclass
class Plain:
    """A target's own answers to alternating greedy and sampled requests."""

    target: Target
    requests: list[Request]
    tokens: list[list[int]]

    @classmethod
    def of(cls, target: Target) -> "Plain":
        requests = [
            Request(prompt, 12, seed=n, **(SAMPLED if n % 2 else {}))
            for n, prompt in enumerate(prompts(8))
        ]
        decoder = Decoder(target, None, 1, CAPACITY)
        tokens = [decode(decoder, [request])[0] for request in requests]
        return cls(target, requests, tokens)


@pytest.fixture(scope="module")
def plain(device) -> Plain:
    return Plain.of(moved(random_target(), device))


@pytest.fixture(scope="module")
def deep(device) -> Plain:
    """For a target with layers to read, and with keys for every head."""
    return Plain.of(moved(random_target(layers=4, kv_heads=4), device))


@pytest.fixture(scope="module")
def students(device) -> list[Target]:
    return [moved(near(None, noise), device) for noise in (0.02, 0.05)]


def check(plain: Plain, drafter, accepts=True) -> None:
    """Assert that a drafter, made for a number of rows, changes no token."""
    for rows, prefill in ((1, 1024), (3, 4), (8, 1024)):
        decoder = Decoder(plain.target, drafter(rows=rows), rows, CAPACITY, prefill)
        assert decode(decoder, plain.requests, accepts) == plain.tokens, rows


def falcon(target, k, paths=PATHS, rows=1, head=random_head, **changes) -> FalconDrafter:
    return FalconDrafter(head(target, k, **changes), target, StaticTree(paths, k), rows, CAPACITY)


def one_by_one(head):
    """A function that makes a head whose only block size is 1."""
    return lambda target, _, **changes: head(target, **changes)


@pytest.mark.parametrize("layers", [2, 4])
def test_greedy_tokens_equal_those_of_the_model_without_a_cache(plain, deep, layers):
    said = {2: plain, 4: deep}[layers]
    for request, tokens in list(zip(said.requests, said.tokens, strict=True))[::2]:
        assert tokens == plain_tokens(said.target, request.prompt, 12)


HEADS = {
    "own lstm": {"k": 2},
    "own linear": {"k": 3, "fusion": "linear", "layers": 2},
    "own markov": {"k": 3, "coupling": "markov", "paths": CHAIN},
    "own recurrent": {"k": 2, "fusion": "linear", "coupling": "recurrent"},
    "both none": {"k": 2, "fusion": "linear", "reads": "both", "paths": NARROW},
    "both markov": {"k": 2, "reads": "both", "coupling": "markov"},
    "both recurrent": {"k": 3, "fusion": "linear", "reads": "both", "coupling": "recurrent"},
    "newest none": {"k": 2, "reads": "newest"},
    "newest markov": {"k": 4, "fusion": "linear", "reads": "newest", "coupling": "markov"},
    "newest recurrent": {"k": 3, "reads": "newest", "coupling": "recurrent", "paths": CHAIN},
    "window": {"k": 2, "reads": "newest", "window": 4},
    "draft vocabulary": {"k": 2, "draft_vocab": 12, "coupling": "recurrent"},
    "narrow": {
        "k": 2,
        "fusion": "linear",
        "reads": "newest",
        "coupling": "recurrent",
        "paths": NARROW,
    },
    "eagle chain": {"k": 1, "head": one_by_one(eagle), "paths": CHAIN},
    "eagle tree": {"k": 1, "head": one_by_one(eagle)},
}
DEEP_HEADS = {
    # Masks of seven nodes and a root have rows of multiples of eight, at any offset.
    "eight": {"k": 2, "paths": PATHS[:7], "kv_heads": 4},
    "layers": {"k": 2, "feature_layers": (1, 3), "reads": "both", "coupling": "markov"},
    "layers linear": {"k": 3, "feature_layers": (2,), "fusion": "linear"},
    "eagle3": {"k": 1, "head": one_by_one(random_eagle3), "draft_vocab": 20},
    "eagle3 chain": {"k": 1, "head": one_by_one(random_eagle3), "paths": CHAIN},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_changes_no_token(plain, name):
    check(plain, partial(falcon, plain.target, **HEADS[name]))


@pytest.mark.parametrize("name", DEEP_HEADS)
def test_a_head_that_reads_layers_changes_no_token(deep, name):
    check(deep, partial(falcon, deep.target, **DEEP_HEADS[name]))


@pytest.mark.parametrize(
    ("name", "width", "paths"),
    [("both", 1, 2), ("newest", 3, 2), ("window", 1, 1), ("own", 3, 2), ("eagle", 4, 3)],
)
def test_a_dynamic_draft_changes_no_token(plain, name, width, paths):
    check(plain, partial(drafter_for, plain.target, name, width=width, paths=paths))


@pytest.mark.parametrize("lm_heads", ["own", "shared"])
def test_medusa_heads_change_no_token(plain, lm_heads):
    heads = random_heads(random_target(), DEPTH, 2, lm_heads)
    check(plain, partial(MedusaDrafter, heads, plain.target, StaticTree(PATHS, DEPTH)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_student_changes_no_token(plain, students, name):
    check(plain, partial(make, name, students[0]))


@pytest.mark.parametrize("paths", [1, 3])
def test_a_student_that_drafts_best_first_changes_no_token(plain, students, paths):
    settings = {"capacity": 128, "costs": FREE, "depth": 5, "paths": paths}
    check(plain, partial(BestFirst, students[0], **settings))


def test_copies_change_no_token(plain):
    device = plain.target.device
    check(plain, lambda rows: PromptLookup(1, 5, rows, device))
    check(plain, partial(maxgram, device=device))


@pytest.mark.parametrize("leniency", [1.0, 2.0])
def test_a_cascade_changes_no_token(plain, students, leniency):
    def cascade(rows):
        table = maxgram(rows, device=plain.target.device)
        return CascadeDrafter(students, table, TWO, leniency, rows, 128)

    check(plain, cascade)


@pytest.mark.parametrize("mode", PADDINGS)
def test_padded_decoding_changes_no_token(plain, students, mode):
    target, rows = plain.target, 4
    for drafter in (None, falcon(target, 2, rows=rows), make("ssd", students[0], rows)):
        decoder, found = PaddedDecoder(target, drafter, rows, CAPACITY, *PADDINGS[mode]), []
        for first in (0, rows):
            decoder.packed.begin(rows)
            found += decode(decoder, plain.requests[first : first + rows], accepts=False)
        assert found == plain.tokens


def drawn(target, rule: str, rows: int, requests: list[Request]) -> list[list[int]]:
    """What a rule accepts of sampled drafts."""
    drafter = falcon(target, 2, CHAIN[:4] if rule == "block" else PATHS, rows)
    requests = [replace(r, rule=rule, temperature=2.0) for r in requests]
    return decode(Decoder(target, drafter, rows, CAPACITY), requests)


def test_tokens_equal_those_of_the_cpu(plain, deep):
    assert Plain.of(random_target()).tokens == plain.tokens
    assert Plain.of(random_target(layers=4, kv_heads=4)).tokens == deep.tokens


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_accepts_the_same_on_the_cpu_whatever_the_other_rows(plain, rule):
    found = drawn(plain.target, rule, 3, plain.requests)
    assert found == drawn(random_target(), rule, 8, plain.requests)
