"""What the target says after every node of a draft, and which nodes are accepted for it.

Shapes: N packed tokens, M verified nodes of all rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from specdraft.eval.engine.accept import RULES, Accepted, walk
from specdraft.eval.engine.batch import RowInput
from specdraft.eval.engine.request import GUMBEL
from specdraft.eval.engine.sampling import SeededChance, most_probable, sample, warp
from specdraft.eval.engine.timing import Stopwatch, Timing
from specdraft.eval.engine.transfer import download


class Verdict(NamedTuple):
    """The target's answer on one row's tree."""

    tokens: list[int]  # of the nodes, the root included
    argmax: list[int]  # after each node
    logits: Tensor | None  # [nodes, V] on the host; None for a greedy request
    probs: Tensor | None  # that the tree was drawn from, on the host; None: it was not


def verdicts(
    inputs: Sequence[RowInput], ids: Tensor, logits: Tensor, timing: Timing
) -> list[Verdict | None]:
    """Bring to the host what the target says, given packed ids [N] and logits [M, V].

    None for a row whose prompt is not read to its end. Only rows that sample need logits there.
    """
    verified = [one for one in inputs if one.is_verified]
    if not verified:
        return [None] * len(inputs)
    sampled = [one for one in verified if one.row.request.temperature > 0]
    drawn = [one for one in sampled if one.tree.draws]
    wanted = [most_probable(logits), ids, *(logits[one.nodes] for one in sampled)]
    wanted += [one.tree.draws.probs for one in drawn]
    # The one synchronisation of the step; on CUDA the host waits here for the forward.
    with Stopwatch() as wait:
        argmax, tokens, *rest = download(*wanted)
    timing.verify += wait.seconds
    argmax, tokens = argmax.tolist(), tokens.tolist()
    logits_of = {one.row.slot: part for one, part in zip(sampled, rest, strict=False)}
    probs_of = {one.row.slot: part for one, part in zip(drawn, rest[len(sampled) :], strict=True)}
    return [
        Verdict(
            tokens[one.root : one.stop],
            argmax[one.nodes],
            logits_of.get(one.row.slot),
            probs_of.get(one.row.slot),
        )
        if one.is_verified
        else None
        for one in inputs
    ]


def accept(one: RowInput, verdict: Verdict | None) -> tuple[list[int], list[int]]:
    """The accepted nodes, the root first, and the tokens committed for it: theirs, the bonus last.

    Of a part of a prompt the root alone, and no token.
    """
    if verdict is None:
        return [0], []
    path, bonus = _accept(one, verdict)
    return path, [*(verdict.tokens[node] for node in path[1:]), bonus]


def _accept(one: RowInput, verdict: Verdict) -> Accepted:
    """Apply the request's rule."""
    request, tree, length = one.row.request, one.tree, one.row.num_committed_tokens
    if verdict.logits is None:
        return walk(tree.topology, verdict.tokens, verdict.argmax.__getitem__)
    warping = (request.temperature, request.top_k, request.top_p)
    if request.rule == GUMBEL:

        def seeded(node: int) -> int:
            position = length + tree.topology.depths[node]
            return sample(verdict.logits[node], position, request.seed, *warping)

        return walk(tree.topology, verdict.tokens, seeded)

    def p(node: int) -> Tensor:
        return warp(verdict.logits[node], *warping).double().softmax(-1)

    # Nothing drafted: any rule only has the bonus to draw.
    name = request.rule if len(tree.topology) > 1 else "walk"
    if verdict.probs is not None:
        tree = tree._replace(draws=replace(tree.draws, probs=verdict.probs))
    chance = SeededChance(request.seed, length)
    return RULES[name].rule(tree, verdict.tokens, p, chance)
