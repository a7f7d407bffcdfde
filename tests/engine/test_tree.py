"""Trees: ancestors, static trees cut into passes, and a cache that keeps accepted paths."""

from itertools import pairwise

import pytest
import torch

from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.tree import Topology, chain
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
def test_every_node_takes_its_token_from_its_own_path(name, k):
    """Redo by hand which pass, path, depth and rank each node takes its token from."""
    paths = load_tree_paths(name)
    tree = StaticTree(paths, k)
    assert len(tree.passes) == -(-max(map(len, paths)) // k)
    expanded = [
        sorted({path[: number * k] for path in paths if len(path) > number * k})
        for number in range(len(tree.passes))
    ]
    ranked = [  # of every ranked token: the path expanded, the depth, the rank
        (path, len(path) + offset + 1, rank)
        for own, plan in zip(expanded, tree.passes, strict=True)
        for path in own
        for offset in range(k)
        for rank in range(plan.width)
    ]
    assert sorted(tree.paths) == sorted(paths)
    for node, path in enumerate(tree.paths, start=1):
        parent = tree.topology.parents[node]
        assert path[:-1] == (tree.paths[parent - 1] if parent else ())
        source, depth, rank = ranked[tree.choices[node - 1]]
        assert (path[: len(source)], len(path), path[-1]) == (source, depth, rank)
        assert len(path) - len(source) <= k


@pytest.mark.parametrize("name", known_trees())
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_pass_reads_the_blocks_of_its_paths_and_sees_their_ancestors(name, k):
    paths = load_tree_paths(name)
    passes, keys = StaticTree(paths, k).passes, []
    before = [()]
    for number, (last, plan) in enumerate(pairwise(passes), start=1):
        own = sorted({path[: number * k] for path in paths if len(path) > number * k})
        assert [before[parent] for parent in plan.parents] == [path[:-k] for path in own]
        tokens = zip(plan.parents.repeat_interleave(k).tolist(), plan.blocks.tolist(), strict=True)
        for place, (parent, token) in enumerate(tokens):
            source, rank = divmod(token, last.width)
            assert source == parent * k + place % k
            assert rank == own[place // k][(number - 1) * k + place % k]
        keys += own
        for row, path in enumerate(own):
            expected = [path[: len(key)] == key for key in keys for _ in range(k)]
            for place in range(k):
                assert plan.visible[row * k + place].tolist() == expected
        before = own


@pytest.mark.parametrize("name", known_trees())
def test_the_most_probable_path_is_a_prefix_of_the_nodes(name):
    tree = StaticTree(load_tree_paths(name), 2)
    depth = max(len(path) for path in tree.paths if set(path) == {0})
    assert tree.topology.parents[: depth + 1] == chain(depth).parents


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
