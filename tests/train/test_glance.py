"""Glancing against a slow implementation of its description."""

import pytest
import torch

from specdraft.models.sar.blocks import block_index, block_offsets
from specdraft.train.objectives.glance import (
    choose_runs,
    glancing_ratio,
    reveal,
    wrong_per_row,
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cut(length, k, phase):
    """The positions of each block, by walking along the sequence."""
    blocks, start, size = [], 0, phase
    while start < length:
        blocks.append(list(range(start, min(start + size, length))))
        start, size = start + size, k
    return blocks


def capacity(block, supervised):
    """Longest run in a block: its leading supervised positions, without the block's last."""
    run = 0
    while run < len(block) - 1 and supervised[block[run]]:
        run += 1
    return run


def cases():
    for k in (1, 2, 3, 4):
        for phase in range(1, k + 1):
            for length in (1, 2, 5, 13):
                for seed in range(4):
                    yield k, phase, length, seed


def test_offsets_count_from_the_start_of_each_block():
    for k, phase, length, _ in cases():
        expected = [offset for block in cut(length, k, phase) for offset in range(len(block))]
        assert block_offsets(block_index(length, k, phase)).tolist() == expected


def test_runs_start_their_block_leave_its_last_position_and_keep_the_budget():
    for k, phase, length, seed in cases():
        supervised = torch.rand(length, generator=generator(seed)) < 0.7
        blocks = block_index(length, k, phase)
        room = sum(capacity(block, supervised) for block in cut(length, k, phase))
        for budget in (0, 1, 2, 5, 100):
            revealed = choose_runs(blocks, supervised, budget, generator(seed))
            assert revealed.sum() <= min(budget, room)
            assert (revealed.sum() > 0) == (min(budget, room) > 0)
            for block in cut(length, k, phase):
                run = int(revealed[block].sum())
                assert revealed[block[:run]].all()  # at the start
                assert run <= capacity(block, supervised)


def test_the_budget_is_used_up_when_blocks_of_two_have_room():
    blocks, supervised = block_index(40, 2, 2), torch.ones(40, dtype=torch.bool)
    for budget in range(21):
        assert choose_runs(blocks, supervised, budget, generator(budget)).sum() == budget


def test_every_eligible_block_and_run_length_can_be_chosen():
    blocks, supervised = block_index(12, 3, 3), torch.ones(12, dtype=torch.bool)
    seen = {
        tuple(choose_runs(blocks, supervised, 2, generator(seed)).nonzero().flatten().tolist())
        for seed in range(400)
    }
    runs_of_two = {(b, b + 1) for b in (0, 3, 6, 9)}
    singles = {(a, b) for a in (0, 3, 6, 9) for b in (0, 3, 6, 9) if a < b}
    assert seen == runs_of_two | singles


def test_blocks_of_one_are_never_revealed():
    supervised = torch.ones(9, dtype=torch.bool)
    assert not choose_runs(block_index(9, 1, 1), supervised, 9, generator(0)).any()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_revealed_pair_is_replaced_by_the_pair_k_positions_later(k):
    ahead, features = torch.randn(2, 3, 9, 4, generator=generator(0))
    revealed = torch.rand(3, 9, generator=generator(1)) < 0.4
    revealed[:, -k:] = False  # these have no later pair
    new_ahead, new_features = reveal(ahead, features, revealed, k)
    for row in range(3):
        for i in range(9):
            source = i + k if revealed[row, i] else i
            assert torch.equal(new_ahead[row, i], ahead[row, source])
            assert torch.equal(new_features[row, i], features[row, source])


@pytest.mark.parametrize("elements", [1, 35, 1 << 20])
def test_wrong_positions_are_counted_per_row_where_supervised(elements):
    predicted = torch.randn(3, 8, 5, generator=generator(0))
    lm_head = torch.randn(7, 5, generator=generator(1))
    tokens = torch.randint(7, (3, 8), generator=generator(2))
    supervised = torch.rand(3, 8, generator=generator(3)) < 0.6
    expected = [
        sum(
            int(supervised[row, i]) * int((lm_head @ predicted[row, i]).argmax() != tokens[row, i])
            for i in range(8)
        )
        for row in range(3)
    ]
    assert wrong_per_row(predicted, lm_head, tokens, supervised, elements).tolist() == expected


def test_the_ratio_falls_from_start_to_end():
    assert glancing_ratio(0.4, 0.0, 0.0) == 0.4
    assert glancing_ratio(0.4, 0.0, 0.5) == pytest.approx(0.2)
    assert glancing_ratio(0.4, 0.0, 1.0) == 0.0
    assert glancing_ratio(0.4, 0.1, 7.0) == pytest.approx(0.1)
