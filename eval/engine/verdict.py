"""What the target says after every node of a draft, and which nodes are accepted for it.

Shapes: N packed tokens, M verified nodes of all rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from specdraft.eval.engine.accept import RULES, Accepted, walk
from specdraft.eval.engine.batch import RowInput
from specdraft.eval.engine.request import GUMBEL, Request
from specdraft.eval.engine.sampling import SeededChance, most_probable, sample, warp
from specdraft.eval.engine.timing import Stopwatch, Timing
from specdraft.eval.engine.transfer import download


class Verdict(NamedTuple):
    """The target's answer on one row's tree."""

    tokens: list[int]  # of the nodes, the root included
    argmax: list[int]  # after each node
    logits: Tensor | None  # [nodes, V] on the host; None where argmax says all
    probs: Tensor | None  # that the tree was drawn from, on the host; None: it was not


def verdicts(
    inputs: Sequence[RowInput], ids: Tensor, logits: Tensor, timing: Timing
) -> list[Verdict | None]:
    """Bring to the host what the target says, given packed ids [N] and logits [M, V].

    None for a row whose prompt is not read to its end. Only rows that sample, or whose logits are
    processed, need logits there.
    """
    if not any(one.verified for one in inputs):
        return [None] * len(inputs)
    wanted = [most_probable(logits), ids]
    for one in inputs:
        if one.verified and _needs_logits(one.row.request):
            wanted.append(logits[one.verified])
            if one.tree.draws:
                wanted.append(one.tree.draws.probs)
    # The one synchronisation of the step; on CUDA the host waits here for the forward.
    with Stopwatch() as wait:
        argmax, tokens, *rest = download(*wanted)
    timing.verify += wait.seconds
    argmax, tokens, found = argmax.tolist(), tokens.tolist(), []
    for one in inputs:
        if not one.verified:
            found.append(None)
            continue
        law = probs = None
        if _needs_logits(one.row.request):
            law, probs = rest.pop(0), rest.pop(0) if one.tree.draws else None
        found.append(Verdict(tokens[one.root : one.stop], argmax[one.verified], law, probs))
    return found


def _needs_logits(request: Request) -> bool:
    return request.temperature > 0 or request.process is not None


def accept(one: RowInput, verdict: Verdict | None) -> tuple[list[int], list[int]]:
    """The accepted nodes, the root first, and the tokens committed for it: theirs, the bonus last.

    Of a part of a prompt the root alone, and no token.
    """
    if verdict is None:
        return [0], []
    if one.row.request.temperature > 0:
        path, bonus = _accept_sampled(one, verdict)
    else:
        path, bonus = walk(one.tree.topology, verdict.tokens, partial(_argmax, one, verdict))
    return path, [verdict.tokens[node] for node in path[1:]] + [bonus]


def _argmax(one: RowInput, verdict: Verdict, node: int) -> int:
    if verdict.logits is None:
        return verdict.argmax[node]
    return int(most_probable(_processed(one, verdict, node)))


def _processed(one: RowInput, verdict: Verdict, node: int) -> Tensor:
    """The logits [V] after a node, as the request's processing leaves them."""
    row, logits = one.row, verdict.logits[node]
    if row.request.process is None:
        return logits
    drafted = [verdict.tokens[place] for place in one.tree.topology.path(node)]
    return row.request.process([*row.request.prompt, *row.tokens, *drafted], logits)


def _accept_sampled(one: RowInput, verdict: Verdict) -> Accepted:
    """Apply the request's rule."""
    request, tree, length = one.row.request, one.tree, one.row.num_committed_tokens
    warping = (request.temperature, request.top_k, request.top_p)
    if request.rule == GUMBEL:

        def seeded(node: int) -> int:
            position = length + tree.topology.depths[node]
            return sample(_processed(one, verdict, node), position, request.seed, *warping)

        return walk(tree.topology, verdict.tokens, seeded)

    def p(node: int) -> Tensor:
        return warp(_processed(one, verdict, node), *warping).double().softmax(-1)

    # Nothing drafted: any rule only has the bonus to draw.
    name = request.rule if len(tree.topology) > 1 else "walk"
    if verdict.probs is not None:
        tree = tree._replace(draws=replace(tree.draws, probs=verdict.probs))
    chance = SeededChance(request.seed, length)
    return RULES[name].rule(tree, verdict.tokens, p, chance)
