"""CS Drafting's Table 2 (arXiv 2312.11462): SD, Max-Gram and cascades, over students' seeds."""

from dataclasses import dataclass
from typing import ClassVar

from specdraft.eval.papers.paper_students import DISTILLED, MEASURED, student, weights_of
from specdraft.eval.papers.paper_table import Paper, Plan, Row
from specdraft.eval.papers.seeded import Job


@dataclass(frozen=True)
class CascadeTable:
    """SD, Max-Gram and cascades, each tuned by SWI; students of two layers (1) and of one (2).

    The paper's figures are SWI by model size on GSM8K, FLAN-T5 targets: the best plain SD, one
    neural drafter above Max-Gram, and the whole cascade. "best" takes the better one of each seed.
    """

    source: str = "CS Drafting, Table 2"
    recipe: str = DISTILLED
    compared: str = "recipes/tiny_cascades.yaml"
    columns: ClassVar[dict[str, str]] = {
        "SWI, parameters": "swi_params",
        "SWI, measured": "swi_measured",
        "x plain": "speedup",
        "tokens/step": "tokens_per_step",
    }
    paper: ClassVar[Paper] = {
        "best SD": {"SWI, parameters": 3.38},
        "best of one student + MaG": {"SWI, parameters": 3.62},
        "1 + 2 + MaG": {"SWI, parameters": 3.75},
    }
    best: ClassVar[dict[str, tuple[str, ...]]] = {
        "best SD": ("SD 1", "SD 2"),
        "best of one student + MaG": ("1 + MaG", "2 + MaG"),
    }

    def students(self, plan: Plan, seed: int) -> list[Job]:
        """The larger one, and one that keeps only the target's last layer."""
        smaller = student(plan, seed, "one_layer", "student.keep_layers=[11]")
        return [student(plan, seed), smaller]

    def table(self, plan: Plan) -> Job:
        """The Max-Gram table: counted, so the same for every seed."""
        settings = (*MEASURED, *plan.overrides, "train.steps=1", "train.epochs=null")
        methods = ("eval.methods=[plain,maxgram]",)
        folder = plan.runs / "students" / "maxgram"
        return Job("train/maxgram.py", "recipes/tiny_maxgram.yaml", (*settings, *methods), folder)

    def comparison(self, plan: Plan, seed: int) -> Job:
        """Tuning of all rows, then their turns on the prompts."""
        weights = [weights_of(job) for job in self.students(plan, seed)]
        overrides = (
            *MEASURED,
            *plan.overrides,
            f"student.model={weights[0]}",
            f"cascade.students=[{','.join(weights)}]",
            f"maxgram.table={self.table(plan).folder / 'table'}",
            "eval.methods=[plain, maxgram, cascade]",
        )
        options = ("--by", "swi", "--candidates", "8", "--prompts", "8")
        folder = plan.runs / "cascades" / f"seed{seed}"
        return Job(
            "eval/papers/cascades.py", self.compared, overrides, folder, options, "cascades.json"
        )

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """All drafters, then the comparison."""
        return [[*self.students(plan, seed), self.table(plan)], [self.comparison(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The comparison's rows, and the best ones."""
        runs = {run["row"]: run for run in self.comparison(plan, seed).report()["rows"]}
        for name, some in self.best.items():
            runs[name] = max((runs[one] for one in some), key=lambda run: run["swi_params"])
        return {
            name: Row({title: run[key] for title, key in self.columns.items()}, [run])
            for name, run in runs.items()
        }
