"""A measurement: prompts that methods have decoded in turns, and a row of figures per method.

The rows are `runs` of report.json; eval/report.md says what each of their keys means.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

from torch import nn

from specdraft.data.prompts import Prompt
from specdraft.eval.engine.request import GUMBEL, Completion, Request
from specdraft.eval.measure.categories import add_speedups, by_category, macro
from specdraft.eval.measure.failure import FaultTolerant, failures_of
from specdraft.eval.measure.identity import differences
from specdraft.eval.measure.methods import make_method
from specdraft.eval.measure.metrics import Costs, counts, padding, times
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.rounds import (
    Outcomes,
    Remember,
    batches,
    capacity_for,
    forget,
    take_turns,
)
from specdraft.eval.methods.registry import needs, rule_of, tree_of
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe

REFERENCE = "plain"  # what outputs are compared with
BASES = {"speedup": REFERENCE, "speedup_over_generate": "generate"}
NOT_COMPARED = {"identical": None, "near_ties": None, "differences": []}


@dataclass(frozen=True)
class Measurement:
    """Prompts, one per turn, as requests, and what methods have made of them, batch by batch."""

    recipe: Recipe
    target: Target
    trained: Trained
    prompts: Sequence[Prompt]
    requests: Sequence[Request]  # of the prompts
    outcomes: Outcomes

    def rows(self) -> list[dict]:
        """One row of figures per method: of all that it did, if not of all."""
        failed = [name for name in self.outcomes if any(p.failure for p in self.outcomes[name])]
        whole = self.of([name for name in self.outcomes if name not in failed])
        rows = {row["method"]: row for row in whole._figures()}
        bases = [name for name in BASES.values() if name in whole.outcomes]
        for name in failed:
            done = [n for n, part in enumerate(self.outcomes[name]) if not part.failure]
            some = self.of([*bases, name], done) if done else None
            nothing = self._setting(name) | {"outputs": 0} | NOT_COMPARED | {"categories": []}
            rows[name] = some._figures()[-1] if some else nothing
        return [rows[name] | failures_of(self.parts(name)) for name in self.outcomes]

    def of(self, names: Sequence[str], numbers: Collection[int] | None = None) -> "Measurement":
        """The measurement of some methods alone, on all batches or, among those of the last method,
        on the batches with these numbers."""
        outcomes = {name: self.outcomes[name] for name in names}
        if numbers is None:
            return replace(self, outcomes=outcomes)
        outcomes = {name: [parts[n] for n in numbers] for name, parts in outcomes.items()}
        taken = batches(names[-1], range(len(self.prompts)), self.recipe.eval.batch_size)
        left = [place for n in numbers for place in taken[n]]
        prompts, requests = [self.prompts[n] for n in left], [self.requests[n] for n in left]
        return replace(self, prompts=prompts, requests=requests, outcomes=outcomes)

    def parts(self, name: str) -> Iterable[tuple[Sequence[Prompt], Outcome]]:
        """Pairs of the prompts that a method was given at a time, and what became of them."""
        taken = batches(name, self.prompts, self.recipe.eval.batch_size)
        return zip(taken, self.outcomes[name], strict=True)

    def _figures(self) -> list[dict]:
        reference = self.outcomes.get(REFERENCE)
        rows = []
        for name, parts in self.outcomes.items():
            models = self.trained.networks(needs(name))
            share = parameter_share(parts, models, self.target.model)
            costs = Costs(share, measured_cost(parts, reference))
            row = self._setting(name) | self._identity(name) | counts(parts, costs) | padding(parts)
            row |= times(parts, row["tokens"]) | macro(self.prompts, parts)
            rows.append(row | {"categories": by_category(self.prompts, parts)})
        by_name = {row["method"]: row for row in rows}
        plain = by_name.get(REFERENCE)
        for row in rows:
            add_speedups(row, plain)
            row["speedup_repeats"] = repeat_speedups(row, plain)
            for key, name in BASES.items():
                base = by_name.get(name)
                row[key] = row["tokens_per_second"] / base["tokens_per_second"] if base else None
        return rows

    def _setting(self, name: str) -> dict:
        settings = self.recipe.eval
        return {
            "method": name,
            "tree": tree_of(name, self.recipe, self.trained),
            "prompt_set": settings.prompts,
            "batch_size": settings.batch_size,
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "acceptance": rule_of(name, self.recipe) if settings.temperature else "greedy",
            "spread": settings.spread,
            "dtype": self.recipe.target.dtype,
        }

    def _identity(self, name: str) -> dict:
        """Count outputs equal to plain decoding's; list every other one with its near-tie or
        fault."""
        sampled = self.recipe.eval.temperature > 0
        if REFERENCE not in self.outcomes or (sampled and rule_of(name, self.recipe) != GUMBEL):
            return NOT_COMPARED
        plain, ours = self.tokens(REFERENCE), self.tokens(name)
        found = differences(self.target, self.requests, plain, ours)
        told = [(self.prompts[number], difference) for number, difference in found]
        return {
            "identical": len(ours) - len(found),
            "near_ties": sum(difference.near_tie for _, difference in told),
            "differences": [
                {"prompt": prompt.id, "turn": prompt.turn} | asdict(difference)
                for prompt, difference in told
            ],
        }

    def completions(self, name: str) -> list[Completion]:
        """The outputs of a method, in the order of the requests that it took."""
        return [done for part in self.outcomes[name] for done in part.completions]

    def tokens(self, name: str) -> list[list[int]]:
        """The new tokens of every output of a method."""
        return [done.tokens for done in self.completions(name)]


def measure(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],  # one per turn
    methods: Sequence[str],
    progress: bool = False,
    remember: Remember = forget,
    tolerant: bool = False,  # whether a failure is an outcome, and not raised
) -> Measurement:
    """Build every method and let them take turns on the prompts (eval/measure/rounds.py)."""
    requests = make_requests(recipe.eval, prompts)
    common = (recipe, target, trained, capacity_for(recipe.eval, requests))
    makers = {name: partial(make_method, name, *common) for name in methods}
    runners = {n: FaultTolerant(make) if tolerant else make() for n, make in makers.items()}
    outcomes = take_turns(runners, requests, recipe.eval, progress, remember)
    return Measurement(recipe, target, trained, prompts, requests, outcomes)


class Entrant(Protocol):
    """A drafter that is compared with others of its target, each with a recipe of its own."""

    name: str
    method: str
    recipe: Recipe
    trained: Trained


def measure_entrants(
    entrants: Sequence[Entrant],
    target: Target,
    prompts: Sequence[Prompt],  # one per turn
    tolerant: bool = False,  # whether a failure is an outcome, and not raised
) -> list[Measurement]:
    """Let drafters take turns on the prompts; return a measurement of each, in their order.

    The first one decodes plainly, and every measurement has it beside its own drafter. Lengths,
    rows and repeats are those of its recipe.
    """
    settings = entrants[0].recipe.eval
    requests = make_requests(settings, prompts)
    room = capacity_for(settings, requests)
    runners = {}
    for one in entrants:
        make = partial(make_method, one.method, one.recipe, target, one.trained, room)
        runners[one.name] = FaultTolerant(make) if tolerant else make()
    outcomes = take_turns(runners, requests, settings)
    plain = outcomes[entrants[0].name]
    return [
        Measurement(
            *(one.recipe, target, one.trained, prompts, requests),
            outcomes={REFERENCE: plain, one.method: outcomes[one.name]},
        )
        for one in entrants
    ]


def repeat_speedups(row: dict, plain: dict | None) -> list[float]:
    """Speedups over plain decoding of every repeat by itself; none without repeats."""
    key = "tokens_per_second_repeats"
    return [a / b for a, b in zip(row[key], plain[key], strict=True)] if plain else []


def measured_cost(parts: Sequence[Outcome], plain: Sequence[Outcome] | None) -> float | None:
    """Time of a drafter's forward over that of a plain step, both for a single row of however many
    go together; None where plain decoding was not measured."""
    if plain is None:
        return None
    forwards = sum(part.drafter_forwards for part in parts)
    steps = sum(len(done.steps) for part in plain for done in part.completions)
    drafting = sum(part.drafter_seconds for part in parts)
    return drafting / forwards * steps / sum(p.timing.verify for p in plain) if forwards else 0.0


def parameter_share(
    parts: Sequence[Outcome], models: Sequence[nn.Module], target: nn.Module
) -> float:
    """Parameters of a drafter's forward over the target's; of several models, by their forwards."""
    forwards = sum(part.drafter_forwards for part in parts)
    if not models or not forwards:
        return 0.0
    passes = (sum(counts) for counts in zip(*(part.drafter_passes for part in parts), strict=True))
    read = sum(n * _parameters(model) for n, model in zip(passes, models, strict=True))
    return read / forwards / _parameters(target)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
