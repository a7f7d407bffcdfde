"""Coupled glancing on one micro-batch: what is revealed, what carries loss, and the loss itself."""

import pytest
import torch
from test_loop import ToyRows, make_ends, make_head, make_recipe

from specdraft.train.objectives.csgd import CoupledGlancing
from specdraft.train.objectives.depth import Drafts
from specdraft.train.objectives.glance import choose_runs
from specdraft.train.objectives.losses import head_loss

K = 3


def prepared(tmp_path, **changes):
    """An objective, its head, and a micro-batch of 24 rows."""
    recipe = make_recipe(tmp_path, **{"loss.feature_noise": 0.0} | changes)
    head = make_head(K)
    objective = CoupledGlancing(recipe, make_ends(), head.config)
    rows = ToyRows(longest=30).rows
    return objective, head, objective.collate(rows, [(0, 0, n) for n in range(len(rows))])


def wrong_by_hand(objective, head, batch) -> list[int]:
    """The number of each row's supervised positions whose predicted token is wrong."""
    ends, counts = objective.target, []
    with torch.no_grad():
        ahead = ends.embed(batch.tokens[:, 1:])
        predicted = head(ahead, batch.features[:, :-1], batch.blocks, batch.valid)[0]
    for row, supervised in enumerate(batch.supervised.tolist()):
        says = (predicted[row] @ ends.lm_head_weight.T).argmax(-1).tolist()
        answers = batch.tokens[row, K + 1 :].tolist()  # position i drafts the token k + 1 later
        places = [i for i, counts_here in enumerate(supervised) if counts_here]
        counts.append(sum(says[i] != answers[i] for i in places))
    return counts


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_the_number_of_revealed_positions_is_a_share_of_the_heads_mistakes(tmp_path, progress):
    """lambda falls from 0.4 to 0.2; test_glance.py tests where the runs are."""
    objective, head, batch = prepared(tmp_path, **{"glance.start": 0.4, "glance.end": 0.2})
    revealed, _ = objective.plan(head, batch, progress)
    wrong = wrong_by_hand(objective, head, batch)
    assert len(set(wrong)) > 1
    ratio = 0.4 - 0.2 * progress
    for row, generator in enumerate(batch.generators("glance")):
        inside = slice(0, batch.lengths[row] - 1)
        budget = round(ratio * wrong[row])
        part = batch.blocks[row, inside], batch.supervised[row, inside]
        expected = choose_runs(*part, budget, generator)
        assert revealed[row, inside].tolist() == expected.tolist()
        assert not revealed[row, batch.lengths[row] - 1 :].any()
    assert revealed.sum() > 3


@pytest.mark.parametrize("keeps", [False, True])
def test_revealed_positions_carry_loss_only_if_the_recipe_says_so(tmp_path, keeps):
    objective, head, batch = prepared(tmp_path, **{"glance.supervise_revealed": keeps})
    revealed, counted = objective.plan(head, batch, 0.0)
    assert (revealed & batch.supervised).any()
    expected = batch.supervised if keeps else batch.supervised & ~revealed
    assert torch.equal(counted, expected)


class Listening:
    """A head that records its inputs and predicts zeros."""

    def __call__(self, ahead, features, *_, passes=1, **given):
        self.ahead, self.features, self.given = ahead, features, given
        return torch.zeros(passes, *ahead.shape, requires_grad=True)


def test_feature_noise_is_symmetric_and_bounded_by_a_share_of_the_feature_scale(tmp_path):
    objective, _, batch = prepared(tmp_path, **{"loss.feature_noise": 0.1})
    head, true = Listening(), batch.features[:, :-1]
    objective.plan(head, batch, 0.0)
    noise = (head.features - true)[batch.valid]
    reach = 0.1 * objective.feature_scale
    assert reach == pytest.approx(0.3)
    assert 0.95 * reach < noise.max() <= reach + 1e-6
    assert -reach - 1e-6 <= noise.min() < -0.95 * reach
    assert abs(noise.mean()) < 0.02 * reach
    assert torch.equal(head.features[~batch.valid], true[~batch.valid])  # pads have none


@pytest.mark.parametrize("isolated", [False, True])
def test_coupled_slots_get_the_true_tokens_whatever_is_revealed(tmp_path, isolated):
    objective, _, batch = prepared(tmp_path, **{"glance.isolated": isolated})
    head, ends = Listening(), objective.target
    revealed, counted = objective.plan(head, batch, 0.0)
    assert revealed.any()
    objective.loss(head, batch, revealed, counted)
    true = ends.embed(batch.tokens[:, 1:])
    assert torch.equal(head.given["drafted"], true)
    shown = head.given["revised"][0] if isolated else head.ahead
    assert not torch.equal(shown, true)


