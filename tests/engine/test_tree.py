"""Trees: ancestors, static trees split into passes, and a cache that keeps accepted paths."""

from itertools import pairwise

import pytest
import torch

from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.tree import Topology, chain
from specdraft.recipes.static_trees import known_trees, load_tree_paths


def test_ancestors_and_depths_equal_those_found_by_following_parents():
    topology = Topology([-1, 0, 0, 1, 2, 2, 4])
    for node in range(7):
        climbed, at = {node}, node
        while topology.parents[at] >= 0:
            at = topology.parents[at]
            climbed.add(at)
        assert set(topology.ancestors[node].nonzero().flatten().tolist()) == climbed
        assert topology.depths[node] == len(climbed) - 1


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 3]])
def test_a_topology_needs_a_root_and_parents_before_children(parents):
    with pytest.raises(ValueError, match=r"root|parents come first"):
        Topology(parents)


def test_a_chain_is_recognised_as_one():
    assert chain(3).parents == (-1, 0, 1, 2)
    assert chain(3).is_chain
    assert not Topology([-1, 0, 0]).is_chain


def followed(tree: StaticTree) -> list[dict]:
    """Follow a plan pass by pass: the paths expanded, the distributions (the path each expands,
    and its known tokens of the next block) and the ranked tokens (distribution and rank)."""
    k, passes = tree.block_size, []
    for number, plan in enumerate(tree.passes):
        own = sorted({path[: number * k] for path in tree.paths if len(path) > number * k})
        drawn, ranked, earlier = [], [], (0, 0)
        for part in plan.rounds:
            first = len(drawn), len(ranked)
            for n, slot in enumerate(part.slots.tolist()):
                path, known = own[slot // k], slot % k
                if tree.coupled:
                    known = ()
                    if part.before is not None:
                        came_from, rank = ranked[earlier[1] + int(part.tokens[n])]
                        assert came_from == earlier[0] + part.before[n]  # drawn from that slot
                        assert drawn[came_from][0] == path
                        known = (*drawn[came_from][1], rank)
                    assert len(known) == slot % k
                assert part.depth <= part.depths[n] == len(path) + slot % k + 1
                drawn.append((path, known))
            size = part.width
            ranked += [(first[0] + n, r) for n in range(len(part.slots)) for r in range(size)]
            earlier = first
        passes.append({"own": own, "drawn": drawn, "ranked": ranked, "plan": plan})
    return passes


def fits(path: tuple, drawn: tuple, rank: int, k: int) -> bool:
    """Whether a path's last token is the one of this rank in a drawn distribution."""
    start, known = drawn
    within = path[len(start) : -1]
    told = known == (within if isinstance(known, tuple) else len(within))
    return told and path[: len(start)] == start and path[-1] == rank and len(within) < k


every_plan = pytest.mark.parametrize("coupled", [False, True], ids=["alone", "coupled"])


@every_plan
@pytest.mark.parametrize("name", known_trees())
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_node_takes_its_token_from_the_distribution_of_its_own_path(name, k, coupled):
    paths = load_tree_paths(name)
    tree = StaticTree(paths, k, coupled)
    assert len(tree.passes) == -(-max(map(len, paths)) // k)
    drawn, ranked = [], []
    for each in followed(tree):
        ranked += [(len(drawn) + number, rank) for number, rank in each["ranked"]]
        drawn += each["drawn"]
    assert sorted(tree.paths) == sorted(paths)
    assert len(set(drawn)) == len(drawn)
    for node, path in enumerate(tree.paths, start=1):
        parent = tree.topology.parents[node]
        assert path[:-1] == (tree.paths[parent - 1] if parent else ())
        number, rank = ranked[tree.choices[node - 1]]
        assert fits(path, drawn[number], rank, k)
        assert tree.sources[parent] == number
    leaves = [node for node, children in enumerate(tree.topology.children) if not children]
    assert {tree.sources[node] for node in leaves} == {-1}


@every_plan
@pytest.mark.parametrize("name", known_trees())
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_pass_reads_the_blocks_of_its_paths_and_sees_their_ancestors(name, k, coupled):
    passes, keys = followed(StaticTree(load_tree_paths(name), k, coupled)), []
    for last, this in pairwise(passes):
        own, plan = this["own"], this["plan"]
        assert [last["own"][parent] for parent in plan.parents] == [path[:-k] for path in own]
        read = zip(plan.blocks.tolist(), plan.features.tolist(), strict=True)
        for place, (token, feature) in enumerate(read):
            number, rank = last["ranked"][token]
            assert number == feature  # the feature whose distribution gave the token
            path = own[place // k]
            assert fits(path[: len(path) - k + place % k + 1], last["drawn"][number], rank, k)
        keys += own
        for row, path in enumerate(own):
            expected = [path[: len(key)] == key for key in keys for _ in range(k)]
            for place in range(k):
                assert plan.visible[row * k + place].tolist() == expected


@pytest.mark.parametrize("name", known_trees())
def test_the_most_probable_path_is_a_prefix_of_the_nodes(name):
    tree = StaticTree(load_tree_paths(name), 2)
    depth = max(len(path) for path in tree.paths if set(path) == {0})
    assert tree.topology.parents[: depth + 1] == chain(depth).parents


def test_a_path_whose_parent_is_missing_is_refused():
    with pytest.raises(ValueError, match=r"\[1, 0\] has no parent \[1\]"):
        StaticTree([(0,), (1, 0)], 2)


def test_keeping_an_accepted_path_moves_its_slots_and_touches_no_other_row():
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
