"""Train a Falcon head: conversations -> tokens -> features -> head -> measured head.

    accelerate launch train/falcon.py recipes/tiny.yaml [section.key=value ..]
    python train/falcon.py recipes/vicuna7b.yaml --dry-run

Every stage continues where an earlier run stopped; the results lie in `output.dir`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from specdraft.data.features import FeatureCache
from specdraft.data.prompts import Prompt, load_prompts, validation_prompts
from specdraft.eval.answers import build_caches
from specdraft.eval.report import evaluate, print_report, write_report
from specdraft.eval.trained import Trained
from specdraft.models.falcon import FalconHead
from specdraft.models.hub import check_login
from specdraft.models.target import Target, TargetEnds
from specdraft.recipes.errors import entry
from specdraft.recipes.schema import Recipe
from specdraft.train.command import run
from specdraft.train.csgd import CoupledGlancing
from specdraft.train.loop import fit
from specdraft.train.publish import publish
from specdraft.train.shapes import TargetShape, head_config


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    run(__doc__, train)


def train(recipe: Recipe, accelerator: Accelerator, load_target: Callable[[], Target]) -> None:
    """Run every stage of a recipe; all ranks call this."""
    check_login(recipe.hub)
    target = load_target()
    _, cache = build_caches(recipe, target, accelerator)
    prompts = load_prompts(recipe, target.tokenizer)
    validation = validation_prompts(recipe, target.tokenizer)
    head = new_head(recipe, target, cache)
    objective = CoupledGlancing(recipe, TargetEnds.of(target), head.config)
    if recipe.train.eval_every is None or not validation:
        target = None  # cached training needs its two ends only: leave the memory to the head
        fit(head, cache, objective, recipe, accelerator)
    else:
        measuring = partial(measure, recipe, target, validation)
        fit(head, cache, objective, recipe, accelerator, measuring)
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
    publish(recipe, "head")


if __name__ == "__main__":
    main()
