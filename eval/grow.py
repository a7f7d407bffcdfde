"""Grow a static tree for a trained head from how often each rank is right at each depth.

    python eval/grow.py recipes/tiny.yaml --nodes 12 --depth 9 --out recipes/trees/mine.yaml

The prompts are validation prompts, answered greedily by the target. The head is rolled out over
those answers, for every position at once, and the rank of each true token is counted by its depth;
Medusa heads are asked at every position, one head per depth. The tree is the best of its size under
these counts (eval/drafters/tree_growth.py).
"""

from pathlib import Path

import yaml

from specdraft.data.prompts import validation_prompts
from specdraft.eval.drafters.registry import problems
from specdraft.eval.drafters.tree_growth import (
    best_paths,
    medusa_rank_shares,
    probability,
    rank_shares,
)
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.falcon import load_head
from specdraft.models.medusa import load_medusa
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import DataError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe


@entry
def main() -> None:
    """Parse, count ranks, write the tree."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=25)
    parser.add_argument("--depth", type=int, default=6, help="passes * block size, or Medusa heads")
    parser.add_argument("--out", type=Path, required=True, help="the tree file to write")
    options = parser.parse_intermixed_args()
    # Nothing is measured: the recipe's tree need not fit its head yet.
    overrides = [*options.overrides, "eval.methods=[plain]"]
    recipe = load_recipe(options.recipe, overrides, check=problems)
    target = Target.of_recipe(recipe.target)
    out = Path(recipe.output.dir)
    if recipe.medusa.given:
        heads = load_medusa(out / "medusa", target.identity())
        block_size = min(options.depth, heads.config.heads)
        shares = medusa_rank_shares(heads, target, answers(recipe, target), block_size)
    else:
        head = load_head(out / "head", target.identity())
        block_size = head.config.block_size
        shares = rank_shares(head, target, answers(recipe, target), options.depth)
    paths = best_paths(shares, options.nodes)
    write_tree(options.out, block_size, recipe.name, paths)
    expected = 1 + sum(probability(shares, path) for path in paths)
    print(f"wrote {options.out}: {len(paths)} nodes, {expected:.2f} tokens/step expected")  # noqa: T201


def answers(recipe: Recipe, target: Target) -> list[tuple[int, list[int]]]:
    """The target's greedy answers to the validation prompts: (length of the prompt, all ids)."""
    prompts = [prompt.input_ids for prompt in validation_prompts(recipe, target.tokenizer)]
    if not prompts:
        raise DataError("no validation prompts are left: lower eval.limit")
    requests = [Request(prompt, recipe.eval.max_new_tokens) for prompt in prompts]
    capacity = max(map(len, prompts)) + recipe.eval.max_new_tokens
    done = Decoder(target, rows=8, capacity=capacity).run(requests)
    return [(len(prompts[one.index]), prompts[one.index] + one.tokens) for one in done]


def write_tree(path: Path, block_size: int, name: str, paths: list[tuple[int, ...]]) -> None:
    """Write a tree file as recipes name it in eval.tree."""
    content = {
        "name": path.stem,
        "block_size": block_size,
        "source": f"grown by eval/grow.py on recipe {name}",
        "paths": [list(p) for p in sorted(paths, key=lambda p: (len(p), p))],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=99))


if __name__ == "__main__":
    main()
