"""Layers of the target while decoding, tapped where they are returned."""

import pytest
import torch
from decoding import prompts
from random_models import random_target
from torch import Tensor, nn

from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.tree import chain
from specdraft.models.feature_layers import Layers, Taps
from specdraft.models.target import Target

LAYERS = (3, 1)


@pytest.fixture
def target() -> Target:
    return random_target(layers=4)


def read_packed(target: Target, layers: Layers = LAYERS) -> tuple[PackedTarget, Tensor]:
    """A packed target that has read a prompt, and its wide features of it [T, (1 + n) * H]."""
    ids = torch.tensor(prompts()[0])
    packed = PackedTarget(target, 1, 64, layers)
    with torch.inference_mode():
        segments = [packed.segment(0, chain(len(ids) - 1))]
        return packed, packed.forward(ids, torch.arange(len(ids)), segments)


def wide(target: Target) -> Tensor:
    """The same as transformers gives them."""
    return target.features(torch.tensor(prompts()[:1]), layers=LAYERS)[0]


def hooks_of(packed: PackedTarget) -> list[int]:
    return [len(layer._forward_hooks) for layer in packed.base.layers]


def test_a_forward_taps_its_layers_and_calls_no_hook_of_transformers(target):
    expected = wide(target)  # which leaves hooks on the target's model
    packed, found = read_packed(target)
    torch.testing.assert_close(found, expected)
    assert hooks_of(packed) == [1, 0, 1, 0]
    assert packed.taps.drain() == {}  # nothing is held between forwards
    assert hooks_of(read_packed(target, ())[0]) == [0, 0, 0, 0]
    assert torch.equal(wide(target), expected)  # the target's own hooks are as they were


def test_where_two_stacks_are_as_deep_transformers_is_asked(target):
    target.base.others = nn.ModuleList(nn.Identity() for _ in range(4))
    packed, found = read_packed(target)
    assert packed.taps is None
    torch.testing.assert_close(found, wide(target))


def test_where_layers_do_not_return_the_hidden_states_transformers_is_asked(target, monkeypatch):
    keep = Taps._keep

    def something_else(self, number, layer, inputs, output):
        keep(self, number, layer, inputs, -output)

    monkeypatch.setattr(Taps, "_keep", something_else)
    packed, found = read_packed(target)
    assert packed.taps is None
    torch.testing.assert_close(found, wide(target))
