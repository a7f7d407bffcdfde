"""The comparison at the end of a run: every method on every prompt, as report.json and .html.

Methods take turns prompt by prompt, so that a machine that slows down slows all of them down.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from specdraft.data.atomic import write_atomic
from specdraft.data.prompts import Prompt
from specdraft.eval.drafters.registry import featured
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import Measurement, measure
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.measure.page import write_page
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.rounds import Remember, forget
from specdraft.eval.measure.show import sample
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe

SCHEMA = 1
SAMPLES = 2


def evaluate(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    progress: bool = True,
    remember: Remember = forget,
) -> dict:
    """Decode all prompts by all methods; return the report.

    `runs` has a row per method (eval/measure/measurement.py says what is in it); one that fails on
    a prompt goes on with the next, and its row says so. `samples` are the first answers of our last
    method that drafts, cut into what was accepted.
    """
    with cpu_threads(recipe.eval.threads):
        prompts = expand_turns(recipe, target, prompts)
        done = measure(recipe, target, trained, prompts, methods, progress, remember, tolerant=True)
        where = environment(target)
    return {
        "schema": SCHEMA,
        "recipe": recipe.to_dict(),
        "environment": where,
        "runs": done.rows(),
        "samples": _samples(done, featured(methods)),
    }


def _samples(done: Measurement, method: str) -> list[dict]:
    answers = (
        pair
        for prompts, part in done.parts(method)
        for pair in zip(prompts, part.completions, strict=not part.failure)
    )
    return [
        {"method": method} | sample(done.target.tokenizer, prompt.text, completion)
        for prompt, completion in islice(answers, SAMPLES)
    ]


def tokens_per_step(
    recipe: Recipe, target: Target, trained: Trained, prompts: Sequence[Prompt], method: str
) -> float:
    """Of one method alone, without a report: what a drafter is chosen by. It must not fail."""
    with cpu_threads(recipe.eval.threads):
        prompts = expand_turns(recipe, target, prompts)
        done = measure(recipe, target, trained, prompts, [method], progress=False)
    return counts(done.outcomes[method], Costs(0.0, None))["tokens_per_step"]


def write_report(report: dict, folder: Path) -> Path:
    """Write report.json into a folder, whole or not at all, and report.html of it beside it."""
    path = folder / "report.json"
    write_json(report, path)
    write_page(report, folder)
    return path


def write_json(content: dict, path: Path) -> None:
    """Write figures as JSON, whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f"{json.dumps(content, indent=1)}\n".encode())
