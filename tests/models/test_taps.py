"""Layers of the target while decoding, tapped at the layers' outputs."""

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
    """A packed target that has read a prompt, and the prompt's wide features [T, (1 + n) * H]."""
    ids = torch.tensor(prompts()[0])
    packed = PackedTarget(target, 1, 64, layers)
    with torch.inference_mode():
        segments = [packed.segment(0, chain(len(ids) - 1))]
        return packed, packed.forward(ids, torch.arange(len(ids)), segments)


def wide(target: Target) -> Tensor:
    """The same features as transformers gives them."""
    return target.features(torch.tensor(prompts()[:1]), layers=LAYERS)[0]


def hooks_of(packed: PackedTarget) -> list[int]:
    return [len(layer._forward_hooks) for layer in packed.base.layers]


def test_a_forward_taps_its_layers_without_transformers_hooks(target):
    expected = wide(target)  # leaves hooks on the target's model
    packed, found = read_packed(target)
    torch.testing.assert_close(found, expected)
    assert hooks_of(packed) == [1, 0, 1, 0]
    assert packed.taps.drain() == {}  # nothing is kept between forwards
    assert hooks_of(read_packed(target, ())[0]) == [0, 0, 0, 0]
    assert torch.equal(wide(target), expected)  # its own hooks still work


def test_with_two_stacks_of_equal_depth_transformers_gives_the_layers(target):
    target.base.others = nn.ModuleList(nn.Identity() for _ in range(4))
    packed, found = read_packed(target)
    assert packed.taps is None
    torch.testing.assert_close(found, wide(target))


def test_if_layers_return_something_else_transformers_gives_the_layers(target, monkeypatch):
    keep = Taps._keep

    def something_else(self, number, layer, inputs, output):
        keep(self, number, layer, inputs, -output)

    monkeypatch.setattr(Taps, "_keep", something_else)
    packed, found = read_packed(target)
    assert packed.taps is None
    torch.testing.assert_close(found, wide(target))
