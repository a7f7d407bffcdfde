"""Which drafted tokens are accepted. Every rule here leaves the target's distribution unchanged.

A rule for trees only has to say which token follows a node; `walk` then follows the child that
holds it. Going on below a child that equals the emitted token is right whatever the reason for that
token, as long as the tokens below the child had no part in it.

    rule               drafts                 the token after a node
    walk               any                    the target's own: its argmax, or argmax(log p + G)
    sample_and_walk    any                    y ~ p
    recursive          without replacement    rejection; p becomes the residual, q loses the sibling
    multistep          i.i.d.                 rejection; p becomes the residual
    kseq               i.i.d.                 rejection against rho * q
    block              chain, drawn           decided for whole prefixes

Requests call `sample_and_walk` "walk"; `walk` itself serves greedy ones and "gumbel"
(eval/engine/verdict.py).

Shared-Gumbel walk: with noise G a pure function of (request seed, position), the walk emits exactly
what plain seeded sampling emits, whatever the drafter did. The other rules are exact in law: what
they emit is distributed as p, provided that the draft was drawn as its `Draws` say and that chance
is independent of it. `p` is the softmax of the logits after temperature, top-k and top-p, in this
order (that of transformers), for ratio, residual and bonus alike.

Shapes: V vocabulary. Probabilities are float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Literal, Protocol

import torch
from torch import Tensor

from specdraft.eval.engine.tree import Topology, Tree


class Chance(Protocol):
    """Where a rule's randomness comes from: seeded when decoding, enumerated in proofs."""

    def choice(self, probs: Tensor) -> int:
        """Draw an index in proportion to `probs` [V], never one of probability zero."""

    def accept(self, prob: float) -> bool:
        """Return true with probability `prob`."""


TargetProbs = Callable[[int], Tensor]  # node -> the target's warped ones after it, [V]
Accepted = tuple[list[int], int]  # accepted nodes, the root first, and the bonus token
# (tree, tokens of all nodes with the root's, p, chance); p is asked for visited nodes only, once.
Rule = Callable[[Tree, Sequence[int], TargetProbs, Chance], Accepted]


def walk(topology: Topology, tokens: Sequence[int], pick: Callable[[int], int]) -> Accepted:
    """Follow the target's own tokens through a drafted tree.

    tokens: of all nodes, the root included. pick(node): the token that follows the node; asked for
    accepted nodes only. Returns the accepted nodes, the root first, and the bonus token.
    """
    path, node, children = [0], 0, topology.children
    while True:
        wanted = pick(node)
        for child in children[node]:
            if tokens[child] == wanted:
                break
        else:
            return path, wanted
        path.append(node := child)


def sample_and_walk(tree: Tree, tokens: Sequence[int], p: TargetProbs, chance: Chance) -> Accepted:
    """Draw the target's token at every node and follow it: right for any draft.

    Accepts one of a node's candidates with the sum of their p, as rejection of point masses does.
    """
    return walk(tree.topology, tokens, lambda node: chance.choice(p(node)))


def _among_siblings(choose: Callable[[Tensor, Tensor, list[int], Chance], int]) -> Rule:
    """The rule for trees that `choose(p, q, siblings, chance)` makes: it names the token after a
    node with these drafted children."""

    @wraps(choose)
    def rule(tree: Tree, tokens: Sequence[int], p: TargetProbs, chance: Chance) -> Accepted:
        _check(choose.__name__, tree)

        def pick(node: int) -> int:
            law, siblings = p(node), [tokens[child] for child in tree.topology.children[node]]
            if not siblings:
                return chance.choice(law)
            return choose(law, tree.draws.after(node).to(law.device), siblings, chance)

        return walk(tree.topology, tokens, pick)

    return rule


@_among_siblings
def recursive(p: Tensor, q: Tensor, siblings: list[int], chance: Chance) -> int:
    """Recursive rejection sampling of siblings without replacement (RSD, Theorem 3.1)."""
    for token in siblings:
        if chance.accept(_ratio(p[token], q[token])):
            return token
        p, q = _residual(p, q), q.clone()
        q[token] = 0
        if not q.any():
            break  # nothing was left to draw: what else is drafted are candidates for the walk
        q /= q.sum()
    return chance.choice(p)


@_among_siblings
def multistep(p: Tensor, q: Tensor, siblings: list[int], chance: Chance) -> int:
    """Multi-step rejection of i.i.d. siblings (SpecInfer, Algorithm 2)."""
    for token in siblings:
        if chance.accept(_ratio(p[token], q[token])):
            return token
        p = _residual(p, q)
    return chance.choice(p)


