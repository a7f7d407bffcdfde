"""Falcon beside EAGLE-1 and Medusa: equal data, steps and verified nodes, several seeds, one run.

Every head is trained by its own script from every seed; then all of them take turns on the same
prompts, with plain decoding. Two rows more show the method's parts: the Falcon head as a chain,
without tree attention, and one that was trained without CSGD (with it, where the recipe has none).
The last two columns are Falcon's tree over a row. The paper's are of its section 5, by wall-clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from specdraft.data.prompts import load_prompts
from specdraft.eval.drafters.registry import METHODS, load_trained, problems
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.papers.contenders import Contender, measured
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.table import Found, Paper, Plan, Row, Table, over_seeds
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

TREE, CHAIN = "falcon_tree", "falcon_chain"
FIGURES = {
    "tokens/step": "tokens_per_step",
    "x plain": "speedup",
    "nodes/step": "drafted_per_step",
    "passes/step": "drafter_forwards_per_step",
    "drafting, ms/step": "draft_ms_per_step",
}
OVER = {"ours over it: tokens/step": "tokens_per_step", "ours over it: time": "speedup"}


@dataclass(frozen=True)
class Rival:
    """A row: a head that is trained from every seed, and how it decodes."""

    name: str
    path: str  # of its recipe
    overrides: tuple[str, ...]
    method: str

    @property
    def recipe(self) -> Recipe:
        methods = f"eval.methods=[{REFERENCE},{self.method}]"
        return load_recipe(self.path, [*self.overrides, methods], check=problems)

    def job(self, plan: Plan, seed: int) -> Job:
        """Its run from a seed. A chain is decoded with the head of the tree's run."""
        name = self.name.removesuffix(", chain").replace(" ", "_")
        trained = TREE if self.method == CHAIN else self.method
        overrides = (*self.overrides, f"train.seed={seed}", f"eval.methods=[plain,{trained}]")
        script = METHODS[self.method].trainer
        return Job(script, self.path, overrides, plan.runs / "rivals" / f"{name}-seed{seed}")


@dataclass(frozen=True, kw_only=True)
class RivalTable(Table):
    """The heads as rows."""

    name, source = "rivals", "Falcon, section 5: Falcon, EAGLE-1 and Medusa"
    against: tuple[str, ...] = ("recipes/tiny_eagle.yaml", "recipes/tiny_medusa.yaml")
    paper: ClassVar[Paper] = {
        name: {"ours over it: time": ratio}
        for name, ratio in {
            "falcon, chain": 1.12,
            "falcon without CSGD": 1.10,
            "eagle": 1.10,
            "medusa": 1.50,
        }.items()
    }

    def line_up(self, plan: Plan) -> list[Rival]:
        """Falcon's rows, then the others'; RecipeError where the comparison would not be fair."""
        path, common = plan.recipe or self.recipe, ("train.steps=800", *plan.overrides)
        ours = Rival("falcon", path, common, TREE)
        with_glance = ours.recipe.glance.enabled
        other = f"falcon {'without' if with_glance else 'with'} CSGD"
        glance = f"glance.enabled={'false' if with_glance else 'true'}"
        rivals = [
            ours,
            Rival("falcon, chain", path, common, CHAIN),
            Rival(other, path, (*common, glance), TREE),
        ]
        for rival_path in self.against:
            recipe = load_recipe(rival_path, list(common), check=problems)
            method = "medusa_tree" if recipe.medusa.given else "eagle_tree"
            rivals.append(Rival(method.removesuffix("_tree"), rival_path, common, method))
            check_fair(ours.recipe, rivals[-1].recipe)
        return rivals

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: the heads."""
        return [[rival.job(plan, seed) for rival in self.line_up(plan)]]

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Measure every head of every seed in turns with plain decoding."""
        rivals = self.line_up(plan)
        recipe = rivals[0].recipe
        target = Target.of_recipe(recipe.target)
        with cpu_threads(recipe.eval.threads):
            prompts = expand_turns(recipe, target, load_prompts(recipe, target.tokenizer))
            where = environment(target)
        rows = [Contender(REFERENCE, REFERENCE, recipe, Trained())]
        rows += [_trained(rival, plan, seed, target) for rival in rivals for seed in seeds]
        runs = measured(rows, target, prompts)
        by_name = {run["row"]: run for run in runs}
        found = {r.name: [by_name[_of(r.name, seed)] for seed in seeds] for r in rivals}
        ours = found[rivals[0].name]
        return Found({name: over(own, ours) for name, own in found.items()}, where, runs)


def check_fair(ours: Recipe, theirs: Recipe) -> None:
    """RecipeError where two heads would not learn from the same data for the same steps."""
    for key in ("target.model", "data", "train.steps", "train.batch_size", "train.rollout"):
        section, _, name = key.partition(".")
        mine, other = (getattr(recipe, section) for recipe in (ours, theirs))
        if name:
            mine, other = getattr(mine, name), getattr(other, name)
        if mine != other and not (theirs.medusa.given and name == "rollout"):
            raise RecipeError(
                f"{key} of {ours.name} and {theirs.name} differ ({mine} and {other}): "
                "set it for both, on the command line"
            )


def _of(name: str, seed: int) -> str:
    return f"{name}, seed {seed}"


def _trained(rival: Rival, plan: Plan, seed: int, target: Target) -> Contender:
    own = rival.recipe
    own = replace(own, output=replace(own.output, dir=str(rival.job(plan, seed).folder)))
    return Contender(_of(rival.name, seed), rival.method, own, load_trained(own, target))


def over(runs: Sequence[dict], ours: Sequence[dict]) -> Row:
    """A rival's figures over seeds, and ours over its, seed by seed."""
    cells = {title: over_seeds([run[key] for run in runs]) for title, key in FIGURES.items()}
    for title, key in OVER.items():
        cells[title] = over_seeds([a[key] / b[key] for a, b in zip(ours, runs, strict=True)])
    return Row(cells, runs)
