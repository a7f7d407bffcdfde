"""Falcon beside EAGLE-1 and Medusa: equal data, steps and verified nodes, several seeds, one run.

Every head is trained by its own script from every seed; then all of them take turns on the same
prompts, with plain decoding, the Falcon head also as a chain. `variants` are further forms of it:
without CSGD, other block sizes. Rows that differ in `eval` alone decode with one head, and those
whose names end so draft chains, or as much as is worth it by what steps cost here. The last two
columns are Falcon's tree over a row. The paper's are of its section 5, by wall-clock.

With a shape, all of them decode at the cost of a larger model (eval/costing/enlarged.py): the
paper's comparison at the paper's ratios of costs, with heads that are trained in minutes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import attrgetter

from specdraft.eval.costing.enlarged import enlarge_entrants
from specdraft.eval.costing.measuring import cover_rows
from specdraft.eval.costing.shapes import Shape, find_shape
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.methods.registry import METHODS, load_trained, problems
from specdraft.eval.methods.trained import Trained
from specdraft.eval.papers.contenders import Contender, asked, measured
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.table import Found, Plan, Row, Table, over_seeds
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import OutputSection, Recipe
from specdraft.recipes.sections.evaluation import EvalSection

DRAFTING = ("eval.compile", "eval.head_dtype")  # settings that no training depends on
DRAFTS = ("chain", "dynamic")  # what a row's name ends with where it drafts none of a head's trees
OVER = {"ours over it: tokens/step": "tokens_per_step", "ours over it: speed": "speedup"}


@dataclass(frozen=True)
class Rival:
    """A row: a head that is trained from every seed, and how it decodes."""

    table: str  # whose row it is
    name: str
    path: str  # of its recipe
    overrides: tuple[str, ...]
    measured: tuple[str, ...] = ()  # further overrides of decoding, not of training
    trained_as: "Rival | None" = None  # whose head it takes; None: its own

    @cached_property
    def method(self) -> str:
        """How its head drafts: by a tree, unless its name ends in another way to."""
        recipe = load_recipe(self.path, [*self.overrides, *self.measured], check=problems)
        way = self.name.rpartition(", ")[2]
        return f"{recipe.kind}_{way if way in DRAFTS else 'tree'}"

    @property
    def training(self) -> tuple[str, Recipe]:
        """What its head depends on, besides the seed."""
        return METHODS[self.method].trainer, replace(self.recipe, eval=EvalSection())

    @cached_property
    def recipe(self) -> Recipe:
        """What it decodes with. Raises RecipeError."""
        methods = f"eval.methods=[{REFERENCE},{self.method}]"
        return load_recipe(self.path, [*self.overrides, *self.measured, methods], check=problems)

    def job(self, plan: Plan, seed: int) -> Job:
        """The run that trains its head from a seed."""
        if self.trained_as:
            return self.trained_as.job(plan, seed)
        name = re.sub(r"\W+", "_", self.name)
        # It is measured in turns with the others, not at the end of its run.
        common = (one for one in self.overrides if not one.startswith(DRAFTING))
        overrides = (*common, f"train.seed={seed}", f"eval.methods=[{REFERENCE}]")
        script = METHODS[self.method].trainer
        return Job(script, self.path, overrides, plan.runs / self.table / f"{name}-seed{seed}")

    def contender(self, plan: Plan, seed: int, target: Target) -> Contender:
        """The head of a seed."""
        folder = self.job(plan, seed).folder
        recipe = replace(self.recipe, output=OutputSection(dir=str(folder)))
        head = load_trained(recipe, target, [self.method])
        return Contender(f"{self.name}, seed {seed}", self.method, recipe, head)


@dataclass(frozen=True, kw_only=True)
class RivalTable(Table):
    """The heads as rows."""

    # What rivals have in common with ours, or the comparison would not be fair.
    equal: tuple[str, ...] = (
        "target.model",
        "data",
        "train.steps",
        "train.batch_size",
        "train.rollout",
    )
    # Other heads, by row: a recipe, and what it is overridden by.
    against: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "eagle": ("recipes/tiny_eagle.yaml",),
            "medusa": ("recipes/tiny_medusa.yaml",),
        }
    )

    # Rows that are left out: those whose names begin so.
    without: tuple[str, ...] = ()
    # What they are measured with, and not trained: target.dtype=bfloat16, eval.batch_size=8, ..
    measured: tuple[str, ...] = ()
    # They decode at the cost of a larger model: llama7b, .., or a config.json's; null: their own.
    shape: str | None = None

    def larger(self) -> Shape | None:
        """What they are enlarged to. Raises RecipeError."""
        return find_shape(self.shape) if self.shape else None

    def line_up(self, plan: Plan) -> list[Rival]:
        """Falcon's rows, then the others'; RecipeError where the comparison would not be fair.

        A head has one folder, whichever of its rows are left out.
        """
        left_out, path = tuple(self.without), plan.recipe or self.recipe
        ours = {"falcon": (), "falcon, chain": (), **self.variants}
        rows = [(name, path, changes) for name, changes in ours.items()]
        rows += [(name, other, changes) for name, (other, *changes) in self.against.items()]
        rivals, first = [], load_recipe(path, [*self.overrides, *plan.overrides], check=problems)
        for name, recipe, changes in rows:
            overrides = (*self.overrides, *plan.overrides, *changes)
            rival = Rival(self.name, name, recipe, overrides, self.measured)
            try:
                own = rival.recipe
                if name in self.against:
                    check_fair(first, own, self.equal)
            except RecipeError:
                if name.startswith(left_out):
                    continue  # it need not go with what was overridden
                raise
            rivals.append(rival)
        return [one for one in _sharing(rivals) if not one.name.startswith(left_out)]

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: the heads."""
        self.larger()  # an unknown shape is told before anything is trained
        return [[rival.job(plan, seed) for rival in self.line_up(plan)]]

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Measure every head of every seed in turns with plain decoding."""
        rivals = self.line_up(plan)
        recipe = rivals[0].recipe
        target = Target.of_recipe(recipe.target)
        rows = [Contender(REFERENCE, REFERENCE, recipe, Trained())]
        rows += [rival.contender(plan, seed, target) for rival in rivals for seed in seeds]
        prompts = asked(recipe, target)
        if shape := self.larger():
            target, rows = enlarge_entrants(shape, rows, target)
        for row in rows:
            if METHODS[row.method].is_priced:
                cover_rows(row.recipe, target, row.trained, row.recipe.eval.batch_size)
        runs = measured(rows, target, prompts)
        trained = islice(runs, 1, None)
        found = {rival.name: [*islice(trained, len(seeds))] for rival in rivals}
        ours = found[rivals[0].name]
        with cpu_threads(recipe.eval.threads):
            where = environment(target)
        return Found({name: self.over(own, ours) for name, own in found.items()}, where, runs)

    def over(self, runs: Sequence[dict], ours: Sequence[dict]) -> Row:
        """A rival's figures over seeds, and ours over its, seed by seed."""
        cells = {t: over_seeds([run[key] for run in runs]) for t, key in self.columns.items()}
        for title, key in OVER.items():
            cells[title] = over_seeds([a[key] / b[key] for a, b in zip(ours, runs, strict=True)])
        return Row(cells, runs)


def _sharing(rivals: Sequence[Rival]) -> list[Rival]:
    """Have rivals that are trained alike share a head: that of the first of them."""
    trained = [one.training for one in rivals]
    first = [rivals[trained.index(own)] for own in trained]
    pairs = zip(rivals, first, strict=True)
    return [one if one is other else replace(one, trained_as=other) for one, other in pairs]


def check_fair(ours: Recipe, theirs: Recipe, equal: Sequence[str]) -> None:
    """RecipeError where two recipes differ in what must be equal. Medusa has no rollout, EAGLE-3's
    is part of it, and so are the layers of the target that a head reads."""
    ours = replace(ours, data=replace(ours.data, feature_layers=theirs.data.feature_layers))
    for key in equal:
        mine, other = (attrgetter(key)(recipe) for recipe in (ours, theirs))
        own_rollout = theirs.medusa.given or theirs.head.fusion == "layers"
        if mine != other and not (own_rollout and key == "train.rollout"):
            raise RecipeError(
                f"{key} of {ours.name} and {theirs.name} differ ({mine} and {other}): "
                "set it for both, on the command line"
            )
