"""CS Drafting's Table 2 (arXiv 2312.11462): SD, Max-Gram and cascades, each tuned by itself.

Once with the drafters of a recipe's runs, once with students of every seed. The rows, and how they
are tuned, are those of eval/papers/contenders.py.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specdraft.data.prompts import tuning_prompts
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.tuning import overrides, recipe_part
from specdraft.eval.methods.registry import load_trained
from specdraft.eval.papers.contenders import Contender, asked, contenders, measured, tuned
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.students import OverStudents
from specdraft.eval.papers.table import Found, Plan, Row, Table
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import Count

APART = {"SWI": "swi_measured", "x": "speedup"}  # by category
METHODS = "eval.methods=[plain, maxgram, cascade]"


@dataclass(frozen=True, kw_only=True)
class TunedCascades(Table):
    """The rows with the drafters that a recipe names, by category.

    Each is tuned on `prompts` prompts that are not measured, by wall-clock or by SWI
    (eval/measure/tuning.py), then all take turns on the measured ones.
    """

    by: Literal["wall", "swi"] = "wall"
    candidates: Count = 16  # of the first rung
    prompts: Count = 16  # of the last rung

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Every row, tuned, and the best cascade over the best SD."""
        recipe = self.loaded(plan, METHODS)
        if recipe.eval.batch_size > 1:
            raise RecipeError(
                f"eval.batch_size = {recipe.eval.batch_size}: a batch mixes categories; set it to 1"
            )
        target = Target.of_recipe(recipe.target)
        untuned = contenders(recipe, load_trained(recipe, target))
        unseen = tuning_prompts(recipe, target.tokenizer, self.prompts)
        prompts = asked(recipe, target)
        rows = [tuned(row, target, unseen, self.candidates, self.by) for row in untuned]
        runs = measured(rows, target, prompts)
        found = {row.name: self._row(row, run) for row, run in zip(rows, runs, strict=True)}
        found |= best_of({row.name: row.method for row in rows}, found)
        with cpu_threads(recipe.eval.threads):
            return Found(found, environment(target), runs)

    def _row(self, row: Contender, run: dict) -> Row:
        figures = dict(self.row(run).figures)
        for part in run["categories"]:
            figures |= {f"{part['category']}: {title}": part[key] for title, key in APART.items()}
        cells = {title: {"mean": value} for title, value in figures.items()}
        return Row(cells, [run], shlex.join(overrides(recipe_part(row.recipe, row.setting))))


def best_of(methods: Mapping[str, str], found: Mapping[str, Row]) -> dict[str, Row]:
    """The best rows of a kind by SWI, and by every figure the best cascade over the best SD, and
    over the best drafter that is none, Max-Gram among them."""
    students = [found[name] for name, method in methods.items() if method == "ssd"]
    alone = students + [found[name] for name, method in methods.items() if method == "maxgram"]
    cascades = {name: found[name] for name, method in methods.items() if method == "cascade"}
    pairs = [row for name, row in cascades.items() if name.count("+") == 1]

    def best(rows: Sequence[Row], title: str = "SWI, parameters") -> Row:
        return max(rows, key=lambda row: row.figures[title]["mean"])

    def over(singles: Sequence[Row]) -> Row:
        ratios = {}
        for title in singles[0].figures:
            both = (best(rows, title).figures[title] for rows in ([*cascades.values()], singles))
            cascade, single = (figure["mean"] for figure in both)
            ratios[title] = {"mean": cascade / single}
        return Row(ratios)

    return {
        "best SD": best(students),
        "best of one student + MaG": best(pairs),
        "best cascade / best SD": over(students),
        "best cascade / best single drafter": over(alone),
    }


@dataclass(frozen=True, kw_only=True)
class CascadeTable(OverStudents, TunedCascades):
    """Students of two layers (1) and of one (2) from every seed, all categories together."""

    def students(self, plan: Plan, seed: int) -> list[Job]:
        """The larger one, and one that keeps only the target's last layer."""
        smaller = self.student(plan, seed, "one_layer", "student.keep_layers=[11]")
        return [self.student(plan, seed), smaller]

    def maxgram(self, plan: Plan) -> Job:
        """The Max-Gram table: counted, so the same for every seed."""
        steps = ("train.steps=1", "train.epochs=null", "eval.methods=[plain,maxgram]")
        counted = replace(plan, recipe="recipes/tiny_maxgram.yaml")
        return self.job(counted, "train/maxgram.py", "students/maxgram", *steps)

    def drafters(self, plan: Plan, seed: int) -> list[Job]:
        """Both students, and the table."""
        return [*self.students(plan, seed), self.maxgram(plan)]

    def drafting(self, plan: Plan, seed: int) -> tuple[str, ...]:
        """Overrides with which a recipe drafts with all of them."""
        weights = [str(job.folder / "student") for job in self.students(plan, seed)]
        students = f"cascade.students=[{','.join(weights)}]"
        table = f"maxgram.table={self.maxgram(plan).folder / 'table'}"
        return (f"student.model={weights[0]}", students, table, METHODS)

    def comparison(self, plan: Plan, seed: int) -> Job:
        """The inner table of one seed, made with the recipe that has several students whatever
        recipe they are trained by."""
        return super().comparison(replace(plan, recipe=None), seed)

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The rows without their categories."""
        found = {}
        for name, row in super().rows(plan, seed).items():
            together = {title: row.figures[title] for title in self.columns}
            found[name] = Row(together, row.runs)
        return found
