"""Measure what verifying, drafting and the loop cost on this machine, and fit curves to it.

    python eval/costs.py recipes/tiny.yaml [--nodes 1,4,16] [--rows 1,8] [--cached 64,256]
        [--repeats 7] [--shape llama7b] [--out FILE.json] [section.key=value ..]

Forwards of the target by nodes, rows and cached tokens, drafts of what the recipe has trained, and
the decoder's own part of a step, all in turns. Writes output.dir/costs.json, a picture beside it,
and a table; eval/pricing/cost.py reads it. Cut off, the same command goes on where it stopped.

With --shape, a target and a Falcon head with random weights take the place of the recipe's: what a
model costs here is known before it is downloaded. A shape is llama1b, llama7b, llama13b, llama70b,
or the path of any config.json. It goes to output.dir/costs_SHAPE.json.
"""

from specdraft.recipes.entry import entry

import argparse
import importlib.util
from pathlib import Path

import torch

from specdraft.data.lock import output_lock
from specdraft.eval.costing.drafts import trained_drafter
from specdraft.eval.costing.grid import CACHED, NODES, ROWS, Grid
from specdraft.eval.costing.ledger import Ledger
from specdraft.eval.costing.measuring import measure_costs
from specdraft.eval.costing.plot import write_plot
from specdraft.eval.costing.shapes import Shape, build, find_shape, sketch
from specdraft.eval.costing.show import print_costs, summary
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.methods.registry import problems
from specdraft.eval.methods.trained import Trained
from specdraft.eval.pricing.cost import COSTS
from specdraft.models.target import Target
from specdraft.recipes.arguments import check_writable, recipe_parser, whole, whole_numbers
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import Screen, say


@entry
def main() -> None:
    """Parse, load or build the target and its drafter, measure, fit, show."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--nodes", default=_joined(NODES), help="nodes per row, with the root")
    parser.add_argument("--rows", default=_joined(ROWS), help="rows per forward")
    parser.add_argument("--cached", default=_joined(CACHED), help="cached tokens per row")
    parser.add_argument(
        "--repeats", type=whole(1, 1000), default=Grid.repeats, help="times everything is measured"
    )
    parser.add_argument(
        "--shape", help="measure llama7b, .., or a config.json, with random weights"
    )
    parser.add_argument("--out", type=Path, help="default: output.dir/costs.json")
    options = parser.parse_intermixed_args()
    # Nothing is decoded: the recipe's tree need not fit its head.
    overrides = [*options.overrides, "eval.methods=[plain]"]
    recipe = load_recipe(options.recipe, overrides, check=problems)
    grid, shape = grid_of(options), options.shape and find_shape(options.shape)
    name = f"costs_{shape.name}.json" if shape else COSTS
    out = options.out or Path(recipe.output.dir) / name
    check_writable(out, ".json")
    with (
        output_lock(out.parent),
        keeping(lambda: f"{out} has what was measured"),
        cpu_threads(recipe.eval.threads),
    ):
        target, trained = shaped(shape, recipe, grid) if shape else loaded(recipe)
        ledger = measure_costs(recipe, target, trained, grid, out)
        show(ledger, f"{target.name}, {recipe.target.dtype}, {target.device}")


def grid_of(options: argparse.Namespace) -> Grid:
    """What the options ask for. Raises RecipeError for what are no numbers."""
    numbers = (
        whole_numbers(f"--{name}", getattr(options, name), least=1, most=most)
        for name, most in (("nodes", 4096), ("rows", 1000), ("cached", 10**6))
    )
    return Grid(*(tuple(sorted(set(part))) for part in numbers), repeats=options.repeats)


def loaded(recipe: Recipe) -> tuple[Target, Trained]:
    """The recipe's target, and what was trained for it, if anything was."""
    target = Target.of_recipe(recipe.target)
    trained = trained_drafter(recipe, target)
    if trained == Trained():
        say(f"nothing trained in {recipe.output.dir}: costs of the target alone")
    return target, trained


def shaped(shape: Shape, recipe: Recipe, grid: Grid) -> tuple[Target, Trained]:
    """A target of a shape, and the recipe's head for it. RecipeError where they have no room."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    skeleton = sketch(shape, recipe)
    sizes = f"{skeleton.parameters / 1e9:.2f} billion parameters, {skeleton.bytes / 1e9:.1f} GB"
    say(f"{shape.name}: {sizes} with its head, random weights on {device}")
    target, head = build(skeleton, recipe, grid.capacity, device)
    return target, Trained(head=head)


def show(ledger: Ledger, title: str) -> None:
    """Draw and print the costs."""
    console = Screen(soft_wrap=True)
    points, costs = [*ledger.points.values()], ledger.model
    print_costs(points, costs, console)
    for line in summary(costs):
        console.print(line)
    drawn = ledger.path.with_suffix(".png")
    if importlib.util.find_spec("matplotlib"):
        write_plot(points, costs, title, drawn)
        console.print(f"wrote {ledger.path} and {drawn.name}")
    else:
        console.print(f"wrote {ledger.path}; for {drawn.name}: pip install 'specdraft[plots]'")


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
