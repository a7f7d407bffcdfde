"""Fit the tree of a trained head to this machine: the most tokens per millisecond.

    python eval/fit.py recipes/tiny.yaml [--finalists 4] [--out FILE.yaml] [section.key=value ..]

How often each rank is right at each depth is counted on validation prompts that the target answers
greedily; what nodes and passes cost is read from output.dir/costs.json (eval/costs.py). Of all
depths and sizes, the best few by expected tokens per expected millisecond decode these prompts in
turns, `eval.batch_size` rows at once, and the fastest is written, for any command to take as
eval.tree=FILE.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specdraft.data.prompts import Prompt, validation_prompts
from specdraft.eval.costing.search import Candidate, Load, candidates, finalists, plain_rate
from specdraft.eval.costing.shares import Drafted, measure_shares, write_tree
from specdraft.eval.drafters.registry import problems
from specdraft.eval.engine.cost import load_costs
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.measure.methods import make_method
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.rounds import capacity_for, take_turns
from specdraft.models.card import TREE
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.errors import RecipeError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import Screen

DEEPEST = 16  # depths that ranks are counted at


@entry
def main() -> None:
    """Parse, count ranks, price trees, decode with the best few, write the fastest."""
    parser = recipe_parser(__doc__)
    parser.add_argument(
        "--finalists", type=whole(1, 1000), default=4, help="trees that are decoded with"
    )
    parser.add_argument("--out", type=Path, help="default: tree.yaml beside the weights")
    options = parser.parse_intermixed_args()
    if options.finalists < 1:
        raise RecipeError(f"--finalists {options.finalists}: decode with one at least")
    # What is measured is made here: the recipe's tree need not fit its head.
    overrides = [*options.overrides, f"eval.methods=[{REFERENCE}]"]
    recipe = load_recipe(options.recipe, overrides, check=problems)
    target = Target.of_recipe(recipe.target)
    costs = load_costs(Path(recipe.output.dir) / "costs.json", target)
    with cpu_threads(recipe.eval.threads):
        drafted = measure_shares(recipe, target, DEEPEST)
        prompts = validation_prompts(recipe, target.tokenizer)
        load = load_of(recipe, prompts)
        form = (costs, drafted.block_size, drafted.coupled, load)
        found = finalists([*candidates(drafted.shares, *form)], options.finalists)
        measured = decode_in_turns(recipe, target, drafted, prompts, found)
    expected = [one.rate / plain_rate(costs, load) for one in found]
    best = measured.index(max(measured))
    show(found, expected, measured, best)
    out = options.out or drafted.folder / TREE
    source = f"fitted by eval/fit.py on recipe {recipe.name}"
    write_tree(out, drafted.block_size, source, found[best].paths)
    Screen(soft_wrap=True).print(f"wrote {out}: {found[best]}")


def load_of(recipe: Recipe, prompts: Sequence[Prompt]) -> Load:
    """Rows decoded at once, and what a row has cached in the middle of an answer."""
    read = sum(len(prompt.input_ids) for prompt in prompts) // len(prompts)
    return Load(recipe.eval.batch_size, read + recipe.eval.max_new_tokens // 2)


def decode_in_turns(
    recipe: Recipe,
    target: Target,
    drafted: Drafted,
    prompts: Sequence[Prompt],
    trees: Sequence[Candidate],
) -> list[float]:
    """Decode the prompts with every tree: how many times as fast as plain decoding."""
    requests = make_requests(recipe.eval, prompts)
    capacity = capacity_for(recipe.eval, requests)
    methods = {REFERENCE: (REFERENCE, recipe.eval)}
    with TemporaryDirectory() as folder:
        for number, one in enumerate(trees):
            file = Path(folder) / f"{number}.yaml"
            write_tree(file, drafted.block_size, "a finalist", one.paths)
            methods[str(number)] = (drafted.method, replace(recipe.eval, tree=str(file)))
        runners = {
            name: make_method(
                method, replace(recipe, eval=settings), target, drafted.trained, capacity
            )
            for name, (method, settings) in methods.items()
        }
        outcomes = take_turns(runners, requests, recipe.eval)
    plain, *seconds = (sum(part.seconds for part in outcomes[name]) for name in runners)
    return [plain / own for own in seconds]  # all of them bring the same tokens


def show(
    found: Sequence[Candidate], expected: Sequence[float], measured: Sequence[float], best: int
) -> None:
    """Print what was expected of every finalist beside what was measured."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("tree")
    for title in ("passes", "tokens/step, expected", "x plain, expected", "x plain, measured"):
        table.add_column(title, justify="right")
    rows = zip(found, expected, measured, strict=True)
    for number, (one, hoped, seen) in enumerate(rows):
        figures = (str(one.passes), f"{one.tokens:.2f}", f"{hoped:.2f}", f"{seen:.2f}")
        table.add_row(str(one), *figures, style="bold" if number == best else None)
    Screen().print(table)


if __name__ == "__main__":
    main()
