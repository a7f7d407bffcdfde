"""Rows inside another engine: correct outputs, our own drafts, and nothing left behind."""

import numpy as np
import pytest
import torch
from decoding import plain_tokens
from random_models import VOCAB, random_head, random_target
from served_engine import SmallEngine

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.maxgram import MaxGramDrafter
from specdraft.eval.lookup.suffix import FirstSuffixes
from specdraft.eval.serve.prefixes import BLOCK, Prefixes
from specdraft.eval.serve.rows import RowStep, ServedRows

LENGTH, CAPACITY = 24, 128
HEADS = {
    "paper": {"block_size": 2},
    "coupled": {
        "block_size": 3, "fusion": "linear", "reads": "both", "coupling": "recurrent",
    },
    "newest": {"block_size": 2, "reads": "newest", "coupling": "markov"},
    "eagle": {"block_size": 1, "fusion": "linear", "input_norm": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return random_target()


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of mixed lengths; every third starts like the one before it."""
    torch.manual_seed(seed)
    lengths = torch.randint(2, longest, (count,)).tolist()
    made = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    for n in range(2, count, 3):
        made[n] = made[n - 1] + made[n]
    return made


def falcon(target, kind: str, slots: int, depth: int = 6) -> ServedRows:
    head = random_head(target, **HEADS[kind])
    tree = StaticTree.chain(depth, head.config.block_size)
    return ServedRows(FalconDrafter(head, target, tree, slots, CAPACITY), slots)


def maxgram(target, slots: int) -> ServedRows:
    table = [*range(1, VOCAB), 0]
    return ServedRows(MaxGramDrafter(FirstSuffixes, 5, next_id=table, rows=slots), slots)


@pytest.mark.parametrize("kind", [*HEADS, "maxgram"])
@pytest.mark.parametrize("slots", [8, 3])
def test_outputs_equal_plain_decoding_with_waiting_preempted_and_aborted_rows(target, kind, slots):
    rows = maxgram(target, slots) if kind == "maxgram" else falcon(target, kind, slots)
    engine = SmallEngine(target, rows, chunk=7, batch=8, seed=3)
    asked = prompts(14)
    found = engine.run(asked, LENGTH, unrest=0.2)
    assert len(found) > 6
    for number, tokens in found.items():
        assert tokens == asked[number] + plain_tokens(target, asked[number], LENGTH)
    assert max(engine.held) <= slots
    assert max(map(max, (row.steps for row in engine.finished.values()))) > 1


@pytest.mark.parametrize("kind", [*HEADS, "maxgram"])
def test_steps_equal_those_of_our_own_decoder(target, kind):
    """Chunked prompts and moved rows change no draft."""
    asked = prompts(6, seed=5)
    rows = maxgram(target, 6) if kind == "maxgram" else falcon(target, kind, 6)
    engine = SmallEngine(target, rows, chunk=5, batch=6, seed=1)
    engine.run(asked, LENGTH)
    for number, prompt in enumerate(asked):
        one = maxgram(target, 1) if kind == "maxgram" else falcon(target, kind, 1)
        decoder = Decoder(target, one.drafter, 1, CAPACITY)
        (done,) = decoder.run([Request(prompt, LENGTH)])
        assert engine.finished[number].steps[:-1] == [step.emitted for step in done.steps][:-1]


@pytest.mark.parametrize("kind", HEADS)
def test_prefixes_from_the_engines_cache_lose_no_draft(target, kind):
    """A repeated prompt finds the features that its first run stored."""
    asked = [prompt for prompt in prompts(9, seed=2) if len(prompt) > 2 * BLOCK]
    engine = SmallEngine(target, falcon(target, kind, 4), chunk=50, batch=4, seed=1)
    engine.run(asked, LENGTH)
    first = [engine.finished[n].steps for n in range(len(asked))]
    engine.run(asked, LENGTH)
    assert [engine.finished[n].steps for n in range(len(asked))] == first


def test_a_prefix_with_unknown_features_can_still_be_drafted_for(target):
    rows = falcon(target, "coupled", 1)
    (prompt,) = prompts(1, seed=4, longest=64)
    features = target.features(torch.tensor([prompt]))[0]
    start, known = len(prompt) - 3, np.array([*prompt, 5], dtype=np.int32)
    ((draft),) = rows.step([RowStep(known, start, features[start:], True)])
    assert len(draft) == 6


def test_ended_rows_are_forgotten_and_their_slots_freed(target):
    rows = falcon(target, "coupled", 4)
    engine = SmallEngine(target, rows, chunk=64, batch=4, seed=1)
    engine.run(prompts(9), LENGTH)
    assert len(rows) <= 4
    assert rows.step([]) == []
    assert len(rows) == 0
    assert sorted(rows._free) == [0, 1, 2, 3]


def test_rows_with_equal_tokens_have_separate_slots(target):
    rows = falcon(target, "paper", 4)
    engine = SmallEngine(target, rows, chunk=64, batch=4, seed=1)
    (prompt,) = prompts(1)
    found = engine.run([prompt] * 4, LENGTH)
    assert engine.held[0] == 4
    assert all(tokens == found[0] for tokens in found.values())


# The store of features.


def test_features_are_found_by_their_whole_token_prefix():
    prefixes, tokens = Prefixes(1000), np.arange(50, dtype=np.int32)
    features = torch.randn(50, 4)
    prefixes.keep(tokens, [features[:30], features[30:]])
    for end in (16, 48, 50):
        found = torch.cat(prefixes.behind(tokens[:end]))
        assert torch.equal(found, features[:end])
    assert prefixes.behind(tokens[:40]) == []  # ends within a block
    assert prefixes.behind(tokens[1:17]) == []
    other = tokens.copy()
    other[3] = 99
    assert prefixes.behind(other[:48]) == []


def test_features_are_found_back_to_the_nearest_gap():
    prefixes, tokens = Prefixes(1000), np.arange(64, dtype=np.int32)
    features = torch.randn(64, 4)
    prefixes.keep(tokens, [features[20:]])  # complete blocks from 32 on
    assert torch.equal(torch.cat(prefixes.behind(tokens)), features[32:])


def test_the_least_recently_used_features_are_dropped_first():
    prefixes = Prefixes(2 * BLOCK)
    rows = [np.full(BLOCK, n, dtype=np.int32) for n in range(3)]
    for row in rows[:2]:
        prefixes.keep(row, [torch.zeros(BLOCK, 2)])
    assert prefixes.behind(rows[0])
    prefixes.keep(rows[2], [torch.zeros(BLOCK, 2)])
    assert prefixes.tokens == 2 * BLOCK
    assert [bool(prefixes.behind(row)) for row in rows] == [True, False, True]
