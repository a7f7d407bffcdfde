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
from rich.console import Console
from rich.table import Table

from specdraft.data.prompts import validation_prompts
from specdraft.eval.costing.search import Candidate, Load, candidates, finalists, plain_rate
from specdraft.eval.costing.shares import Drafted, measure_shares, write_tree
from specdraft.eval.drafters.registry import problems
from specdraft.eval.engine.cost import load_costs
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.measure.methods import make_method
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.rounds import capacity_for, take_turns
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import RecipeError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

DEEPEST = 16  # depths that ranks are counted at


@entry
def main() -> None:
    """Parse, count ranks, price trees, decode with the best few, write the fastest."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--finalists", type=int, default=4, help="trees that are decoded with")
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
        load = load_of(recipe, target)
        form = (costs, drafted.block_size, drafted.coupled, load)
        found = finalists([*candidates(drafted.shares, *form)], options.finalists)
        tokens, plain = decode_in_turns(recipe, target, drafted, found)
    expected = [one.rate / plain_rate(costs, load) for one in found]
    measured = [rate / plain for rate in tokens]
    best = measured.index(max(measured))
    show(found, expected, measured, best)
    out = options.out or drafted.folder / "tree.yaml"
    source = f"fitted by eval/fit.py on recipe {recipe.name}"
    write_tree(out, drafted.block_size, source, found[best].paths)
    Console(soft_wrap=True).print(f"wrote {out}: {found[best]}")


def load_of(recipe: Recipe, target: Target) -> Load:
    """Rows decoded at once, and what a row has cached in the middle of an answer."""
    prompts = validation_prompts(recipe, target.tokenizer)
    read = sum(len(prompt.input_ids) for prompt in prompts) // max(len(prompts), 1)
    return Load(recipe.eval.batch_size, read + recipe.eval.max_new_tokens // 2)


def decode_in_turns(
    recipe: Recipe, target: Target, drafted: Drafted, trees: Sequence[Candidate]
) -> tuple[list[float], float]:
    """Decode the validation prompts with every tree; tokens per second, and plain decoding's."""
    prompts = validation_prompts(recipe, target.tokenizer)
    requests = make_requests(recipe.eval, prompts)
    capacity = capacity_for(recipe.eval, requests)

    def runner(method: str, tree: Path | None = None):
        settings = recipe.eval if tree is None else replace(recipe.eval, tree=str(tree))
        setting = replace(recipe, eval=settings)
        return make_method(method, setting, target, drafted.trained, capacity)

    with TemporaryDirectory() as folder:
        runners = {REFERENCE: runner(REFERENCE)}
        for number, one in enumerate(trees):
            file = Path(folder) / f"{number}.yaml"
            write_tree(file, drafted.block_size, "a finalist", one.paths)
            runners[str(number)] = runner(drafted.method, file)
        outcomes = take_turns(runners, requests, recipe.eval)
    plain, *rates = (tokens_per_second(outcomes[name]) for name in runners)
    return rates, plain


def tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """Of all batches."""
    tokens = sum(len(one.tokens) for outcome in outcomes for one in outcome.completions)
    return tokens / sum(outcome.seconds for outcome in outcomes)


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
    Console().print(table)


if __name__ == "__main__":
    main()
