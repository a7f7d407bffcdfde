"""How much data gives what acceptance: train on growing subsets, and say what more would bring.

    python train/curve.py recipes/tiny.yaml --kinds falcon,eagle,medusa,student
        --rows 100,300,1000,3000 [--seeds 0,1,2] [--out DIR] [section.key=value ..]
        [KIND:section.key=value ..]

Every kind of drafter is trained on nested subsets of the recipe's data, with equal steps (the
recipe's) and with steps that grow with the data, and measured by decoding a chain. A saturating
curve is fitted to tokens per step, with its uncertainty over the seeds, and says what ten times the
data would bring. KIND:section.key=value is for one kind, e.g. eagle:optim.lr=1.0e-2.

Cut off, the same command goes on where it stopped. Writes DIR/curve.json and, with matplotlib,
PNGs.
"""

from specdraft.recipes.entry import entry

from pathlib import Path

from specdraft.data.chat import split_holdout
from specdraft.data.lock import output_lock
from specdraft.eval.drafters.registry import problems
from specdraft.eval.measure.report import write_json
from specdraft.eval.papers.jobs import run_all
from specdraft.recipes.arguments import comma_separated, recipe_parser, whole, whole_numbers
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import tell
from specdraft.train.curves.data_curve import draw_curves, make_curves, print_curves
from specdraft.train.curves.sizes import METHODS, plan_sizes

DEFAULT = "falcon,eagle,medusa,student"
FEWEST = 3  # sizes that a curve is fitted to


@entry
def main() -> None:
    """Parse, check the sizes, train what is missing, fit, show and write."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--kinds", default=DEFAULT, help="default: %(default)s")
    parser.add_argument("--rows", default="100,300,1000,3000,10000", help="default: %(default)s")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--jobs", type=whole(1, 1000), default=1, help="trainings at once")
    parser.add_argument("--out", type=Path, help="default: runs/curve_NAME")
    options = parser.parse_intermixed_args()
    kinds = comma_separated("--kinds", options.kinds)
    if unknown := [kind for kind in kinds if kind not in METHODS]:
        raise RecipeError(f"--kinds {unknown[0]:.100}: there are {', '.join(METHODS)}")
    rows = sorted(set(whole_numbers("--rows", options.rows, least=1)))
    seeds = whole_numbers("--seeds", options.seeds)
    common = [one for one in options.overrides if one.partition(":")[0] not in METHODS]
    of_kind = {kind: [o[len(kind) + 1 :] for o in options.overrides if o.startswith(f"{kind}:")]
               for kind in kinds}  # fmt: skip
    recipe = load_recipe(options.recipe, common, check=problems)
    check_sizes(recipe, rows)
    out = options.out or Path("runs") / f"curve_{recipe.name}"
    sizes = list(plan_sizes(recipe, options.recipe, kinds, rows, seeds, common, of_kind, out))
    with output_lock(out):
        run_all(list(dict.fromkeys(size.job for _, size in sizes)), options.jobs, "training")
        report = make_curves(sizes)
        write_json(report, out / "curve.json")
        print_curves(report)
        draw_curves(report, out)
        tell(f"wrote {out / 'curve.json'}")


def check_sizes(recipe: Recipe, rows: list[int]) -> None:
    """Raise for too few sizes, for more rows than there are, and for a recipe without steps."""
    if len(rows) < FEWEST:
        raise RecipeError(f"--rows {rows}: a curve takes {FEWEST} sizes at least")
    if recipe.train.steps is None:
        raise RecipeError("train.steps = null: give the steps that equal sizes take, e.g. 800")
    there = len(split_holdout(recipe.data)[0].conversations)
    if rows[-1] > there:
        raise DataError(
            f"--rows {rows[-1]}: there are {there} conversations to train on in "
            f"{', '.join(recipe.data.sources)}; give sizes up to that, or more data"
        )


if __name__ == "__main__":
    main()
