"""The stages that every kind of head goes through: tokens, features, training, tree, measuring.

Falcon, EAGLE and Medusa heads read features of the target and differ in a `Kind`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from specdraft.data.prompts import HOLDOUT, load_prompts, validation_prompts
from specdraft.data.store.corpus import CachedTokens
from specdraft.data.store.feature_cache import FeatureCache, Features
from specdraft.data.store.tokens import TokenCache, frequent_tokens
from specdraft.eval.costing.fitting import fit_tree, is_fitted, leave_tree
from specdraft.eval.costing.race import fitting_prompts
from specdraft.eval.costing.shares import TreeDrafter
from specdraft.eval.costing.show import print_fit
from specdraft.eval.generation.answers import build_caches
from specdraft.eval.measure.report import tokens_per_step
from specdraft.eval.methods.registry import needs
from specdraft.eval.methods.trained import KINDS, Trained
from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.embeddings import TargetEmbeddings, check_no_bias
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.hub import check_login
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.medusa import MedusaHeads
from specdraft.models.shapes import TargetShape, eagle3_config, head_config, medusa_config
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import AUTO
from specdraft.train.command import LoadTarget, run
from specdraft.train.counting.table import make_table
from specdraft.train.finish import finish
from specdraft.train.fit.loop import fit
from specdraft.train.fit.run import Evaluate, Objective
from specdraft.train.objectives.ahead import TokensAhead
from specdraft.train.objectives.csgd import CoupledGlancing
from specdraft.train.objectives.training_time_test import TrainingTimeTest
from specdraft.train.start_layer import check_start_layer, start_from_layer


@dataclass(frozen=True)
class Kind:
    """What a kind of head has of its own."""

    field: str  # of `Trained`
    name: str  # of its methods: NAME_chain, NAME_tree
    make: Callable[[Recipe, Target, Features], nn.Module]
    objective: Callable[[Recipe, TargetEmbeddings, nn.Module], Objective]
    # Raises RecipeError for a recipe's head that does not fit the target.
    check: Callable[[Recipe, Target], None] = lambda recipe, target: None

    def check_methods(self, recipe: Recipe) -> None:
        """Raise RecipeError for a recipe of another kind of head, or whose eval.methods draft with
        another kind of drafter."""
        if recipe.head.model is not None:
            raise RecipeError(
                f"head.model = {recipe.head.model}: it is trained already; measure it: python "
                "eval/bench.py, or set it to null"
            )
        layered = recipe.head.fusion == "layers"
        if self.field == "head" and layered != (self.name == "eagle3"):
            raise RecipeError(
                f"head.fusion = {recipe.head.fusion}: "
                + (
                    "an EAGLE-3 head, trained by train/eagle3.py"
                    if layered
                    else "EAGLE-3 has head.fusion=layers; set it and data.feature_layers"
                )
            )
        only = f"here is trained what {self.name}_tree drafts with, and nothing else"
        # A table is counted in seconds, from what the head learns.
        check_methods(recipe, (self.field, "table"), only)
        _check_holdout(recipe)

    def judge(self, recipe: Recipe) -> str:
        """Return the method whose tokens per step choose the head that is kept: of chains where the
        tree is fitted only afterwards, else of the recipe's tree."""
        return f"{self.name}_{'chain' if recipe.eval.tree == AUTO else 'tree'}"


def check_methods(recipe: Recipe, kinds: Collection[str], only: str) -> None:
    """Raise RecipeError for a recipe that measures with other kinds of drafters."""
    for name in recipe.eval.methods:
        if others := [need for need in needs(name) if need not in kinds]:
            raise RecipeError(f"eval.methods: {name} needs {KINDS[others[0]].remedy}; {only}")


def _check_holdout(recipe: Recipe) -> None:
    """Raise RecipeError where every held-out prompt is measured: none is left to choose a head and
    to fit its tree on."""
    held, limit = recipe.data.holdout, recipe.eval.limit
    if recipe.eval.prompts != HOLDOUT or recipe.eval.tree != AUTO or (limit and limit < held):
        return
    fewer = f"eval.limit={held // 2}, or " if held > 1 else ""
    more = (limit or held) + recipe.eval.validation
    raise RecipeError(
        f"eval.limit = {limit} and data.holdout = {held}: all that is held out is measured, and "
        f"nothing is left to choose a head and fit its tree on; set {fewer}data.holdout={more}"
    )


def head_kind(name: str) -> Kind:
    """The kind of head that recipes/find.py calls so."""
    if name == "medusa":
        return Kind(
            "medusa", name, _new_medusa_heads, lambda recipe, target, _: TokensAhead(recipe, target)
        )
    make, learns = _new_sar_head, CoupledGlancing
    if name == "eagle3":
        make, learns = _new_eagle3_head, TrainingTimeTest

    def objective(recipe: Recipe, target: TargetEmbeddings, head: nn.Module) -> Objective:
        return learns(recipe, target, head.config, head.draft_ids)

    return Kind("head", name, make, objective, _check_head)


