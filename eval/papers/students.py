"""Students that tables draft with: distilled from every seed, for equal steps."""

from dataclasses import dataclass
from typing import ClassVar

from specdraft.eval.papers.jobs import SHORT, Job
from specdraft.eval.papers.table import Plan, Row, SeededTable, Table

MEASURED = SHORT[2:]  # where nothing is trained
EQUAL = ("train.steps=300", *SHORT, "eval.methods=[plain,ssd]")
DISTILLED = "recipes/tiny_distill.yaml"


def student(plan: Plan, seed: int, name: str = "student", *overrides: str) -> Job:
    """The training of a student, the recipe's or one that overrides make of it, from a seed."""
    settings = (*EQUAL, *plan.overrides, *overrides, f"train.seed={seed}")
    folder = plan.runs / "students" / f"{name}-seed{seed}"
    return Job("train/distill.py", plan.recipe or DISTILLED, settings, folder)


def weights_of(job: Job) -> str:
    """Where a student's training leaves it."""
    return str(job.folder / "student")


def drafting_with(job: Job) -> tuple[str, ...]:
    """Overrides with which a recipe drafts with a student that a job trained, as it is."""
    return ("student.keep_layers=null", f"student.model={weights_of(job)}", "student.training=none")


@dataclass(frozen=True, kw_only=True)
class OverStudents(SeededTable):
    """A table of what a recipe's runs have trained, made with a student of every seed instead."""

    inner: ClassVar[type[Table]]
    recipe: ClassVar[str] = DISTILLED
    columns: ClassVar[tuple[str, ...]] = ()  # of the inner table; none: all

    def drafters(self, plan: Plan, seed: int) -> list[Job]:
        """What is trained for it."""
        return [student(plan, seed)]

    def settings(self, plan: Plan, seed: int) -> tuple[str, ...]:
        """Overrides with which the inner table uses that."""
        return drafting_with(student(plan, seed))

    def comparison(self, plan: Plan, seed: int) -> Job:
        """The inner table, of one seed."""
        recipe, seeds = plan.recipe or self.inner.recipe, (seed,) if self.inner.seeds else ()
        settings = (*MEASURED, *self.settings(plan, seed), *plan.overrides)
        folder = plan.runs / self.name / f"table-seed{seed}"
        return Job("eval/paper.py", recipe, settings, folder, self.inner.name, seeds)

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """All drafters, then the comparison."""
        return [self.drafters(plan, seed), [self.comparison(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The rows of the inner table."""
        found = {}
        for row in self.comparison(plan, seed).report()["rows"]:
            ours = {title: cell["mean"] for title, cell in row["ours"].items()}
            shown = {title: ours[title] for title in self.columns or ours}
            found[row["row"]] = Row(shown, [row])
        return found
