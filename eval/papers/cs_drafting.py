"""CS Drafting's Table 2 (arXiv 2312.11462): SD, Max-Gram and cascades, each tuned by itself.

Once with the drafters of a recipe's runs, once with students of every seed. The rows, and how they
are tuned, are those of eval/papers/contenders.py. The paper's figures are SWI by model size on
GSM8K, FLAN-T5 targets: the best plain SD, one neural drafter above Max-Gram, and the cascade.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from specdraft.data.prompts import load_prompts, tuning_prompts
from specdraft.eval.drafters.registry import load_trained
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.tuning import overrides, recipe_part
from specdraft.eval.papers.contenders import Contender, contenders, measured, tuned
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.students import MEASURED, OverStudents, student, weights_of
from specdraft.eval.papers.table import Found, Paper, Plan, Row, Table
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import Count

TOGETHER = {  # categories together
    "SWI, parameters": "swi_params",
    "SWI, measured": "swi_measured",
    "x plain": "speedup",
    "tokens/step": "tokens_per_step",
}
APART = {"SWI": "swi_measured", "x": "speedup"}  # by category
BEST_SD, BEST_PAIR, GAIN = "best SD", "best of one student + MaG", "best cascade / best SD"


@dataclass(frozen=True, kw_only=True)
class TunedCascades(Table):
    """The rows with the drafters that a recipe names, by category.

    Each is tuned on `prompts` prompts that are not measured, by wall-clock or by SWI
    (eval/measure/tuning.py), then all take turns on the measured ones.
    """

    name, source = "tuned_cascades", "CS Drafting, Table 2, with the drafters of a recipe's runs"
    recipe: ClassVar[str] = "recipes/tiny_cascades.yaml"
    seeds: ClassVar[tuple[int, ...]] = ()
    by: Literal["wall", "swi"] = "wall"
    candidates: Count = 16  # of the first rung
    prompts: Count = 16  # of the last rung

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Every row, tuned, and the best cascade over the best SD."""
        recipe = self.loaded(plan, "eval.methods=[plain, maxgram, cascade]")
        if recipe.eval.batch_size > 1:
            raise RecipeError(
                f"eval.batch_size = {recipe.eval.batch_size}: a batch mixes categories; set it to 1"
            )
        target = Target.of_recipe(recipe.target)
        trained = load_trained(recipe, target)
        unseen = tuning_prompts(recipe, target.tokenizer, self.prompts)
        prompts = load_prompts(recipe, target.tokenizer)
        rows = [
            tuned(row, target, unseen, self.candidates, self.by)
            for row in contenders(recipe, trained)
        ]
        with cpu_threads(recipe.eval.threads):
            where = environment(target)
            prompts = expand_turns(recipe, target, prompts)
        runs = measured(rows, target, prompts)
        found = {row.name: _row(row, run) for row, run in zip(rows, runs, strict=True)}
        return Found(found | best_of({row.name: row.method for row in rows}, found), where, runs)


def _row(row: Contender, run: dict) -> Row:
    figures = {title: run[key] for title, key in TOGETHER.items()}
    for part in run["categories"]:
        figures |= {f"{part['category']}: {title}": part[key] for title, key in APART.items()}
    cells = {title: {"mean": value} for title, value in figures.items()}
    setting = shlex.join(overrides(recipe_part(row.recipe, row.setting)))
    return Row(cells, [run], setting)


def best_of(methods: dict[str, str], found: dict[str, Row]) -> dict[str, Row]:
    """The best rows of a kind by SWI, and the best cascade over the best SD by every figure."""
    alone = [found[name] for name, method in methods.items() if method == "ssd"]
    cascades = {name: found[name] for name, method in methods.items() if method == "cascade"}
    pairs = [row for name, row in cascades.items() if name.count("+") == 1]

    def by(title: str) -> Callable[[Row], float]:
        return lambda row: row.figures[title]["mean"]

    swi, ratios = by("SWI, parameters"), {}
    for title in alone[0].figures:
        ratio = max(map(by(title), cascades.values())) / max(map(by(title), alone))
        ratios[title] = {"mean": ratio}
    return {BEST_SD: max(alone, key=swi), BEST_PAIR: max(pairs, key=swi), GAIN: Row(ratios)}


@dataclass(frozen=True, kw_only=True)
class CascadeTable(OverStudents):
    """Students of two layers (1) and of one (2) from every seed; tuned by SWI."""

    name, source = "cascades", "CS Drafting, Table 2: SD, Max-Gram and cascades"
    inner, columns = TunedCascades, tuple(TOGETHER)
    paper: ClassVar[Paper] = {
        "best SD": {"SWI, parameters": 3.38},
        "best of one student + MaG": {"SWI, parameters": 3.62},
        "1 + 2 + MaG": {"SWI, parameters": 3.75},
    }

    def students(self, plan: Plan, seed: int) -> list[Job]:
        """The larger one, and one that keeps only the target's last layer."""
        smaller = student(plan, seed, "one_layer", "student.keep_layers=[11]")
        return [student(plan, seed), smaller]

    def maxgram(self, plan: Plan) -> Job:
        """The Max-Gram table: counted, so the same for every seed."""
        settings = (*MEASURED, *plan.overrides, "train.steps=1", "train.epochs=null")
        methods = ("eval.methods=[plain,maxgram]",)
        folder = plan.runs / "students" / "maxgram"
        return Job("train/maxgram.py", "recipes/tiny_maxgram.yaml", (*settings, *methods), folder)

    def drafters(self, plan: Plan, seed: int) -> list[Job]:
        """Both students, and the table."""
        return [*self.students(plan, seed), self.maxgram(plan)]

    def settings(self, plan: Plan, seed: int) -> tuple[str, ...]:
        """All drafters, and a shorter search."""
        weights = [weights_of(job) for job in self.students(plan, seed)]
        return (
            f"student.model={weights[0]}",
            f"cascade.students=[{','.join(weights)}]",
            f"maxgram.table={self.maxgram(plan).folder / 'table'}",
            "eval.methods=[plain, maxgram, cascade]",
            *("table.by=swi", "table.candidates=8", "table.prompts=8"),
        )

    def comparison(self, plan: Plan, seed: int) -> Job:
        """Of the recipe that has several students, whatever they are trained by."""
        return super().comparison(replace(plan, recipe=None), seed)