def _new_eagle3_head(recipe: Recipe, target: Target, data: Features) -> Eagle3Head:
    """Make the recipe's head, whose lm_head begins as the target's."""
    torch.manual_seed(recipe.train.seed)
    shape, ids = TargetShape.of(target.config), None
    config = eagle3_config(recipe, shape, identity=target.identity())
    if config.draft_vocab is not None:
        ids = _drafted(config, target, data)
    weight = target.embeddings().lm_head_weight.cpu()
    head = Eagle3Head.of(config, weight, ids, data.scales["feature_scale"])
    head.checkpointing = recipe.train.checkpointing
    return head


def _drafted(config: FalconConfig | Eagle3Config, target: Target, data: Features) -> Tensor:
    """The ids that a head of this config drafts among, [N], ascending."""
    vocabulary = config.draft_vocab, config.vocab_size, target.eos_ids
    return frequent_tokens(data.answers(), *vocabulary)


def _check_head(recipe: Recipe, target: Target) -> None:
    """Raise RecipeError for a shape that no head has, and for eos tokens that are never drafted."""
    head, ends = recipe.head, target.eos_ids
    make = eagle3_config if head.fusion == "layers" else head_config
    config = make(recipe, TargetShape.of(target.config))
    if head.start_layer is not None:
        check_start_layer(head.start_layer, config, target)
    if head.draft_vocab is not None and head.draft_vocab < len(ends):
        needed = f"must be {len(ends)} at least: {target.name} ends answers with as many tokens"
        raise RecipeError(head.complaint("draft_vocab", needed))


def _new_sar_head(recipe: Recipe, target: Target, data: Features) -> FalconHead:
    """Make the recipe's head, with the scales its features were measured to have."""
    torch.manual_seed(recipe.train.seed)
    config = head_config(
        recipe, TargetShape.of(target.config), **data.scales, identity=target.identity()
    )
    head = FalconHead(config)
    if config.draft_vocab is not None:
        head.draft_ids.copy_(_drafted(config, target, data))
    if recipe.head.start_layer is not None:
        start_from_layer(head, target, data, recipe.head.start_layer)
    head.checkpointing = recipe.train.checkpointing
    return head


def _new_medusa_heads(recipe: Recipe, target: Target, data: Features) -> MedusaHeads:
    """Make the recipe's heads: they start as the target's own lm_head."""
    config = medusa_config(recipe, TargetShape.of(target.config), identity=target.identity())
    return MedusaHeads.of(config, target.lm_head_weight)


def run_head(
    name: str, description: str, check: Callable[[Kind, Recipe], None] = Kind.check_methods
) -> None:
    """Parse the command line of a kind's script, and train and measure its head, or print the plan.

    check: raises RecipeError for a recipe that this script cannot run.
    """
    kind = head_kind(name)
    run(description, partial(train_head, kind), partial(check, kind))


def train_head(
    kind: Kind, recipe: Recipe, accelerator: Accelerator, load_target: LoadTarget
) -> None:
    """Run every stage of a recipe; all ranks call this."""
    check_login(recipe.hub)
    target = load_target()
    check_no_bias(target.lm_head, target.name)
    kind.check(recipe, target)
    prompts = load_prompts(recipe, target.tokenizer)
    if recipe.eval.tree == AUTO:
        fitting_prompts(recipe, target)  # now, and not behind hours of answers and training
    tokens, data = build_caches(recipe, target, accelerator)
    table = _table(recipe, target, tokens, accelerator)
    measure = measuring(
        recipe, target, kind.judge(recipe), lambda head: Trained(**{kind.field: head})
    )
    head = kind.make(recipe, target, data)
    objective = kind.objective(recipe, target.embeddings(), head)
    if not measure and isinstance(data, FeatureCache):
        target = None  # its embeddings are enough: leave the memory to the head
    fit(head, data, objective, recipe, accelerator, measure)
    if accelerator.is_main_process:
        with keeping(lambda: f"{recipe.output.dir}/{recipe.kind} is trained"):
            target = target or load_target(alone=True)
            best = TreeDrafter.of_run(recipe, target)
            if recipe.eval.tree != AUTO:
                leave_tree(recipe, best)
            elif not is_fitted(recipe, target, best):
                print_fit(*fit_tree(recipe, target, best))
            finish(recipe, recipe.kind, target, replace(best.trained, table=table), prompts)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _table(
    recipe: Recipe, target: Target, tokens: TokenCache, accelerator: Accelerator
) -> MaxGramTable | None:
    """The table that the recipe's methods draft with beside the head, if one does: what the recipe
    names, else counted from the head's own tokens; all ranks call this."""
    if not any("table" in needs(name) for name in recipe.eval.methods):
        return None
    if recipe.maxgram.table is not None:
        return KINDS["table"].load(recipe, target, Path(recipe.output.dir))
    corpus = CachedTokens(tokens, recipe.maxgram.pairs == "all")
    return make_table(recipe, target, corpus, accelerator)


def measuring(
    recipe: Recipe, target: Target, method: str, drafting_with: Callable[[nn.Module], Trained]
) -> Evaluate | None:
    """What the best drafter is chosen by: how `method` decodes the validation prompts with it.

    None where there are none, or nothing is measured while training.
    """
    prompts = validation_prompts(recipe, target.tokenizer)
    if recipe.train.eval_every is None or not prompts:
        return None

    def measure(drafter: nn.Module, step: int) -> dict[str, float]:
        speed = tokens_per_step(recipe, target, drafting_with(drafter), prompts, method)
        return {"tokens_per_step": speed}

    return measure
