"""Weights of predictions by depth, against drafts that are walked one by one."""

import pytest
import torch

from specdraft.models.sar.blocks import block_index, block_offsets
from specdraft.recipes.sections.objectives import LossSection
from specdraft.train.objectives.depth import Drafts

ROWS, LENGTH = 3, 11


def sample(k, passes):
    """Blocks [B, L] of every alignment, counted positions [B, L], probabilities [R, B, L]."""
    generator = torch.Generator().manual_seed(k * 10 + passes)
    blocks = torch.stack([block_index(LENGTH, k, 1 + row % k) for row in range(ROWS)])
    counted = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    counted[:, LENGTH - k :] = False  # they have no target token
    counted[1, :4] = False
    for row in range(ROWS):
        counted[row, : row % k + 1] &= row % k + 1 == k  # only complete blocks
    chances = torch.rand(passes, ROWS, LENGTH, generator=generator, dtype=torch.float64)
    return blocks, counted, chances


def drafts_of(blocks, counted, k, known=None):
    rows, positions = counted.nonzero(as_tuple=True)
    offsets = torch.stack([block_offsets(row) for row in blocks])[rows, positions]
    known = torch.ones_like(rows, dtype=torch.bool) if known is None else known
    return Drafts(rows, positions, offsets, known, k, counted.shape)


def walk(blocks, counted, k, passes, row):
    """Yield every draft of a row as (pass, position) of its predictions, by depth."""
    ends = [int((blocks[row] <= b).sum()) - 1 for b in range(int(blocks[row, -1]))]
    for first in range(-passes, len(ends)):
        draft = []
        for r in range(passes):
            if 0 <= first + r < len(ends):
                end = ends[first + r]
                draft += [(r, i) for i in range(end - k + 1, end + 1)]
            else:
                draft += [(r, None)] * k
        yield [(r, i) if i is not None and i >= 0 else None for r, i in draft]


def of_mean_one(weights, counted):
    for row in range(ROWS):
        weights[:, row, counted[row]] /= weights[:, row, counted[row]].mean()
    return weights[:, counted]


@pytest.mark.parametrize(("k", "passes"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_a_prediction_is_weighted_by_what_it_adds_to_the_expected_length(k, passes, smoothing):
    """By autograd: the gradient of all drafts' lengths in the log probabilities."""
    blocks, counted, chances = sample(k, passes)
    logs = ((1 - smoothing) * chances + smoothing).log().requires_grad_()
    expected_lengths = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        for draft in walk(blocks, counted, k, passes, row):
            so_far = torch.zeros((), dtype=torch.float64)
            for place in draft:
                if place is not None and counted[row, place[1]]:
                    so_far = so_far + logs[place[0], row, place[1]]
                    expected_lengths = expected_lengths + so_far.exp()
    expected_lengths.backward()
    weights = drafts_of(blocks, counted, k).expected(chances[:, counted], smoothing)
    torch.testing.assert_close(weights, of_mean_one(logs.grad, counted))


@pytest.mark.parametrize(("k", "passes"), [(1, 4), (2, 3), (3, 2)])
def test_a_decay_weights_predictions_by_their_depth_in_the_draft(k, passes):
    blocks, counted, chances = sample(k, passes)
    expected = torch.zeros_like(chances)
    for row in range(ROWS):
        for draft in walk(blocks, counted, k, passes, row):
            for depth, place in enumerate(draft):
                if place is not None:
                    expected[place[0], row, place[1]] = 0.7**depth
    weights = drafts_of(blocks, counted, k).decayed(0.7, chances[:, counted])
    torch.testing.assert_close(weights, of_mean_one(expected, counted))


def test_in_a_certain_draft_the_first_tokens_have_the_largest_weights():
    blocks, counted = block_index(40, 2, 2)[None], torch.ones(1, 40, dtype=torch.bool)
    sure = torch.ones(3, 40)
    weights = drafts_of(blocks, counted, 2).expected(sure, smoothing=0.0)
    middle = weights[:, 10:12].flatten()  # a middle block: depths 1 and 2, 3 and 4, 5 and 6
    torch.testing.assert_close(middle / middle[-1], torch.arange(6.0, 0.0, -1.0))


def test_zero_probabilities_give_zero_weights():
    blocks, counted, chances = sample(2, 3)
    weights = drafts_of(blocks, counted, 2).expected(0.0 * chances[:, counted], smoothing=0.0)
    assert not weights.any()


@pytest.mark.parametrize("changes", [{}, {"depth_decay": 0.8}, {"pace_smoothing": 0.5}])
def test_a_recipe_chooses_the_weights_of_predictions(changes):
    blocks, counted, chances = sample(2, 3)
    drafts, parts = drafts_of(blocks, counted, 2), {"hard": -chances[:, counted].log()}
    weigh = drafts.weighing(LossSection(**changes))
    expected = {
        (): None,
        ("depth_decay",): drafts.decayed(0.8, parts["hard"]),
        ("pace_smoothing",): drafts.expected(chances[:, counted], 0.5),
    }[tuple(changes)]
    if expected is None:
        assert weigh is None
    else:
        torch.testing.assert_close(weigh(parts), expected)


def test_a_token_that_is_never_drafted_ends_a_draft():
    """Its CE is left out, so its probability must not be read from it."""
    blocks, counted, chances = sample(2, 3)
    rows, _ = counted.nonzero(as_tuple=True)
    known = torch.arange(len(rows)) % 4 > 0
    hard = -chances[:, counted].log() * known
    weigh = drafts_of(blocks, counted, 2, known).weighing(LossSection(pace_smoothing=0.3))
    expected = drafts_of(blocks, counted, 2).expected(chances[:, counted] * known, 0.3)
    torch.testing.assert_close(weigh({"hard": hard}), expected)
