"""A head with windowed attention: what it sees in training and while drafting."""

import pytest
import torch
import torch.nn.functional as F
from decoding import check_as_plain, prompts
from random_models import random_eagle3, random_head, random_target
from test_eagle3 import read
from test_falcon import check_draft, check_revision, check_rollout, check_rows, every_slot, pairs
from test_feature_layers import Recording

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.plan import Plan
from specdraft.eval.engine.request import Request
from specdraft.models.eagle3 import vocabulary_of
from specdraft.models.sar.blocks import block_index

WINDOWS = [1, 3, 8]  # one position; less than a draft's depth; more


@pytest.fixture(scope="module")
def target():
    return random_target(layers=4)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_position_sees_its_block_and_the_window_before_it(target, window):
    """Brute force: move one input at a time and see which outputs move."""
    head = random_head(target, block_size=3, fusion="linear", window=window)
    (ahead, features), blocks = pairs(1, 14), block_index(14, 3, 2)[None]
    before = head(ahead, features, blocks)[0, 0]
    for j in range(14):
        moved = features.clone()
        moved[0, j] += 1.0
        after = head(ahead, moved, blocks)[0, 0]
        changed = (after - before).abs().amax(-1) > 1e-6
        seen = [bool(blocks[0, j] <= blocks[0, i]) and i - j < window for i in range(14)]
        assert changed.tolist() == seen, j


@every_slot
@pytest.mark.parametrize("window", WINDOWS)
def test_rollout_uses_the_same_window(target, slots, window):
    check_rollout(random_head(target, 3, layers=2, window=window, **slots))


@every_slot
def test_a_revised_block_uses_the_same_window(target, slots):
    check_revision(random_head(target, 3, layers=2, window=4, **slots), False, 0.3)


@every_slot
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("k", "layers"), [(2, 2), (3, 1)])
def test_drafting_predicts_what_the_head_predicts_in_training(target, slots, window, k, layers):
    layers = 1 if slots["reads"] == "own" else layers
    head = random_head(target, k, fusion="linear", layers=layers, window=window, **slots)
    check_draft(head, target)


@every_slot
def test_a_draft_does_not_depend_on_other_rows(target, slots):
    check_rows(random_head(target, 3, fusion="linear", window=20, **slots), target)


@pytest.mark.parametrize("window", WINDOWS)
def test_eagle_3_with_a_window_drafts_what_it_predicts_in_training(target, window):
    """An incremental chain of three, passes over the whole sequence with its window, and training
    agree."""
    head = random_eagle3(target, window=window)

    def once(ahead, states):
        def attend(layer, query, key, value):
            places = torch.arange(states.shape[1])
            behind = places[:, None] - places
            mask = (behind >= 0) & (behind < window)
            return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

        rope = head.rope(torch.arange(states.shape[1])[None])
        return head.decode(head.inputs(ahead, states), rope, attend)

    drafter, prompt = Recording(head, target, StaticTree.chain(3, 1), 1, 128), prompts()[2]
    done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 14)]))
    tokens, length, vocabulary = prompt + done.tokens, len(prompt), vocabulary_of(head, target)
    for draft, step in zip(drafter.drafts, done.steps, strict=False):
        length += step.emitted
        ahead, features, blocks = read(target, head, torch.tensor(tokens[:length]))
        expected, states = [], head.join(features)
        torch.testing.assert_close(head(ahead, features, blocks)[0], once(ahead, states))
        for _ in range(3):
            state = once(ahead, states)[:, -1:]
            best = vocabulary.tokens(vocabulary.logits(state)[0].argmax(-1))
            expected += best.tolist()
            states = torch.cat((states, state), 1)
            ahead = torch.cat((ahead, target.embed(best[None])), 1)
        assert draft == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_output_equals_that_of_plain_decoding(target, rows):
    head = random_head(target, 3, reads="newest", coupling="markov", window=5)
    paths = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0)]
    tree = StaticTree(paths, 3)
    check_as_plain(target, FalconDrafter(head, target, tree, rows, 128), rows)


def test_cache_slots_outside_the_window_are_not_read(target, monkeypatch):
    head, places = random_head(target, 2, window=9), []
    narrowed = Plan._narrowed

    def spy(self, *inputs):
        segment = narrowed(self, *inputs)
        if self.pool.windows == [9]:  # not the target's
            places.append((segment.start - segment.first, self.pool.lengths[0]))
        return segment

    monkeypatch.setattr(Plan, "_narrowed", spy)
    drafter = Recording(head, target, StaticTree.chain(4, 2), 1, 128)
    next(Decoder(target, drafter, 1, 128).run([Request(prompts()[3], 30)]))
    assert max(length for _, length in places) > 30
    assert max(seen for seen, _ in places) <= 9 + 4
