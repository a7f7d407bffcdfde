"""Recurrent layers decode as the family's own `generate`: rejected drafts are undone."""

import pytest
import torch
from decoding import Foreseeing, decode, plain_tokens, prompts
from random_families import GQA, check_family, random_model

from specdraft.eval.drafters.cascade import Reviewer
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.engine import states
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.padded import PaddedDecoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Topology, chain
from specdraft.models.target import Target
from specdraft.recipes.errors import TargetError

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": LAYERS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 32,
    "mamba_chunk_size": 8,
}
SPACES = {"num_heads": 8, "head_dim": 4, "state_size": 6, "n_groups": 2, "chunk_size": 8}
FAMILIES = {
    "qwen3_next": ("Qwen3Next", {**GQA, **DELTA}),
    "lfm2": ("Lfm2", {**GQA, "layer_types": ["conv", "full_attention", "conv"]}),
    "mamba2": ("Mamba2", SPACES),  # without attention
    "falcon_h1": ("FalconH1", {**GQA, **MAMBA, "head_dim": 8}),  # both in one
}
TREE = Topology([-1, 0, 0, 1, 1, 2])


def recurrent(name: str) -> Target:
    family, settings = FAMILIES[name]
    return Target(random_model(family, **settings), None, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_recurrent_layers_decode_as_the_model_generates(name):
    check_family(recurrent(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tests_catch_states_that_keep_rejected_or_lose_accepted_tokens(name, monkeypatch):
    target = recurrent(name)
    asked = prompts(4)
    expected = [plain_tokens(target, prompt, 14) for prompt in asked]
    drafter = Foreseeing({tuple(p): answer for p, answer in zip(asked, expected, strict=True)})
    requests, keep = [Request(prompt, 14) for prompt in asked], states.States.keep
    everything = [*range(len(drafter.topology))]
    for mistake in (everything, [0]):  # rejected tokens stay; accepted tokens are lost
        decoder = Decoder(target, drafter, 2, 100)
        with monkeypatch.context() as patch:
            patch.setattr(states.States, "keep", lambda s, row, _, m=mistake: keep(s, row, m))
            assert decode(decoder, requests) != expected


def test_a_row_may_skip_forwards_and_continue():
    target = recurrent("qwen3_next")
    packed, ids = PackedTarget(target, 3, 64), torch.tensor(prompts()[3])
    expected = target.features(ids[None])[0]

    def read(row: int, *nodes: int, topology: Topology, keep: list[int]) -> torch.Tensor:
        start = packed.pool.lengths[row]
        places = start + torch.tensor(topology.depths)
        segments = [packed.segment(row, topology)]
        features = packed.forward(torch.tensor(nodes), places, segments)
        packed.keep(row, keep)
        return features[keep]

    a, b, c, d, e, f, *_ = ids.tolist()
    with torch.inference_mode():
        first = read(1, a, 5, b, 6, 7, c, topology=TREE, keep=[0, 2, 5])
        read(2, 3, 4, topology=chain(1), keep=[0])
        read(0, 3, 4, topology=chain(1), keep=[0])
        again = read(1, d, e, f, topology=chain(2), keep=[0, 1, 2])
    torch.testing.assert_close(torch.cat((first, again)), expected[:6], atol=1e-4, rtol=1e-4)


def test_drafted_nodes_keep_their_inputs_and_no_states():
    target = recurrent("qwen3_next")
    packed = PackedTarget(target, 2, 64)
    held = packed.states
    before = [[state.data_ptr() for state in states._tensors(layer)] for layer in held.layers]
    for _ in range(2):
        packed.forward(torch.arange(6), torch.tensor(TREE.depths), [packed.segment(0, TREE)])
        packed.keep(0, [0, 1])
    assert [kept.shape for kept in held.inputs] == [(5, target.hidden_size)] * 2
    after = [[state.data_ptr() for state in states._tensors(layer)] for layer in held.layers]
    assert after == before
    assert len(packed.pool.layers) == 1  # only attention layers have keys and values


def test_leaf_paths_cover_all_nodes_and_end_at_all_leaves():
    for topology in (TREE, chain(4), Topology([-1, 0, 1, 0, 3, 3, 1])):
        for known in (1, 2):
            if known == 2 and topology.parents[1:].count(0) > 1:
                continue  # a committed node has one child
            paths, where = states.leaf_paths(topology, known)
            leaves = [n for n in range(known, len(topology)) if not topology.children[n]]
            assert [path[-1] for path in paths] == leaves
            found = [paths[path][place] for path, place in where]
            assert found == [*range(known, len(topology))]
            for path in paths:
                assert [topology.parents[n] for n in path[1:]] == path[:-1]
                assert topology.parents[path[0]] == known - 1


@pytest.mark.parametrize(
    "refused",
    [
        lambda target: SSD(target, 1, 64, gamma=2),
        lambda target: Reviewer(target, 1, 64, 8),
        lambda target: PaddedDecoder(target, None, 2, 64),
    ],
)
def test_uses_that_would_need_truncated_states_are_refused(refused):
    with pytest.raises(TargetError, match=r"lfm2 \(lfm2\): it has recurrent layers, whose state"):
        refused(recurrent("lfm2"))
