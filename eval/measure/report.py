"""The comparison at the end of a run: every method on every prompt, as report.json and .html.

Methods take turns prompt by prompt, so that a machine that slows down slows all of them down.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import accumulate, islice
from pathlib import Path

from specdraft.data.atomic import write_atomic
from specdraft.data.prompt_sets import set_of
from specdraft.data.prompts import Prompt
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import Measurement, measure
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.rounds import Remember, forget
from specdraft.eval.measure.show import sample
from specdraft.eval.methods.registry import featured, find, needs
from specdraft.eval.methods.setup import tree_file
from specdraft.eval.methods.trained import Trained
from specdraft.eval.page.canvas import Plot
from specdraft.eval.page.page import write_page
from specdraft.eval.page.training import training_curve
from specdraft.eval.pricing.cost import costs_file, load_costs
from specdraft.models.cards.log import log_in
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.fields import plain
from specdraft.recipes.find import drafter_folder
from specdraft.recipes.fitted_tree import read_fit
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import AUTO

SCHEMA = 1
SAMPLES = 2


def evaluate(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    remember: Remember = forget,
) -> dict:
    """Decode all prompts by all methods; return the report.

    `runs` has a row per method (eval/measure/measurement.py says what is in it); one that fails on
    a prompt goes on with the next, and its row says so. `samples` are the first answers of our last
    method that drafts, cut into what was accepted.
    """
    # A missing tree fails here, not at every prompt.
    fit = fit_shown(recipe, target, trained, methods)
    with cpu_threads(recipe.eval.threads):
        prompts = expand_turns(recipe, target, prompts)
        options = {"progress": True, "remember": remember, "tolerant": True}
        done = measure(recipe, target, trained, prompts, methods, **options)
        where = environment(target)
    ours = featured(methods)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.to_dict(),
        "target": target.name,
        "environment": where,
        "training": training_shown(recipe, ours),
        "fit": fit,
        "drafter": trained.weights(),
        "chat": getattr(target.tokenizer, "chat_template", None) is not None,
        "headline": ours,
        "runs": [row | _protocol(recipe, prompts, row) for row in done.rows()],
        "samples": _samples(done, ours),
    }


def _protocol(recipe: Recipe, prompts: Sequence[Prompt], row: dict) -> dict:
    """How figures of a published set are made elsewhere, and where those of a run depart."""
    chosen = set_of(recipe.eval.prompts)
    if chosen is None:
        return {"protocol": None, "departures": []}
    turns = Counter(accumulate(prompt.turn == 1 for prompt in prompts)).values()
    trees = any(max(node["path"]) for node in row.get("acceptance_by_node", []))
    departures = chosen.departures(recipe.eval, trees, [*turns])
    return {"protocol": str(chosen.protocol), "departures": [*departures]}


def fit_shown(
    recipe: Recipe, target: Target, trained: Trained, methods: Sequence[str]
) -> dict | None:
    """The fit of the tree that methods draft, and the costs it was fitted by, as JSON; None where
    it was made by hand. Raises RecipeError where they draft the tree beside weights without one."""
    if not any(find(name).drafts_tree for name in methods):
        return None
    file = tree_file(recipe, trained)
    fit = read_fit(Path(file)) if file and recipe.eval.tree == AUTO else None
    if fit is None:
        return None
    return plain(asdict(fit)) | {"verify_ms": verify_curve(costs_file(recipe, target))}


def training_shown(recipe: Recipe, method: str) -> list[dict]:
    """The curve of the training of what a method drafts with; none where that is no run's, or was
    counted."""
    if recipe.head.model or needs(method) == ("table",):
        return []
    run = Path(recipe.output.dir)
    return training_curve(log_in(drafter_folder(run, recipe.kind), run).parent)


def verify_curve(path: Path) -> list[dict]:
    """Milliseconds of verifying one batch of the fewest rows, by nodes; none without costs."""
    try:
        costs = load_costs(path)
        points = [p for p in json.loads(path.read_text())["points"] if p["what"] == "verify"]
        place = {key: min(point[key] for point in points) for key in ("rows", "cached")}
        own = sorted((p["nodes"], float(p["ms"])) for p in points if place.items() <= p.items())
        return [
            {"nodes": nodes, "measured": ms, "curve": costs.verify_ms(nodes=nodes, **place)}
            for nodes, ms in own
        ]
    except (DataError, ValueError, KeyError, TypeError, OverflowError):
        return []  # of what was measured for the report, nothing is lost


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
    """Decode all prompts by one method and return its tokens per step, by which trainings choose a
    drafter. What it raises is raised: no report could tell of it."""
    with cpu_threads(recipe.eval.threads):
        prompts = expand_turns(recipe, target, prompts)
        done = measure(recipe, target, trained, prompts, [method])
    return counts(done.outcomes[method], Costs(0.0, None))["tokens_per_step"]


def write_report(report: dict, folder: Path, plots: Sequence[Plot] = ()) -> Path:
    """Write report.json into a folder, whole or not at all, and report.html of it beside it, which
    shows some plots more."""
    path = folder / "report.json"
    write_json(report, path)
    write_page(report, folder, plots)
    return path


def write_json(content: dict, path: Path) -> None:
    """Write figures as JSON, whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f"{json.dumps(content, indent=1)}\n".encode())
