"""Distil a draft LM: conversations -> tokens -> features -> student -> measured student.

    accelerate launch train/distill.py recipes/tiny_distill.yaml [section.key=value ..]
    python train/distill.py recipes/vicuna7b_distill.yaml --dry-run

The student lies in `output.dir`/student as a plain Hugging Face model. Every stage continues where
an earlier run stopped. A student that is used as it is (student.training=none) is only measured.
"""

from specdraft.recipes.entry import entry

import logging
from pathlib import Path

from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from specdraft.data.prompts import load_prompts
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.sourced import Sourced
from specdraft.eval.generation.answers import build_caches, build_token_cache
from specdraft.eval.methods.trained import Trained
from specdraft.models.embeddings import check_no_bias
from specdraft.models.hub import check_login
from specdraft.models.student import finished_student, make_student
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.schema import Recipe
from specdraft.train.command import LoadTarget, run
from specdraft.train.finish import finish
from specdraft.train.fit.batches import Rows
from specdraft.train.fit.continued import SHARDING
from specdraft.train.fit.loop import fit
from specdraft.train.heads import check_methods, measuring
from specdraft.train.objectives.distillation import Distillation
from specdraft.train.objectives.on_policy import check_prompts


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    # What a checkpoint says of tied weights and of every file it writes is no news to a user.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    run(__doc__, train, check)


def check(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe without a student, or that measures with something else."""
    if not recipe.student.given:
        raise RecipeError(
            f"{recipe.name}: no student; set one of student.layers, student.keep_layers and "
            "student.model"
        )
    if recipe.hub.repo_id and recipe.student.training == "none":
        raise RecipeError(
            f"hub.repo_id = {recipe.hub.repo_id}: student.training=none makes nothing to push"
        )
    check_methods(recipe, ("student",), "train/distill.py has a student only")


def train(recipe: Recipe, accelerator: Accelerator, load_target: LoadTarget) -> None:
    """Run every stage of a recipe; all ranks call this."""
    check_login(recipe.hub)
    target = load_target()
    prompts = load_prompts(recipe, target.tokenizer)
    measure = measuring(recipe, target, "ssd", lambda model: Trained(student=model.as_target()))
    if recipe.student.training != "none":
        if recipe.distill.divergences:
            check_no_bias(target.lm_head, target.name)
        student = make_student(recipe.student, target, recipe.train.seed)
        if recipe.train.checkpointing:
            student.checkpoint_layers()
        data = rows(recipe, accelerator, target)
        objective = Distillation(recipe, student, target)
        if not measure and isinstance(getattr(data, "features", data), FeatureCache):
            # Its embeddings are enough: leave the memory.
            objective, target = Distillation(recipe, student, target.embeddings()), None
        fit(student, data, objective, recipe, accelerator, measure)
    if accelerator.is_main_process:
        with keeping(lambda: f"{recipe.output.dir}/student is trained"):
            target = target or load_target(alone=True)
            kept = finished_student(recipe.student, Path(recipe.output.dir) / "student", target)
            finish(recipe, "student", target, Trained(student=kept), prompts)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def rows(recipe: Recipe, accelerator: Accelerator, target: Target) -> Rows:
    """Build what the student is trained on: with features where the text is known beforehand."""
    distill = recipe.distill
    if distill.on_policy and accelerator.distributed_type in SHARDING:
        raise RecipeError(
            f"distill.on_policy = {distill.on_policy}: the student writes with whole weights; "
            "launch without DeepSpeed and FSDP, or set it to 0"
        )
    if distill.divergences and not distill.on_policy:
        tokens, features = build_caches(recipe, target, accelerator)
        return Sourced(tokens, features) if tokens.has_sources else features
    tokens = build_token_cache(recipe, target, accelerator)
    if distill.on_policy:
        check_prompts(tokens)
    return tokens


if __name__ == "__main__":
    main()
