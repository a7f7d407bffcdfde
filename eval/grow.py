"""Grow a static tree for a trained head from how often each rank is right at each depth.

    python eval/grow.py recipes/tiny.yaml --nodes 12 --depth 9 --out recipes/trees/mine.yaml

The prompts are validation prompts, answered greedily by the target. The head is rolled out over
those answers, for every position at once, and the rank of each true token is counted by its depth;
Medusa heads are asked at every position, one head per depth. The tree is the best of its size under
these counts (eval/drafters/tree_growth.py).
"""

from pathlib import Path

from specdraft.eval.costing.shares import measure_shares, write_tree
from specdraft.eval.drafters.registry import problems
from specdraft.eval.drafters.tree_growth import best_paths, probability
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.errors import entry
from specdraft.recipes.fields import LARGEST_TREE
from specdraft.recipes.load import load_recipe
from specdraft.recipes.static_trees import DEEPEST_TREE
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, count ranks, write the tree."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--nodes", type=whole(1, LARGEST_TREE), default=25)
    depths = whole(1, DEEPEST_TREE)
    parser.add_argument(
        "--depth", type=depths, default=6, help="passes * block size, or Medusa heads"
    )
    parser.add_argument("--out", type=Path, required=True, help="the tree file to write")
    options = parser.parse_intermixed_args()
    # Nothing is measured: the recipe's tree need not fit its head yet.
    overrides = [*options.overrides, "eval.methods=[plain]"]
    recipe = load_recipe(options.recipe, overrides, check=problems)
    found = measure_shares(recipe, Target.of_recipe(recipe.target), options.depth)
    paths = best_paths(found.shares, options.nodes)
    source = f"grown by eval/grow.py on recipe {recipe.name}"
    write_tree(options.out, found.block_size, source, paths)
    expected = 1 + sum(probability(found.shares, path) for path in paths)
    tell(f"wrote {options.out}: {len(paths)} nodes, {expected:.2f} tokens/step expected")


if __name__ == "__main__":
    main()
