"""Falcon's ablations: heads that differ in one thing.

Every head is trained by train/falcon.py from every seed, for equal steps, and decodes the same
prompts as a chain and as a tree: tree attention is switched at decoding. Block sizes are compared
on trees of 16 nodes each.
"""

from dataclasses import dataclass
from pathlib import Path

from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.table import Plan, Row, SeededTable
from specdraft.recipes.errors import RecipeError

METHODS = {"chain": "falcon_chain", "tree": "falcon_tree"}


@dataclass(frozen=True, kw_only=True)
class FalconTable(SeededTable):
    """Heads as rows; how each decodes as columns."""

    def head(self, plan: Plan, row: str, seed: int) -> Job:
        """The training of a row's head from a seed."""
        variant = self.variants[row]
        recipe = Path(plan.recipe or self.recipe).stem
        folder = f"{recipe}/{','.join(variant) or 'recipe'}-seed{seed}"
        return self.job(plan, "train/falcon.py", folder, *variant, f"train.seed={seed}")

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: the heads. Raises RecipeError where they would not decode both ways."""
        asked = self.loaded(plan).eval.methods
        if missing := [method for method in METHODS.values() if method not in asked]:
            raise RecipeError(
                f"eval.methods = {', '.join(asked)}: {self.name} shows {missing[0]}; add it"
            )
        return [[self.head(plan, row, seed) for row in self.variants]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every head, decoded both ways."""
        return {name: self._row(self.head(plan, name, seed).report()) for name in self.variants}

    def _row(self, report: dict) -> Row:
        runs = {run["method"]: run for run in report["runs"]}
        drafted = {way: runs[method] for way, method in METHODS.items()}
        figures = {
            f"{way}: {title}": run[key]
            for title, key in self.columns.items()
            for way, run in drafted.items()
        }
        return Row(figures, [*drafted.values()])
