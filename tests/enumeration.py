"""Prove an acceptance rule by enumerating every branch of drafts, decisions and bonus tokens.

A text is a tuple of token ids; `p` and `q` map every short text to a distribution [V].
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from specdraft.eval.engine.accept import Chance, Rule
from specdraft.eval.engine.tree import Draws, Topology, Tree

Text = tuple[int, ...]
Laws = dict[Text, Tensor]
Result = TypeVar("Result")
ROOT = -7  # the token of the root, which no rule may read


Shares = list[tuple[int, float]]  # possible results with their probabilities


class Branch:
    """A `Chance` that plays a single branch: the choices of a script, then always the first option.

    options: of every choice in the script, known from the branch before, which made the same ones.
    """

    def __init__(self, script: list[int], options: list[Shares]):
        self.script, self.options, self.number, self.weight = script, options, 0, 1.0

    def choice(self, probs: Tensor) -> int:
        if self.number == len(self.options):
            whole, shares = float(probs.sum()), probs.tolist()
            assert all(share >= 0 for share in shares)  # false for NaN, too
            found = [(index, share / whole) for index, share in enumerate(shares) if share > 0]
            self.options.append(found)
        return self._take()

    def accept(self, prob: float) -> bool:
        assert 0 <= prob <= 1
        if self.number == len(self.options):
            shares = ((True, prob), (False, 1 - prob))
            self.options.append([(answer, share) for answer, share in shares if share > 0])
        return self._take()

    def _take(self) -> int:
        if self.number == len(self.script):
            self.script.append(0)
        value, share = self.options[self.number][self.script[self.number]]
        self.number += 1
        self.weight *= share
        return value


def branches(play: Callable[[Chance], Result]) -> Iterator[tuple[Result, float]]:
    """Run `play` once per branch, depth first; yield its result and the branch's probability."""
    script: list[int] = []
    options: list[Shares] = []
    while True:
        branch = Branch(script, options)
        yield play(branch), branch.weight
        assert branch.number == len(script)
        while script and script[-1] + 1 == len(options[-1]):
            script.pop()
            options.pop()
        if not script:
            return
        script[-1] += 1


class DrawnTokens(Sequence):
    """The tokens of a tree, a node's children drawn through `chance` when first read.

    So tokens that a rule never reads cause no branches, and a rule that reads too far is still
    enumerated correctly. If fewer tokens have a probability than siblings are needed, the smallest
    other ids follow.
    """

    def __init__(self, topology: Topology, how: str, q: Laws, chance: Chance):
        self.topology, self.how, self.q, self.chance = topology, how, q, chance
        self.known = {0: ROOT}

    def __len__(self) -> int:
        return len(self.topology)

    def __getitem__(self, node: int) -> int:
        if node not in self.known:
            self._draw(self.topology.parents[node])
        return self.known[node]

    def text(self, node: int) -> Text:
        return (*self.text(self.topology.parents[node]), self[node]) if node else ()

    def _draw(self, parent: int) -> None:
        left, drawn = self.q[self.text(parent)].clone(), []
        for child in self.topology.children[parent]:
            others = (token for token in range(len(left)) if token not in drawn)
            drawn.append(self.chance.choice(left) if left.any() else next(others))
            self.known[child] = drawn[-1]
            if self.how == "without_replacement":
                left[drawn[-1]] = 0


class Rows(Sequence):
    """The row of q, in the order of its texts, that the children of each node are drawn from."""

    def __init__(self, tokens: DrawnTokens, order: dict[Text, int]):
        self.tokens, self.order = tokens, order

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, node: int) -> int:
        return self.order[self.tokens.text(node)]


Drafting = Callable[[Chance], tuple[Tree, Sequence[int]]]


