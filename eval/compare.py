"""Compare finished drafters of one target: what each gains here, and what it cost to train.

    python eval/compare.py runs/tiny runs/tiny_eagle [you/a-head ..] [--shape llama7b]
        [--out DIR] [section.key=value ..]

Any number of them, of any kind, named by a drafter's folder in a run, the run, a recipe, or, of
heads, a Hub id. All decode the prompts of the first one's recipe in turns, each as its own run
drafts. What is not finished is told and left out. Writes DIR/report.json, report.html and, with
matplotlib, PNGs; one of them is the frontier of speed over the minutes of training.

With --shape, the target and all drafters write and draft what they do at the cost of a larger
model, as in eval/bench.py; the minutes are those that the small ones were trained.
"""

from specdraft.recipes.entry import entry

import sys
from pathlib import Path

from specdraft.data.lock import output_lock
from specdraft.data.prompts import load_prompts
from specdraft.eval.comparing.contestants import enter, read_recipes
from specdraft.eval.comparing.race import race
from specdraft.eval.comparing.show import frontier, print_comparison
from specdraft.eval.costing.enlarged import enlarge_entrants
from specdraft.eval.costing.shapes import find_shape
from specdraft.eval.measure.report import write_report
from specdraft.models.target import Target
from specdraft.recipes.arguments import Parser
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, load target and drafters, decode in turns, show and write."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="+", metavar="RUN|HEAD|HUB_ID|section.key=value")
    parser.add_argument("--shape", help="enlarge the models to llama7b, .., or a config.json")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="default: %(default)s"
    )
    options = parser.parse_intermixed_args()
    names = [given for given in options.drafters if "=" not in given or Path(given).exists()]
    overrides = [given for given in options.drafters if given not in names]
    if not names:
        raise RecipeError("name at least one drafter: a run, a folder in one, or a recipe")
    shape = find_shape(options.shape) if options.shape else None
    recipes = read_recipes(names, overrides)
    first = next(iter(recipes.values()))
    target = Target.of_recipe(first.target)
    entered, left_out = enter(recipes, target)
    prompts = load_prompts(first, target.tokenizer)
    if shape:
        target, entered = enlarge_entrants(shape, entered, target)
    with output_lock(options.out):
        report = race(entered, target, prompts, left_out)
        print_comparison(report)
        plot = frontier(report)
        tell(f"wrote {write_report(report, options.out, [plot] if plot else [])}")
    if any(run["failures"] for run in report["runs"]):
        sys.exit("not all of them decoded all prompts: see failures in report.json")


if __name__ == "__main__":
    main()
