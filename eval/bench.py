"""Measure a finished run: every method beside its baselines, on the same prompts.

    python eval/bench.py recipes/tiny.yaml [--methods plain,falcon_tree] [--batch-sizes 1,8]
        [--temperatures 0,1] [--prompts NAME,NAME] [--shape llama7b] [--out DIR]
        [section.key=value ..]

Reads what was trained from `output.dir` and writes DIR/report.json; by default beside that of the
training, into output.dir/bench/SETTINGS. With several batch sizes it ends with their curves: each
method over plain decoding of the same rows.
Methods that draft what is worth it are priced for these rows first: what costs.json lacks is
measured. A method may be decoded the vanilla padded way (METHOD:padded, METHOD:pad_kv,
METHOD:pad_inputs; EMS-SD, Table 2) or from one queue instead of batches that end together
(METHOD:dynamic).

With --shape, target and drafters write and draft what they do at the cost of a larger model
(models/enlarged/), a Llama of a name or a config.json as in eval/costs.py: how a large one decodes
here is measured before it is downloaded.

Cut off, the same command goes on where it stopped (DIR/measured.jsonl,
eval/measure/logbook.py). A method that fails on a prompt is shown as failed there, the others go
on, and the exit code is 1.
"""

from specdraft.recipes.entry import entry

import argparse
import re
import sys
from functools import partial
from itertools import product
from pathlib import Path

from specdraft.data.fingerprint import of_settings
from specdraft.data.lock import output_lock
from specdraft.data.prompts import Prompt, load_prompts
from specdraft.eval.costing.drafts import trained_drafter
from specdraft.eval.costing.enlarged import enlarge
from specdraft.eval.costing.measuring import cover_rows
from specdraft.eval.costing.shapes import Shape, find_shape
from specdraft.eval.measure.environment import environment
from specdraft.eval.measure.logbook import NAME, Logbook
from specdraft.eval.measure.report import evaluate, write_report
from specdraft.eval.measure.table import print_curves, print_report
from specdraft.eval.methods.registry import (
    describe,
    drafted_trees,
    find,
    load_trained,
    problems,
)
from specdraft.eval.methods.setup import own_methods
from specdraft.eval.methods.trained import Trained
from specdraft.models.publish import BENCH
from specdraft.models.target import Target
from specdraft.recipes.arguments import comma_separated, recipe_parser
from specdraft.recipes.find import KINDS, kinds_of
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, load recipe, target and drafters, and measure."""
    parser = recipe_parser(__doc__, epilog=describe())
    parser.add_argument("--methods", help="comma-separated; default: eval.methods")
    parser.add_argument("--batch-sizes", help="comma-separated; default: eval.batch_size")
    parser.add_argument("--temperatures", help="comma-separated; default: eval.temperature")
    parser.add_argument("--prompts", help="comma-separated; default: eval.prompts")
    parser.add_argument("--shape", help="enlarge the models to llama7b, .., or a config.json")
    parser.add_argument(
        "--out", type=Path, help="where report.json goes; default: output.dir/bench/SETTINGS"
    )
    options = parser.parse_intermixed_args()
    shape = find_shape(options.shape) if options.shape else None
    recipes = [
        load_recipe(options.recipe, [*options.overrides, *overrides], check=problems)
        for overrides in variants(options)
    ]
    out = options.out or place_of(options.recipe, recipes, shape)
    with output_lock(out), keeping(lambda: f"{out / NAME} has what was measured"):
        report = measure(recipes, out, shape)
    if any(run["failures"] for run in report["runs"]):
        sys.exit("not all methods decoded all prompts: see the tables, or failures in report.json")


def variants(options: argparse.Namespace) -> list[list[str]]:
    """One list of overrides per combination of prompts, batch size and temperature."""
    common = [f"eval.methods=[{options.methods}]"] if options.methods is not None else []
    many = {
        "--prompts": ("eval.prompts", options.prompts),
        "--batch-sizes": ("eval.batch_size", options.batch_sizes),
        "--temperatures": ("eval.temperature", options.temperatures),
    }
    given = [
        [f"{key}={value}" for value in comma_separated(option, values)]
        for option, (key, values) in many.items()
        if values is not None
    ]
    return [[*common, *chosen] for chosen in product(*given)]


def place_of(name: str, recipes: list[Recipe], shape: Shape | None = None) -> Path:
    """Where the report of a recipe, of this name, goes by itself: where a run has drafters of
    several kinds, a place for each."""
    run, settings, last = Path(recipes[0].output.dir), settings_of(recipes), Path(name).name
    if len(kinds_of(run)) > 1:
        settings = f"{last if last in KINDS else recipes[0].kind}-{settings}"
    return run / BENCH / (f"{settings}-{_plain(shape.name)}" if shape else settings)


def settings_of(recipes: list[Recipe]) -> str:
    """Prompts, rows and temperatures, as a folder is called: tiny_chat-b1+8-t0+1."""
    prompts = dict.fromkeys(re.split(r"[/\\:]", recipe.eval.prompts)[-1] for recipe in recipes)
    rows = dict.fromkeys(str(recipe.eval.batch_size) for recipe in recipes)
    temperatures = dict.fromkeys(f"{recipe.eval.temperature:g}" for recipe in recipes)
    name = f"{'+'.join(prompts)}-b{'+'.join(rows)}-t{'+'.join(temperatures)}"
    return _plain(name)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+-]", "_", name)[:200]


def measure(recipes: list[Recipe], out: Path, shape: Shape | None = None) -> dict:
    """Evaluate each recipe on the same target and drafters; write and return one report of all.

    shape: what both are enlarged to."""
    first = recipes[0]
    target = Target.of_recipe(first.target)
    sets = {recipe.eval.prompts: recipe for recipe in recipes}
    prompts = {name: load_prompts(recipe, target.tokenizer) for name, recipe in sets.items()}
    trained = load_trained(first, target)
    if first.head.model is not None and trained.head is not None:
        methods = own_methods(first.eval.methods, trained.head.config)
        recipes = [recipe.with_eval(methods=methods) for recipe in recipes]
        first = recipes[0]
    if shape:
        target, trained = enlarge(shape, first, target, trained)
    if any(find(name).is_priced for name in first.eval.methods):
        drafting = trained if shape else trained_drafter(first, target)
        cover_rows(first, target, drafting, max(recipe.eval.batch_size for recipe in recipes))
    reports = []
    with Logbook(out, depends_on(recipes, target, trained, prompts)) as logbook:
        if logbook.note:
            tell(logbook.note)
        for part, recipe in enumerate(recipes):
            asked, methods = prompts[recipe.eval.prompts], recipe.eval.methods
            remember = partial(logbook.remember, part)
            reports.append(evaluate(recipe, target, trained, asked, methods, remember=remember))
            print_report(reports[-1])
        report = reports[0] | {"runs": [run for report in reports for run in report["runs"]]}
        print_curves(report["runs"])
        tell(f"wrote {write_report(report, out)}")
        logbook.remove()
    return report


def depends_on(
    recipes: list[Recipe], target: Target, trained: Trained, prompts: dict[str, list[Prompt]]
) -> dict:
    """All that the figures depend on."""
    asked = {
        name: [[p.input_ids, p.source, p.later] for p in some] for name, some in prompts.items()
    }
    parts = {
        "recipe": [recipe.to_dict() for recipe in recipes],
        "prompts": asked,
        "target": target.identity(),
        "drafter": trained.weights(),
        "tree": [drafted_trees(recipe, trained) for recipe in recipes],
    }
    return {name: of_settings({name: part}) for name, part in parts.items()} | environment(target)


if __name__ == "__main__":
    main()