def drawn(topology: Topology, how: str, q: Laws, claim: str | None = None) -> Drafting:
    """A draft whose siblings are drawn from q; `claim`: the way of drawing that it states."""
    laws, order = torch.stack(list(q.values())), {text: row for row, text in enumerate(q)}

    def draft(chance: Chance) -> tuple[Tree, Sequence[int]]:
        tokens = DrawnTokens(topology, how, q, chance)
        draws = Draws(claim or how, laws, Rows(tokens, order))
        # Rules read the tokens on the host that the decoder gives them, not those of the tree.
        return Tree(topology, torch.empty(0), draws), tokens

    return draft


@dataclass(frozen=True)
class Played:
    """The result of a rule over all branches."""

    law: dict[Text, float]  # of emitted tokens with the bonus
    accepted: float  # expected number of accepted tokens
    drafted: float  # expected number of drafted tokens


def play(rule: Rule, draft: Drafting, p: Laws) -> Played:
    """Enumerate a rule over a draft; check its path, and that it reads p only along it."""
    law, accepted, drafted = defaultdict(float), 0.0, 0.0

    def once(chance: Chance) -> tuple[Text, int, int]:
        tree, tokens = draft(chance)
        parents, asked = tree.topology.parents, []

        def text(node: int) -> Text:
            return (*text(parents[node]), tokens[node]) if node else ()

        def target(node: int) -> Tensor:
            asked.append(node)
            return p[text(node)]

        path, bonus = rule(tree, tokens, target, chance)
        assert [parents[node] for node in path] == [-1, *path[:-1]]
        # Block verification reads the whole chain before it decides; no p is read twice.
        assert asked == path or (tree.topology.is_chain and asked == [*range(len(asked))])
        return (*text(path[-1]), bonus), len(path) - 1, len(parents) - 1

    for (emitted, count, nodes), weight in branches(once):
        law[emitted] += weight
        accepted += weight * count
        drafted += weight * nodes
    return Played(dict(law), accepted, drafted)


def law_error(law: dict[Text, float], p: Laws, length: int) -> float:
    """Largest error in the distribution of `length` tokens: emitted ones, then the target's own."""
    worst = 0.0
    for text in itertools.product(range(len(p[()])), repeat=length):
        says = [float(p[text[:n]][text[n]]) for n in range(length)]
        ours, own = 0.0, 1.0
        for n in range(length, -1, -1):
            ours += law.get(text[:n], 0.0) * own
            own *= says[n - 1] if n else 1.0
        worst = max(worst, abs(ours - own))
    return worst


def random_laws(kind: str, vocab: int, length: int, seed: int = 7) -> tuple[Laws, Laws]:
    """Random p and q, of some kind, after every text shorter than `length`.

    If p > q for only one token, every rejection ends there and most mistakes give the right result
    by accident (with seed 0, say); test_accept_mistakes.py shows that seed 7 reveals them.
    """
    generator = torch.Generator().manual_seed(seed)
    p, q = {}, {}
    for size in range(length):
        for text in itertools.product(range(vocab), repeat=size):
            p[text], q[text] = KINDS[kind](torch.randn(2, vocab, generator=generator).double())
    return p, q


def _some_zeros(noise: Tensor) -> tuple[Tensor, Tensor]:
    """p on its two best tokens, as after top-k; q without its worst token."""
    p, q = (3 * noise).softmax(-1)
    p = p.masked_fill(p < p.topk(2).values[-1], 0)
    q = q.masked_fill(q == q.min(), 0)
    return p / p.sum(), q / q.sum()


def _disjoint(noise: Tensor) -> tuple[Tensor, Tensor]:
    p, q = noise.softmax(-1)
    p[0], q[1:] = 0, 0
    return p / p.sum(), q / q.sum()


KINDS = {
    "alike": lambda noise: tuple((noise[0] + 0.5 * noise).softmax(-1)),
    "mismatched": lambda noise: tuple((4 * noise).softmax(-1)),
    "equal": lambda noise: (noise[0].softmax(-1),) * 2,
    "some zeros": _some_zeros,
    "disjoint": _disjoint,
}