def test_the_loss_sums_over_counted_positions_given_the_revealed_inputs(tmp_path):
    objective, head, batch = prepared(tmp_path, **{"glance.isolated": False})
    revealed, counted = objective.plan(head, batch, 0.0)
    total, sums = objective.loss(head, batch, revealed, counted)
    ends, loss = objective.target, objective.recipe.loss
    ahead, features = ends.embed(batch.tokens[:, 1:]).clone(), batch.features[:, :-1].clone()
    for row, i in revealed.nonzero().tolist():
        ahead[row, i] = ends.embed(batch.tokens[row, i + 1 + K])
        features[row, i] = batch.features[row, i + K]
    predicted = head(ahead, features, batch.blocks, batch.valid, keep=revealed, passes=2)
    expected = torch.zeros(())
    for row, i in counted.nonzero().tolist():
        expected = (
            expected
            + head_loss(
                predicted[:, row, i : i + 1],
                batch.features[row, i + K][None],
                batch.tokens[row, i + K + 1][None],
                ends.lm_head_weight,
                feature_scale=objective.feature_scale,
                feature_weight=loss.feature_weight,
                distill_weight=loss.distill_weight,
                soft_weight=loss.soft_weight,
            ).total
        )
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    assert sums["counted"] == counted.sum() > 10
    assert sums["revealed"] == revealed.sum() > 3


def test_the_recipe_weights_acceptance_and_depth_in_the_loss(tmp_path):
    """Against autograd with every distribution kept; test_depth.py tests the weights themselves."""
    weights = {"loss.lk_weight": 0.3, "loss.pace_smoothing": 0.5, "loss.feature_weight": 0.0}
    objective, head, batch = prepared(tmp_path, **weights, **{"glance.enabled": False})
    total, _ = objective.loss(head, batch, *objective.plan(head, batch, 0.0))
    ends, loss = objective.target, objective.recipe.loss
    ahead = ends.embed(batch.tokens[:, 1:])
    predicted = head(ahead, batch.features[:, :-1], batch.blocks, batch.valid, passes=2)
    rows, places = batch.supervised.nonzero(as_tuple=True)
    q = (predicted[:, rows, places] @ ends.lm_head_weight.T).softmax(-1)
    p = (batch.features[rows, places + K] @ ends.lm_head_weight.T).softmax(-1)
    right = q[:, torch.arange(len(rows)), batch.tokens[rows, places + K + 1]]
    soft = 0.7 * (p * (p / q).log()).sum(-1) - 0.3 * torch.minimum(p, q).sum(-1).log()
    drafts = Drafts(rows, places, batch.offsets[rows, places], rows >= 0, K, batch.supervised.shape)
    counts = drafts.expected(right.detach(), 0.5)
    expected = counts * (loss.soft_weight * soft - (1 - loss.soft_weight) * right.log())
    expected = loss.distill_weight * expected.sum() / 2
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(value, [*head.parameters()]) for value in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_tokens_beyond_the_draft_vocabulary_count_as_wrong_and_have_no_ce(tmp_path):
    """Both passes use only the lm_head rows that the head drafts with."""
    objective, head, batch = prepared(tmp_path, **{"glance.enabled": False})
    ids, ends = torch.arange(0, len(objective.target.lm_head_weight), 2), objective.target
    few = CoupledGlancing(objective.recipe, ends, head.config, ids)
    total, sums = few.loss(head, batch, *few.plan(head, batch, 0.0))
    predicted = head(
        ends.embed(batch.tokens[:, 1:]), batch.features[:, :-1], batch.blocks, batch.valid, passes=2
    )
    rows, places = batch.supervised.nonzero(as_tuple=True)
    tokens = batch.tokens[rows, places + K + 1]
    loss, listed = objective.recipe.loss, ids.tolist()
    expected = head_loss(
        predicted[:, rows, places],
        batch.features[rows, places + K],
        torch.tensor([listed.index(n) if n in listed else -1 for n in tokens.tolist()]),
        ends.lm_head_weight[ids],
        feature_scale=objective.feature_scale,
        feature_weight=loss.feature_weight,
        distill_weight=loss.distill_weight,
        soft_weight=loss.soft_weight,
        partial=True,
    )
    torch.testing.assert_close(total, expected.total)
    assert sums["counted"] == len(rows)  # all still predict a feature
    glancing = CoupledGlancing(make_recipe(tmp_path), ends, head.config, ids)
    assert glancing.plan(head, batch, 0.0)[0].sum() > 3
