"""Measure a finished run: every method beside its baselines, on one set of prompts.

    python eval/bench.py recipes/tiny.yaml [--methods plain,falcon_tree] [--batch-sizes 1,8]
        [--temperatures 0,1] [--prompts NAME] [--out DIR] [section.key=value ..]

Reads what was trained from `output.dir` and writes DIR/report.json (default: `output.dir`). With
several batch sizes it ends with their curves: each method over plain decoding of the same rows.
A method may be decoded the vanilla padded way (METHOD:padded, METHOD:pad_kv, METHOD:pad_inputs;
EMS-SD, Table 2) or from one queue instead of batches that end together (METHOD:dynamic).
"""

import argparse
from itertools import product
from pathlib import Path

from specdraft.data.prompts import load_prompts
from specdraft.eval.report import evaluate, print_curves, print_report, write_report
from specdraft.eval.trained import load_trained
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe


@entry
def main() -> None:
    """Parse, load recipe, target and head, and measure."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--methods", help="comma-separated; default: eval.methods")
    parser.add_argument("--batch-sizes", help="comma-separated; default: eval.batch_size")
    parser.add_argument("--temperatures", help="comma-separated; default: eval.temperature")
    parser.add_argument("--prompts", help="default: eval.prompts")
    parser.add_argument("--out", type=Path, help="where report.json goes; default: output.dir")
    options = parser.parse_intermixed_args()
    runs = [
        load_recipe(options.recipe, [*options.overrides, *overrides])
        for overrides in _variants(options)
    ]
    out = options.out or Path(runs[0].output.dir)
    report = measure(runs)
    write_report(report, out)
    print(f"wrote {out / 'report.json'}")  # noqa: T201


def _variants(options: argparse.Namespace) -> list[list[str]]:
    """One list of overrides per combination of batch size and temperature."""
    common = []
    if options.methods:
        common.append(f"eval.methods=[{options.methods}]")
    if options.prompts:
        common.append(f"eval.prompts={options.prompts}")
    batch_sizes = [
        [f"eval.batch_size={size}"] for size in (options.batch_sizes or "").split(",") if size
    ]
    temperatures = [
        [f"eval.temperature={value}"] for value in (options.temperatures or "").split(",") if value
    ]
    return [
        [*common, *size, *temperature]
        for size, temperature in product(batch_sizes or [[]], temperatures or [[]])
    ]


def measure(recipes: list[Recipe]) -> dict:
    """Evaluate each recipe on the same target and drafters; one report with all runs."""
    first = recipes[0]
    target = Target.of_recipe(first.target)
    prompts = load_prompts(first, target.tokenizer)
    trained = load_trained(first, target)
    reports = []
    for recipe in recipes:
        reports.append(evaluate(recipe, target, trained, prompts, recipe.eval.methods))
        print_report(reports[-1])
    report = reports[0] | {"runs": [run for report in reports for run in report["runs"]]}
    print_curves(report["runs"])
    return report


if __name__ == "__main__":
    main()
