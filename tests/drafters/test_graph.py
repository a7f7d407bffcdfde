"""Token graphs: which nodes are merged, that there are no cycles, and the tree they stand for."""

import random
from collections import Counter

import pytest

from specdraft.eval.drafters.token_graph import TokenGraph

CONTEXT = [0, 2, 1, 0, 1]


class Naive:
    """The definitions, by searching anew each time."""

    def __init__(self, context, tau):
        self.context, self.tau = context, tau
        self.parents, self.tokens, self.shared, self.offered = [-1], [context[-1]], [-1], []

    def text(self, node):
        if node == 0:
            return tuple(self.context)
        return (*self.text(self.parents[node]), self.tokens[node])

    def edges(self, node):
        children = [n for n, parent in enumerate(self.parents) if parent == node]
        return children + [self.shared[node]] * (self.shared[node] >= 0)

    def leads_to(self, start, end):
        seen, waiting = set(), [start]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += self.edges(node)
        return end in seen

    def merge(self, node):
        text = self.text(node)
        if len(text) < self.tau:
            return False
        gram = text[len(text) - self.tau :]
        for other in self.offered:
            theirs = self.text(other)
            same = len(theirs) >= self.tau and theirs[len(theirs) - self.tau :] == gram
            if same and not self.leads_to(other, node):
                self.shared[node] = other
                return True
        self.offered.append(node)
        return False

    def texts(self, node=0, before=(), most=4000):
        """Every text that can be read from the root, as often as it occurs."""
        found = [before]
        follow = self.shared[node] if self.shared[node] >= 0 else node
        for child, parent in enumerate(self.parents):
            if parent == follow and len(found) < most:
                found += self.texts(child, (*before, self.tokens[child]), most)
        return found


def grown(seed: int, tau: int) -> tuple[TokenGraph, Naive]:
    """A graph and its naive version, grown by the same random levels over few tokens."""
    chance = random.Random(seed)
    graph, naive = TokenGraph(CONTEXT[5 - max(tau, 1) :], tau), Naive(CONTEXT, tau)
    opened = [0]
    for _ in range(chance.randint(2, 5)):
        following = []
        for parent in opened:
            for token in chance.sample(range(3), chance.randint(1, 3)):
                node = graph.add(parent, token)
                naive.parents.append(parent)
                naive.tokens.append(token)
                naive.shared.append(-1)
                if chance.random() < 0.8:  # else pruned
                    merged = graph.merge(node)
                    assert merged == naive.merge(node)
                    following += [] if merged else [node]
        opened = following[:12]
    return graph, naive


@pytest.mark.parametrize("tau", range(5))
def test_nodes_are_merged_as_defined_and_never_form_a_cycle(tau):
    merges = circles = 0
    for seed in range(60):
        graph, naive = grown(seed, tau)
        assert graph.shared == naive.shared
        for node, first in enumerate(graph.shared):
            if first >= 0:
                merges += 1
                assert not naive.leads_to(first, node)
                # Excluding a node's own path is not enough: other nodes may lead back to it.
                circles += any(
                    naive.leads_to(other, node) and other not in _ancestors(naive, node)
                    for other in naive.offered
                )
    assert merges > (100 if tau < 4 else 5)
    assert circles or tau not in (1, 2)


def _ancestors(naive: Naive, node: int) -> list[int]:
    return [] if node < 0 else [node, *_ancestors(naive, naive.parents[node])]


def test_two_siblings_that_follow_each_other_are_merged_in_one_direction_only():
    graph = TokenGraph([9], tau=1)
    a, b = graph.add(0, 5), graph.add(0, 6)
    assert not graph.merge(a)
    assert not graph.merge(b)
    ab, ba = graph.add(a, 6), graph.add(b, 5)
    assert graph.merge(ab)
    assert not graph.merge(ba)  # or the text would be 5 6 5 6 5 ..
    assert graph.shared == [-1, -1, -1, b, -1]


@pytest.mark.parametrize("tau", range(5))
def test_the_unmerged_tree_holds_every_text_of_the_graph_once(tau):
    compared = 0
    for seed in range(60):
        graph, naive = grown(seed, tau)
        expected = naive.texts()
        if len(expected) >= 4000:
            continue
        tree = graph.unmerge(10_000)
        texts = [()]
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            texts.append((*texts[parent], token))
        assert Counter(texts) == Counter(expected)
        assert len(set(texts)) == len(texts)
        assert tree.origins[: len(graph)] == [*range(len(graph))]
        compared += len(texts) > len(graph)
    assert compared > (20 if tau < 3 else 0)


def test_unmerging_adds_at_most_limit_copies_in_breadth_first_order():
    for seed in range(30):
        graph, _ = grown(seed, 2)
        whole = graph.unmerge(10_000)
        for limit in (0, 1, 3, 10):
            tree = graph.unmerge(limit)
            size = min(len(graph) + limit, len(whole.parents))
            assert tree.parents == whole.parents[:size]
            assert tree.tokens == whole.tokens[:size]
        generations = [0] * len(whole.parents)
        for node in range(len(graph), len(whole.parents)):
            generations[node] = generations[whole.parents[node]] + 1
        assert generations == sorted(generations)


def test_a_merged_node_has_no_children_and_a_graph_needs_a_root():
    graph = TokenGraph([9], tau=1)
    nodes = [graph.add(0, 5), graph.add(0, 6)]
    assert [graph.merge(node) for node in nodes] == [False, False]
    again = graph.add(nodes[0], 6)
    assert graph.merge(again)
    with pytest.raises(ValueError, match="node 3 shares the successors of node 2"):
        graph.add(again, 1)
    with pytest.raises(ValueError, match="a root and tau >= 0"):
        TokenGraph([], tau=1)
