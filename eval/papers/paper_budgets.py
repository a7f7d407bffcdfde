"""RSD's Tables 2 and 3 (arXiv 2402.14160): drawn drafts of equal length, and of equal budget."""

from dataclasses import dataclass
from typing import ClassVar

from specdraft.eval.papers.paper_students import DISTILLED, MEASURED, drafting_with, student
from specdraft.eval.papers.paper_table import Paper, Plan, Row
from specdraft.eval.papers.seeded import Job


@dataclass(frozen=True)
class BudgetTable:
    """Tokens per step of drawn drafts, at fixed lengths and at fixed budgets, temperature 1.

    A seed trains a student and draws with it. A cell is the best shape that a method has there for
    that seed. None of the paper's figures is at hand as a number.
    """

    source: str = "RSD, Tables 2 and 3"
    recipe: str = DISTILLED
    lengths: tuple[int, ...] = (2, 3, 4, 5)
    budgets: tuple[int, ...] = (6, 10, 14, 21, 30)
    paper: ClassVar[Paper] = {}
    methods: ClassVar[dict[str, str]] = {
        "SD": "ssd",
        "SpecTr": "spectr",
        "SpecInfer": "specinfer",
        "RSD-C": "rsd_c",
        "RSD-S": "rsd_s",
    }

    @property
    def columns(self) -> list[str]:
        """What is fixed."""
        lengths = [f"length {length}" for length in self.lengths]
        return lengths + [f"budget {budget}" for budget in self.budgets]

    def comparison(self, plan: Plan, seed: int) -> Job:
        """All shapes, with the student and the draws of a seed."""
        drafting = drafting_with(student(plan, seed))
        sampled = ("eval.temperature=1", "eval.batch_size=20")  # rows do not change each other
        settings = (*MEASURED, *sampled, *plan.overrides, *drafting)
        lists = {"--lengths": self.lengths, "--budgets": self.budgets, "--seeds": (seed,)}
        options = [part for key, some in lists.items() for part in (key, ",".join(map(str, some)))]
        folder = plan.runs / "rsd_budgets" / f"seed{seed}"
        recipe = plan.recipe or self.recipe
        return Job(
            "eval/papers/budgets.py", recipe, settings, folder, tuple(options), "budgets.json"
        )

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The student, then the comparison."""
        return [[student(plan, seed)], [self.comparison(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The best shape of every method, by tokens per step."""
        best: dict[str, dict[str, float]] = {name: {} for name in self.methods.values()}
        for run in self.comparison(plan, seed).report()["rows"]:
            figures, column = best[run["method"]], run["comparison"]
            figures[column] = max(run["tokens_per_step"], figures.get(column, 0.0))
        return {name: Row(best[method]) for name, method in self.methods.items()}
