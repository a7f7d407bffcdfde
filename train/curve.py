"""Measure how acceptance grows with training data, and extrapolate to ten times the data.

    python train/curve.py recipes/tiny.yaml --kinds falcon,eagle,medusa,student
        --rows 100,300,1000,3000 [--steps equal,root,growing] [--seeds 0,1,2] [--more-seeds 3,4,5]
        [--out DIR] [section.key=value ..] [KIND:section.key=value ..]

Every kind of drafter is trained on nested subsets of the recipe's data, drawn anew for every seed,
with equal steps (the recipe's) and with steps that grow with the data, and measured by decoding a
chain. A saturating curve is fitted to tokens per step, with its uncertainty over the seeds, and
says what ten times the data would bring; rows that are read again count less than new ones. What
the first three sizes foretell of the largest stands beside it; --more-seeds are for these sizes
alone, which cost least and vary most. KIND:section.key=value is for one kind, e.g.
eagle:optim.lr=1.0e-2. With eval.batch_size=32 it measures sooner: tokens per step are the same for
any number of rows.

Cut off, the same command goes on where it stopped. Writes DIR/curve.json and, with matplotlib,
PNGs.
"""

from specdraft.recipes.entry import entry

import importlib.util
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from specdraft.data.chat import split_holdout
from specdraft.data.lock import output_lock
from specdraft.eval.methods.registry import problems
from specdraft.eval.papers.jobs import run_all
from specdraft.eval.publishing.result import write_result
from specdraft.recipes.arguments import comma_separated, recipe_parser, whole, whole_numbers
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import tell
from specdraft.train.curves.data_curve import (
    learnt_tokens,
    make_curves,
    print_curves,
)
from specdraft.train.curves.picture import draw_curves
from specdraft.train.curves.sizes import BACK_TEST, METHODS, POWERS, plan_sizes

DEFAULT = "falcon,eagle,medusa,student"
FEWEST = 3  # sizes that a curve is fitted to


@entry
def main() -> None:
    """Parse, check the sizes, train what is missing, fit, show and write."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--kinds", default=DEFAULT, help="default: %(default)s")
    parser.add_argument("--rows", default="100,300,1000,3000,10000", help="default: %(default)s")
    parser.add_argument("--steps", default="equal,growing", help="also: root; default: %(default)s")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--more-seeds", help=f"extra seeds, for the first {BACK_TEST} sizes only")
    parser.add_argument("--jobs", type=whole(1, 1000), default=1, help="trainings at once")
    parser.add_argument("--out", type=Path, help="default: runs/curve_NAME")
    options = parser.parse_intermixed_args()
    kinds = chosen("--kinds", options.kinds, METHODS)
    regimes = chosen("--steps", options.steps, POWERS)
    rows = sorted(whole_numbers("--rows", options.rows, least=1))
    seeds = whole_numbers("--seeds", options.seeds)
    more = whole_numbers("--more-seeds", options.more_seeds) if options.more_seeds else []
    common, of_kind = divided(options.overrides, kinds)
    recipe = load_recipe(options.recipe, common, check=problems)
    check_sizes(recipe, rows)
    out = options.out or Path("runs") / f"curve_{recipe.name}"
    settings = (common, of_kind, out, regimes, more)
    sizes = list(plan_sizes(recipe, options.recipe, kinds, rows, seeds, *settings))
    for job in {size.kind: size.job for _, size in sizes}.values():
        load_recipe(job.recipe, job.settings, check=problems)  # now, and not behind other kinds
    with output_lock(out):
        run_all(list(dict.fromkeys(size.job for _, size in sizes)), options.jobs, "training")
        report = asked(recipe, options, common, of_kind) | make_curves(
            sizes, learnt_tokens(out / "cache", sizes)
        )
        write_result(report, out / "curve.json")
        print_curves(report)
        if importlib.util.find_spec("matplotlib"):
            draw_curves(report, out)
        tell(f"wrote {out / 'curve.json'}")


def divided(overrides: Iterable[str], kinds: Iterable[str]) -> tuple[list[str], dict]:
    """Overrides for all kinds, and those for each. Raises RecipeError for one of a kind that is not
    trained."""
    common, of_kind = [], {kind: [] for kind in kinds}
    for override in overrides:
        kind, _, own = override.partition(":")
        if kind not in METHODS:
            common.append(override)
        elif kind in of_kind:
            of_kind[kind].append(own)
        else:
            raise RecipeError(f"{override:.100}: no {kind} is trained; add it to --kinds")
    return common, of_kind


def asked(recipe: Recipe, options: Namespace, common: list[str], of_kind: dict) -> dict:
    """Return what a table says of how it was made: source, command, recipe, overrides, seeds."""
    source = f"tokens per step of chains by rows of training, {recipe.name}"
    if options.more_seeds:
        source += f", of the first {BACK_TEST} sizes with seeds {options.more_seeds} besides"
    return {
        "source": source,
        "command": shlex.join(["python", "train/curve.py", *sys.argv[1:]]),
        "recipe": options.recipe,
        "overrides": common,
        "overrides_of_kind": {kind: some for kind, some in of_kind.items() if some},
        "seeds": whole_numbers("--seeds", options.seeds),
    }


def chosen(option: str, given: str, there: Iterable[str]) -> list[str]:
    """Split what an option names. Raises RecipeError for one that is not there."""
    names = comma_separated(option, given)
    if unknown := [name for name in names if name not in there]:
        raise RecipeError(f"{option} {unknown[0]:.100}: there are {', '.join(there)}")
    return names


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