@_among_siblings
def kseq(p: Tensor, q: Tensor, siblings: list[int], chance: Chance) -> int:
    """K-SEQ among i.i.d. siblings (SpecTr, Algorithm 2), with the smallest rho that is exact.

    The residual may fall on a sibling that was refused; the walk follows it, where the paper stops.
    """
    rho = _rho(p, q, len(siblings))
    for token in siblings:
        if chance.accept(_ratio(p[token], rho * q[token])):
            return token
    taken = torch.minimum(q, p / rho)  # law of one trial's accepted token, of mass beta
    beta = float(taken.sum())
    trials = (1 - (1 - beta) ** len(siblings)) / beta if beta > 0 else 0.0
    return chance.choice(_residual(p, taken * trials))


def block(tree: Tree, tokens: Sequence[int], p: TargetProbs, chance: Chance) -> Accepted:
    """Block verification of a drawn chain x_1..x_n (arXiv 2403.10444, Algorithm 2).

    With w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)) and S_i the sum of (w_i p - q)+ over what
    may follow x_i, a prefix of i < n tokens stands with probability S_i / (S_i + 1 - w_i), the
    whole chain with w_n. The longest that stands is accepted; the bonus comes from (w_i p - q)+.
    """
    _check("block", tree)
    weight, residuals, stands = 1.0, [], []
    for node in range(len(tree.topology) - 1):
        law, drafted, token = p(node), tree.draws.after(node), tokens[node + 1]
        drafted = drafted.to(law.device)
        excess = (weight * law - drafted).clamp(min=0)
        mass = float(excess.sum())
        residuals.append(excess if mass > 0 else law)
        stands.append(mass / (mass + (1.0 - weight)) if mass > 0 else 0.0)
        weight = _ratio(weight * law[token], drafted[token])
        if weight == 0:  # no longer prefix can stand: the target need not be asked about them
            break
    else:
        stands.append(weight)
    longest_first = range(len(stands) - 1, 0, -1)
    count = next((n for n in longest_first if chance.accept(stands[n])), 0)
    bonus = chance.choice(residuals[count] if count < len(residuals) else p(count))
    return [*range(count + 1)], bonus


def review(
    token: int, choice: int, p: float | None = None, q: float | None = None, leniency: float = 1.0
) -> bool:
    """Whether an inner model of a cascade lets a drafted token pass; if not, its choice stands.

    Its choice is its argmax or, under the noise that the target's will see, y ~ p: a review without
    leniency leaves p exactly. A lenient one also passes where leniency * p > q, the token's
    probabilities by this model and the one before it; q None: a copy, which has none (CS Drafting,
    arXiv 2312.11462). The target never reviews so. ValueError for a leniency below 1.
    """
    if not leniency >= 1:
        raise ValueError(f"leniency is {leniency}; allowed: 1 (exact) or more (lenient)")
    return token == choice or (leniency > 1 and q is not None and leniency * p > q)


@dataclass(frozen=True)
class RuleEntry:
    """A rule and the drafts it is exact for."""

    rule: Rule
    drafts: Literal["any", "without_replacement", "iid"]
    chain_only: bool = False


RULES = {
    "walk": RuleEntry(sample_and_walk, "any"),
    "recursive": RuleEntry(recursive, "without_replacement"),
    "multistep": RuleEntry(multistep, "iid"),
    "kseq": RuleEntry(kseq, "iid"),
    "block": RuleEntry(block, "iid", chain_only=True),
}


def _check(name: str, tree: Tree) -> None:
    """Raise ValueError unless the rule is exact for this draft."""
    needed, chain = RULES[name], tree.topology.is_chain
    if tree.draws is None:
        made = "deterministic candidates"
    elif needed.chain_only and not chain:
        made = "a tree with branches"
    elif tree.draws.how != needed.drafts and not chain:  # of a lone sample, both are true
        made = f"drawn {tree.draws.how}"
    else:
        return
    wanted = f"a {'chain' if needed.chain_only else 'tree'} drawn {needed.drafts}"
    raise ValueError(f"rule {name!r} needs {wanted}, not {made}; rule 'walk' takes any draft")


def _rho(p: Tensor, q: Tensor, count: int) -> float:
    """The smallest rho in 1..count that leaves no negative residual, by bisection.

    Those from some rho on do: where 1 - (1 - beta)^count <= rho * beta, beta = sum min(q, p / rho).
    The end returned is on their side: there the rule is exact, 1e-9 from the most it can accept.
    """

    def holds(rho: float) -> bool:
        beta = float(torch.minimum(q, p / rho).sum())
        return 1 - (1 - beta) ** count <= rho * beta

    low, high = 1.0, float(count)
    if holds(low):
        return low
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _ratio(p: Tensor | float, q: Tensor | float) -> float:
    """min(1, p / q); 0 where q is 0: such a token cannot have been drawn from q."""
    return min(1.0, float(p / q)) if q > 0 else 0.0


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+, normalised. p itself where nothing is left: then p = q, which refuses nothing."""
    rest = (p - q).clamp(min=0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p
