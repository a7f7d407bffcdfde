"""Students that tables draft with: distilled from every seed, for equal steps."""

from dataclasses import dataclass

from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.table import Plan, Row, SeededTable, described
from specdraft.recipes.fields import plain

EQUAL = (
    "train.steps=300",
    "train.eval_every=null",
    "train.save_every=null",
    "eval.limit=20",
    "eval.max_new_tokens=64",
    "eval.methods=[plain,ssd]",
)


@dataclass(frozen=True, kw_only=True)
class OverStudents(SeededTable):
    """A table of what a recipe's runs have trained, made with a student of every seed instead."""

    def student(self, plan: Plan, seed: int, name: str = "student", *overrides: str) -> Job:
        """The training of a student, the recipe's or one that overrides make of it."""
        settings = (*EQUAL, *plan.overrides, *overrides, f"train.seed={seed}")
        folder = plan.runs / "students" / f"{name}-seed{seed}"
        return Job("train/distill.py", plan.recipe or self.recipe, settings, folder)

    def drafters(self, plan: Plan, seed: int) -> list[Job]:
        """What is trained for it."""
        return [self.student(plan, seed)]

    def drafting(self, plan: Plan, seed: int) -> tuple[str, ...]:
        """Overrides with which a recipe drafts with that, as it is."""
        model = f"student.model={self.student(plan, seed).folder / 'student'}"
        return ("student.keep_layers=null", model, "student.training=none")

    def comparison(self, plan: Plan, seed: int) -> Job:
        """The inner table of one seed, with what this one sets of it."""
        inner = described()[self.inner]
        own = (f"table.{key}={plain(value)}" for key, value in self.settings().items())
        settings = (*self.overrides, *self.drafting(plan, seed), *own, *plan.overrides)
        folder = plan.runs / self.name / f"table-seed{seed}"
        seeds = () if inner.get("seeds") == [] else (seed,)
        recipe = plan.recipe or inner["recipe"]
        return Job("eval/paper.py", recipe, settings, folder, self.inner, seeds)

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """All drafters, then the comparison."""
        return [self.drafters(plan, seed), [self.comparison(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The rows of the inner table."""
        found = {}
        for row in self.comparison(plan, seed).report()["rows"]:
            figures = {title: cell["mean"] for title, cell in row["ours"].items()}
            found[row["row"]] = Row(figures, [row])
        return found
