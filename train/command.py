"""The command line that all trainers share: a recipe with overrides, and --dry-run."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from rich.table import Table

from specdraft.data.atomic import stating_shortfall
from specdraft.data.lock import output_lock
from specdraft.data.ranks import Ranks
from specdraft.eval.methods.registry import problems
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import Screen, say
from specdraft.recipes.yaml_file import dump_yaml
from specdraft.train.fit.accelerator import check_launch, load_target, make_accelerator
from specdraft.train.fit.checkpoint import check_run
from specdraft.train.fit.set_aside import set_aside_others
from specdraft.train.objectives.unread import unread_settings
from specdraft.train.plan import known_sizes, make_plan, measured_flops
from specdraft.train.plan_lines import plan_lines

LoadTarget = Callable[..., Target]  # `accelerator.load_target` of the recipe that is run
# Runs every stage of a recipe; all ranks call it, and load the target when they need it.
Train = Callable[[Recipe, Accelerator, LoadTarget], None]


def run(description: str, train: Train, check: Callable[[Recipe], None] = lambda _: None) -> None:
    """Parse, load the recipe, and train, or print the plan.

    check: raises RecipeError for a recipe that this trainer cannot run.
    """
    parser = recipe_parser(description)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--processes",
        type=whole(1, 10**5),
        metavar="N",
        help="with --dry-run: plan for N (default: as run)",
    )
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides, check=problems)
    check(recipe)
    if arguments.dry_run:
        show_plan(recipe, arguments.processes)
        return
    logging.basicConfig(level=logging.WARNING)
    accelerator = make_accelerator(recipe)
    check_launch(recipe, accelerator)
    out = Path(recipe.output.dir)
    ranks = Ranks.of(accelerator)
    with output_lock(out, ranks), stating_shortfall(out):
        if ranks.is_first:
            set_aside_others(out, recipe.kind)
            for unread in unread_settings(recipe):
                say(unread)
        ranks.wait()
        check_run(out, recipe.to_dict())
        train(recipe, accelerator, partial(load_target, recipe, accelerator))


def show_plan(recipe: Recipe, processes: int | None = None) -> None:
    """Print what a run of a recipe would do and cost, and the recipe."""
    state = PartialState()
    processes = processes or state.num_processes
    speed = measured_flops(state.device, getattr(torch, recipe.target.dtype))
    plan = make_plan(recipe, processes, *known_sizes(recipe))
    print_plan(recipe, plan_lines(plan, recipe, processes, speed))


def print_plan(recipe: Recipe, rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of what a run of a recipe does, and the recipe with all its defaults."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console = Screen(soft_wrap=True)
    console.print(table)
    console.print("\nThe recipe, with its defaults:\n")
    console.print(dump_yaml(recipe.to_dict()), highlight=False)
