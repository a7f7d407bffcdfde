"""Drafters of one target beside each other: decoded in turns, with what each cost to train.

Each drafts as its own run does; prompts, lengths, temperature and rows are the same for all, and so
are the answers. The advice is a sentence that the figures say themselves.
"""

from collections.abc import Sequence
from dataclasses import replace

from specdraft.data.prompts import Prompt
from specdraft.eval.comparing.contestants import Contestant
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import REFERENCE, measure_entrants
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.report import SCHEMA
from specdraft.models.target import Target

NEAR = 0.95  # of the fastest one's speed: near enough for an advice to tell of


def race(
    entered: Sequence[Contestant],
    target: Target,
    prompts: Sequence[Prompt],
    left_out: dict[str, str],
) -> dict:
    """Decode all prompts by all; return a report as of a benchmark, whose methods are drafters.

    `contestants` says what each is and cost, `advice` what follows.
    """
    first = entered[0].recipe
    plain = replace(entered[0], name=REFERENCE, method=REFERENCE)
    with cpu_threads(first.eval.threads):
        prompts = expand_turns(first, target, prompts)
        _, *measured = measure_entrants([plain, *entered], target, prompts, tolerant=True)
        where = environment(target)
    rows, contestants = [], []
    for one, done in zip(entered, measured, strict=True):
        reference, row = done.rows()
        rows = [*(rows or [reference]), row | {"method": one.name}]
        facts = {"drafted_per_second": _drafted_per_second(done.outcomes[one.method])}
        contestants.append(one.facts() | facts)
    best = max(rows[1:], key=lambda row: (not row["failures"], row.get("speedup") or 0.0))
    recipe = replace(first, name=f"compare_{first.target.model.replace('/', '_')}")
    return {
        "schema": SCHEMA,
        "recipe": recipe.to_dict(),
        "target": target.name,
        "environment": where,
        "fit": None,
        "runs": rows,
        "samples": [],
        "headline": best["method"],
        "contestants": contestants,
        "left_out": left_out,
        "advice": advice(rows, contestants),
    }


def _drafted_per_second(parts: Sequence[Outcome]) -> float | None:
    """Drafted nodes over the time in a drafter's own models; None where none was measured."""
    seconds = sum(part.drafter_seconds for part in parts)
    steps = (step for part in parts for done in part.completions for step in done.steps)
    return sum(step.drafted for step in steps) / seconds if seconds else None


def advice(rows: Sequence[dict], contestants: Sequence[dict]) -> str:
    """Say in a sentence which of them to take, by their speeds and what they cost to train."""
    whole = [row for row in rows[1:] if not row.get("failures")]
    speed = {row["method"]: row["speedup"] for row in whole if row.get("speedup")}
    if not speed:
        return "None of them decoded all prompts: see what failed."
    cost = {one["name"]: one["training_minutes"] for one in contestants}
    best = max(speed, key=speed.get)
    if speed[best] <= 1:
        return (
            f"None of these is faster than plain decoding here ({best} comes nearest, at "
            f"{speed[best]:.2f} x): decode plainly, or measure with other rows, or elsewhere."
        )
    told = f"Take {best}: {speed[best]:.2f} x plain decoding{_trained(cost[best])}"
    near = [name for name in speed if name != best and speed[name] >= NEAR * speed[best]]
    cheaper = [n for n in near if cost[best] and cost[n] is not None and cost[n] < cost[best]]
    if cheaper:
        other = min(cheaper, key=cost.get)
        return (
            f"{told}; {other} has {speed[other] / speed[best]:.0%} of that{_trained(cost[other])}."
        )
    if near:
        others = f"{', '.join(near)} within {1 - NEAR:.0%} of that"
        if all(cost[name] is not None for name in (best, *near)):
            others += " cost no less"
        return f"{told}; {others}."
    return f"{told}; no other comes within {1 - NEAR:.0%} of that."


def _trained(minutes: float | None) -> str:
    return "" if minutes is None else f" after {minutes:.1f} minutes of training"
