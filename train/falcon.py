"""Train a Falcon head: conversations -> tokens -> features -> head -> measured head.

    accelerate launch train/falcon.py recipes/tiny.yaml [section.key=value ..]
    python train/falcon.py recipes/vicuna7b.yaml --dry-run

Every stage continues where an earlier run stopped; the results lie in `output.dir`.
"""

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator, PartialState
from rich.console import Console
from rich.table import Table

from specdraft.data.features import FeatureCache
from specdraft.data.prompts import Prompt, load_prompts, validation_prompts
from specdraft.eval.answers import build_caches
from specdraft.eval.report import evaluate, print_report, write_report
from specdraft.eval.trained import Trained
from specdraft.models.falcon import FalconHead
from specdraft.models.target import Target, TargetEnds
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.train.loop import fit
from specdraft.train.plan import counted, lines, make_plan, measured_flops
from specdraft.train.ranks import make_accelerator
from specdraft.train.shapes import TargetShape, head_config


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a YAML file, e.g. recipes/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="with --dry-run: plan for N (default: as run)"
    )
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        show_plan(recipe, arguments.processes)
        return
    logging.basicConfig(level=logging.WARNING)
    accelerator = make_accelerator(recipe)
    load_target = partial(Target.of_recipe, recipe.target, accelerator.device)
    train(recipe, accelerator, load_target)


def train(recipe: Recipe, accelerator: Accelerator, load_target: Callable[[], Target]) -> None:
    """Run every stage of a recipe; all ranks call this."""
    target = load_target()
    _, cache = build_caches(recipe, target, accelerator)
    prompts = load_prompts(recipe, target.tokenizer)
    validation = validation_prompts(recipe, target.tokenizer)
    head, ends = new_head(recipe, target, cache), TargetEnds.of(target)
    if recipe.train.eval_every is None or not validation:
        target = None  # cached training needs its two ends only: leave the memory to the head
        fit(head, cache, ends, recipe, accelerator)
    else:
        fit(head, cache, ends, recipe, accelerator, partial(measure, recipe, target, validation))
    if accelerator.is_main_process:
        best = FalconHead.from_pretrained(Path(recipe.output.dir) / "head")
        report(recipe, target or load_target(), best, prompts)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def new_head(recipe: Recipe, target: Target, cache: FeatureCache) -> FalconHead:
    """Make the recipe's head, with the scales its cache was measured to have."""
    torch.manual_seed(recipe.train.seed)
    return FalconHead(
        head_config(
            recipe,
            TargetShape.of(target.config),
            embed_scale=cache.manifest["embed_scale"],
            feature_scale=cache.manifest["feature_scale"],
            identity=target.identity(),
        )
    )


def measure(
    recipe: Recipe, target: Target, prompts: list[Prompt], head: FalconHead, step: int
) -> dict[str, float]:
    """Decode the prompts with the head's tree: what the best head is chosen by."""
    outcome = evaluate(recipe, target, Trained(head), prompts, ["falcon_tree"], progress=False)
    return {"tokens_per_step": outcome["runs"][0]["tokens_per_step"]}


def report(recipe: Recipe, target: Target, head: FalconHead, prompts: list[Prompt]) -> None:
    """Measure the kept head beside the baselines, and push it where the recipe says."""
    outcome = evaluate(recipe, target, Trained(head), prompts, recipe.eval.methods)
    write_report(outcome, Path(recipe.output.dir))
    print_report(outcome)
    hub = recipe.hub
    if hub.repo_id:
        head.push_to_hub(hub.repo_id, private=hub.private, branch=hub.revision)


def show_plan(recipe: Recipe, processes: int | None = None) -> None:
    """Print the resolved recipe and what a run of it would do and cost."""
    state = PartialState()
    processes = processes or state.num_processes
    speed = measured_flops(state.device, getattr(torch, recipe.target.dtype))
    table = Table.grid(padding=(0, 2))
    for row in lines(make_plan(recipe, processes, *counted(recipe)), recipe, processes, speed):
        table.add_row(*row)
    console = Console(soft_wrap=True)
    console.print(yaml.safe_dump(recipe.to_dict(), sort_keys=False), highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
