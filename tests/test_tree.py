"""Trees: ancestors, static trees cut into passes, and a cache that keeps accepted paths."""

import pytest
import torch

from specdraft.eval.kv import KVPool
from specdraft.eval.static import StaticTree
from specdraft.eval.tree import Topology, chain
from specdraft.recipes.static_trees import known_trees, load_tree_paths


def test_ancestors_are_those_found_by_climbing():
    topology = Topology([-1, 0, 0, 1, 2, 2, 4])
    for node in range(7):
        climbed, at = {node}, node
        while topology.parents[at] >= 0:
            at = topology.parents[at]
            climbed.add(at)
        assert set(topology.ancestors[node].nonzero().flatten().tolist()) == climbed
        assert topology.depths[node] == len(climbed) - 1


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 3]])
def test_a_parent_has_to_come_first(parents):
    with pytest.raises(ValueError, match=r"root|parents come first"):
        Topology(parents)


def test_a_chain_is_a_chain():
    assert chain(3).parents == (-1, 0, 1, 2)
    assert chain(3).is_chain
    assert not Topology([-1, 0, 0]).is_chain


@pytest.mark.parametrize("name", known_trees())
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_passes_fill_every_node_once_from_its_own_path(name, k):
    """Redo by hand which path, depth and rank each node takes its token from."""
    paths = load_tree_paths(name)
    tree = StaticTree(paths, k)
    assert len(tree.passes) == -(-max(map(len, paths)) // k)
    names = {node: path for path, node in tree.index.items()}
    filled, keys = [], []
    for number, plan in enumerate(tree.passes):
        blocks = plan.blocks.view(-1, k).tolist()
        before = tree.passes[number - 1].first
        own = [names[before + block[-1]] for block in blocks] if number else [()]
        assert len(plan.parents) == len(own)
        nodes = range(plan.first, plan.first + len(plan.choices))
        for node, choice in zip(nodes, plan.choices.tolist(), strict=True):
            source, rank = divmod(choice, plan.width)
            expanded, offset = own[source // k], source % k
            assert names[node][: len(expanded)] == expanded
            assert len(names[node]) == number * k + offset + 1
            assert names[node][-1] == rank < plan.width
        filled += nodes
        if number:
            for block, path in zip(blocks, own, strict=True):
                assert [names[before + node] for node in block] == [
                    path[: len(path) - k + n + 1] for n in range(k)
                ]
            keys += own
            for row, path in enumerate(own):
                sees = [path[: len(key)] == key for key in keys]
                expected = [flag for flag in sees for _ in range(k)]
                assert plan.visible[row * k].tolist() == expected
    assert sorted(filled) == list(range(1, len(paths) + 1))


def test_a_tree_without_a_parent_is_refused():
    with pytest.raises(ValueError, match=r"\[1, 0\] has no parent \[1\]"):
        StaticTree([(0,), (1, 0)], 2)


def test_the_pool_keeps_an_accepted_path_and_nothing_else():
    pool = KVPool([torch.device("cpu")] * 2, rows=3, kv_heads=1, capacity=12, head_dim=4)
    generator = torch.Generator().manual_seed(0)
    pool.lengths = [3, 2, 5]
    before = torch.randn(2, 2, 3, 1, 12, 4, generator=generator)
    (data,) = pool.tensors
    data.copy_(before)
    pool.keep(1, [0, 2, 5, 6])
    assert pool.lengths == [3, 6, 5]
    expected = before.clone()
    for place, node in enumerate([0, 2, 5, 6]):
        expected[:, :, 1, :, 2 + place] = before[:, :, 1, :, 2 + node]
    assert torch.equal(data[:, :, 1, :, :6], expected[:, :, 1, :, :6])
    assert torch.equal(data[:, :, [0, 2]], before[:, :, [0, 2]])
