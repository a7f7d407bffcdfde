"""Fit what a recipe drafts with to this machine: the tree of its head, or a method's settings.

    python eval/fit.py recipes/tiny.yaml [--method prompt_lookup] [--finalists 4]
        [--out FILE.yaml] [section.key=value ..]

What steps cost is read from output.dir/costs.json, or measured (eval/costs.py). For the validation
prompts, as the target answers them, every tree of the head, or every setting of a drafter without
one, has an expected speed; the best few decode these prompts in turns, `eval.batch_size` rows at
once. A tree is written beside the weights, where eval.tree=auto finds it; settings as a part of a
recipe, for any command behind the recipe:

    python eval/bench.py recipes/tiny_cascade.yaml runs/tiny_cascade/fitted_cascade.yaml
"""

from specdraft.recipes.entry import entry

from pathlib import Path

from specdraft.data.lock import output_lock
from specdraft.eval.costing.fitting import fit_tree
from specdraft.eval.costing.race import FINALISTS
from specdraft.eval.costing.settings import fit_settings, write_setting
from specdraft.eval.costing.shares import TreeDrafter
from specdraft.eval.costing.show import print_fit, print_settings
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.methods.registry import METHODS, find, fitted, problems
from specdraft.models.target import Target
from specdraft.recipes.arguments import check_writable, recipe_parser, whole
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe


@entry
def main() -> None:
    """Parse, fit, write, show."""
    parser = recipe_parser(__doc__)
    able = ", ".join(row.name for row in METHODS.values() if row.is_fitted)
    parser.add_argument("--method", help=f"one of {able}; default: the recipe's")
    parser.add_argument(
        "--finalists", type=whole(1, 1000), default=FINALISTS, help="how many are raced"
    )
    parser.add_argument("--out", type=Path, help="default: tree.yaml beside the weights, or "
                        "output.dir/fitted_METHOD.yaml")  # fmt: skip
    options = parser.parse_intermixed_args()
    method = options.method or fitted(load_recipe(options.recipe, options.overrides).eval.methods)
    drafts_tree = find(method).drafts_tree
    if options.out:  # of settings, whose file is given behind a recipe, .yaml alone
        check_writable(options.out, ".yaml", *([".yml"] if drafts_tree else []))
    # What is measured is made here: the recipe's tree need not fit its head.
    methods = f"eval.methods=[{REFERENCE if drafts_tree else method}]"
    recipe = load_recipe(options.recipe, [*options.overrides, methods], check=problems)
    with output_lock(Path(recipe.output.dir)):
        target = Target.of_recipe(recipe.target)
        if drafts_tree:
            drafter = TreeDrafter.of_run(recipe, target)
            # falcon_maxgram drafts Falcon's tree, and more behind it; falcon_tree that of any head.
            named = method.replace("_maxgram", "_tree")
            if drafter.method != named and not (named == "falcon_tree" and drafter.trained.head):
                raise RecipeError(
                    f"--method {method}: the recipe's run drafts by {drafter.method}; fit that, or "
                    "give the recipe of the other"
                )
            print_fit(*fit_tree(recipe, target, drafter, options.finalists, options.out))
            return
        found = fit_settings(recipe, target, method, options.finalists)
        out = options.out or Path(recipe.output.dir) / f"fitted_{method}.yaml"
        write_setting(recipe, method, found[0], out)
        print_settings(recipe, out, found)


if __name__ == "__main__":
    main()
