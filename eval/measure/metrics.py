"""What is measured of a method, defined once. Sums are formed first, ratios last.

A step is one target forward for one row; the prompt's own forward is a step that verifies an empty
draft. Every step emits one bonus token, so `tokens_per_step` is 1 for plain decoding and
`accepted_per_step` is `tokens_per_step - 1`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdraft.eval.engine.request import Step
from specdraft.eval.engine.tree import Topology
from specdraft.eval.measure.outcome import Outcome

NODES = 128  # of a tree that a report tells of


@dataclass(frozen=True)
class Costs:
    """What a drafter forward costs, as a share of a target forward."""

    by_parameters: float
    measured: float | None  # on this machine, against a plain step; None without a plain run


def counts(outcomes: Sequence[Outcome], costs: Costs) -> dict:
    """The figures of one method over all its batches, without wall-clock."""
    completions = [done for outcome in outcomes for done in outcome.completions]
    steps = [step for done in completions for step in done.steps]
    tokens = sum(len(done.tokens) for done in completions)
    forwards = sum(outcome.drafter_forwards for outcome in outcomes)
    ratio = tokens / len(steps)
    accepted, drafted_depth = sum(s.accepted for s in steps), sum(s.depth for s in steps)

    def of_drafts(counted: Iterable[int]) -> float | None:
        known = drafted_depth or not accepted  # transformers tells of no draft
        return sum(counted) / len(steps) if known else None

    return {
        "outputs": len(completions),
        "tokens": tokens,
        "steps": len(steps),
        "tokens_per_step": ratio,
        "accepted_per_step": ratio - 1,
        "acceptance_rate": (ratio - 1) / ratio,
        "acceptance_by_depth": acceptance_by_depth(steps),
        "accepted_by_depth": accepted_by_depth(steps),
        "acceptance_by_node": acceptance_by_node(steps),
        "matchness": accepted / drafted_depth if drafted_depth else None,
        "graph_success": of_drafts(step.copied > 0 for step in steps),
        "drafted_per_step": of_drafts(step.drafted - step.copies for step in steps),
        "verified_per_step": of_drafts(step.drafted for step in steps),
        "drafter_forwards_per_step": forwards / len(steps),
    } | _gains(tokens, steps, forwards, costs)


def _gains(tokens: int, steps: Sequence[Step], forwards: int, costs: Costs) -> dict:
    """Tokens over what they cost, in forwards of the target; forwards: of the drafter."""
    drafts, accepted = sum(step.depth > 0 for step in steps), sum(step.accepted for step in steps)

    def swi(cost: float | None) -> float | None:
        return None if cost is None else tokens / (len(steps) + forwards * cost)

    def ewif(cost: float | None) -> float | None:
        # Of drafts of one depth what Theorem 4.1 makes of its alphas; of any, what they bring.
        if cost is None or not drafts:
            return None
        return (drafts + accepted) / (drafts + forwards * cost)

    return {
        "swi_params": swi(costs.by_parameters),
        "swi_measured": swi(costs.measured),
        # What whole drafts would gain (Theorem 4.1); SWI counts prompts, short drafts, ends, too.
        "ewif_params": ewif(costs.by_parameters),
        "ewif_measured": ewif(costs.measured),
        "mbsu": tokens / len(steps) / (1 + costs.by_parameters * (forwards / len(steps))),
    }


def acceptance_by_depth(steps: Sequence[Step]) -> list[float]:
    """P(depth-d token accepted | depth d - 1 accepted), for d = 1, 2, ..., where drafted."""
    rates = []
    for depth in range(1, max((step.depth for step in steps), default=0) + 1):
        reached = [step for step in steps if step.depth >= depth and step.accepted >= depth - 1]
        if not reached:
            break
        rates.append(sum(step.accepted >= depth for step in reached) / len(reached))
    return rates


def accepted_by_depth(steps: Sequence[Step]) -> list[float]:
    """P(the first d tokens accepted), of all drafts however deep, for d = 1, 2, ...

    Where drafts are of several depths this is no product of `acceptance_by_depth`.
    """
    drafts = [step for step in steps if step.depth]
    most = max((step.accepted for step in drafts), default=0)
    counts = (sum(step.accepted >= depth for step in drafts) for depth in range(1, most + 1))
    return [count / len(drafts) for count in counts]


def acceptance_by_node(steps: Sequence[Step], limit: int = NODES) -> list[dict]:
    """How often the nodes of the drafted trees were drafted and accepted.

    A node is the path of sibling ranks that leads to it, as in a static tree. The `limit` nodes
    drafted most often, parents first; none where no tree is known.
    """
    shapes = Counter(step.parents for step in steps if step.parents)
    paths = {parents: Topology(parents).rank_paths for parents in shapes}
    drafted: Counter[tuple[int, ...]] = Counter()
    for parents, count in shapes.items():
        for path in paths[parents][1:]:
            drafted[path] += count
    accepted = Counter(paths[step.parents][node] for step in steps for node in step.path[1:])
    order = sorted(drafted, key=lambda path: (-drafted[path], len(path), path))[:limit]
    return [
        {"path": list(path), "drafted": drafted[path], "accepted": accepted[path]} for path in order
    ]


def times(outcomes: Sequence[Outcome], tokens: int) -> dict:
    """Wall-clock of one method: tokens per second, and milliseconds per forward of the target.

    The three phases sum to the whole: the drafter's own forwards, the target's own, and all else.
    Where batches were decoded again and again, the first of all batches are the first repeat.
    """
    seconds = sum(outcome.seconds for outcome in outcomes)
    draft = sum(outcome.drafter_seconds for outcome in outcomes)
    verify, forwards = _total(outcomes, "verify"), _total(outcomes, "forwards")
    phases = {"draft": draft, "verify": verify, "overhead": seconds - draft - verify}
    phases = {f"{name}_ms_per_step": 1e3 * value / forwards for name, value in phases.items()}
    repeats = zip(*(outcome.tries for outcome in outcomes), strict=True)
    speeds = [tokens / sum(tries) for tries in repeats]
    speeds = {"tokens_per_second": tokens / seconds, "tokens_per_second_repeats": speeds}
    return speeds | {"seconds": seconds} | phases


def padding(outcomes: Sequence[Outcome]) -> dict:
    """Pads per real token in inputs and in the cache, over all forwards; None where not ours."""
    inputs, cached = _total(outcomes, "inputs"), _total(outcomes, "cached")
    return {
        "padding_ratio_inputs": _total(outcomes, "input_pads") / inputs if inputs else None,
        "padding_ratio_kv": _total(outcomes, "cache_pads") / cached if cached else None,
    }


def ratio_variance(pairs: Sequence[tuple[float, float]]) -> float:
    """The variance of a ratio of two sums over independent pairs, two or more, by linearisation."""
    above, below = (sum(column) for column in zip(*pairs, strict=True))
    ratio, count = above / below, len(pairs)
    squares = sum((a - ratio * b) ** 2 for a, b in pairs)
    return squares * count / (count - 1) / below**2


def _total(outcomes: Sequence[Outcome], name: str) -> float:
    """The sum of a field of `Timing`."""
    return sum(getattr(outcome.timing, name) for outcome in outcomes)
