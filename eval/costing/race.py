"""The best few of what was priced decode the same prompts in turns: what they bring is measured."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from specdraft.data.prompts import Prompt, load_prompts, validation_prompts
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.measure.methods import make_method
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.rounds import capacity_for, take_turns
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

FINALISTS = 4  # that decode
REPEATS = 3  # of each prompt by each of them, or as many prompts ..
SECONDS = 20.0  # .. as this has room for


def fitting_prompts(recipe: Recipe, target: Target) -> list[Prompt]:
    """The validation prompts: no report measures them. Raises DataError where none are left."""
    prompts = validation_prompts(recipe, target.tokenizer)
    if not prompts:
        settings, measured = recipe.eval, len(load_prompts(recipe, target.tokenizer))
        raise DataError(
            f"eval.limit = {settings.limit}: all {measured} of {settings.prompts} are measured, "
            "and no validation prompts are left to fit anything on; lower it (or, for a head, name "
            "a tree in eval.tree)"
        )
    return prompts


def speedups(
    method: str,
    recipes: Sequence[Recipe],
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    seconds: float,
) -> list[float]:
    """Decode prompts by a method with the settings of each recipe, in turns; return how many times
    as fast as plain decoding each is.

    seconds: that all of them, plain decoding included, are expected to take for all prompts once.
    """
    times, rows = SECONDS / seconds, recipes[0].eval.batch_size
    settings = replace(recipes[0].eval, repeats=max(1, min(REPEATS, int(times))))
    requests = make_requests(settings, prompts)[: max(rows, int(len(prompts) * times))]
    capacity = capacity_for(settings, requests)
    runners = {REFERENCE: make_method(REFERENCE, recipes[0], target, trained, capacity)}
    for number, own in enumerate(recipes):
        runners[str(number)] = make_method(method, own, target, trained, capacity)
    outcomes = take_turns(runners, requests, settings)
    plain, *drafted = (_ms_per_token(outcomes[name]) for name in runners)
    return [plain / own for own in drafted]


def combined_speedup(expected: float, measured: float) -> float:
    """How many times as fast as plain decoding a draft is, by its price and by its race.

    A price is as wrong as the curves of costs, a race of seconds as its seconds were: a geometric
    mean is nearer, in which the price counts twice. (Where neighbours share the cores, prices that
    were measured twice lay 1.3% apart, races of one tree up to 20%. Of the quickstart's finalists
    on a machine of its own the first by its price was the first over 40 other prompts, too, and in
    two of three races; one had another 3% before it.)
    """
    return (expected**2 * measured) ** (1 / 3)


def _ms_per_token(outcomes: Sequence[Outcome]) -> float:
    """Milliseconds of all batches over their tokens: methods may give answers of other lengths, for
    by rules other than the shared noise's they draw other samples."""
    tokens = sum(len(answer.tokens) for part in outcomes for answer in part.completions)
    return 1e3 * sum(part.seconds for part in outcomes) / tokens if tokens else inf
