"""Falcon's ablations: heads that differ in one thing (eval/papers/ablations.yaml).

Every head is trained by train/falcon.py from every seed, for equal steps, and decodes the same
prompts as a chain and as a tree: tree attention is switched at decoding. Block sizes are compared
on trees of 16 nodes each.
"""

from dataclasses import dataclass, field
from pathlib import Path

from specdraft.eval.papers.jobs import SHORT, Job
from specdraft.eval.papers.table import Plan, Row, SeededTable
from specdraft.recipes.yaml_file import read_mapping

EQUAL = ("train.steps=200", *SHORT, "eval.methods=[plain,falcon_chain,falcon_tree]")
METHODS = {"chain": "falcon_chain", "tree": "falcon_tree"}
FIGURES = {
    "accepted/step": "accepted_per_step",
    "acceptance": "acceptance_rate",
    "x plain": "speedup",
}


def ablations() -> list["FalconTable"]:
    """All tables of the file."""
    tables = read_mapping(Path(__file__).with_name("ablations.yaml"))
    return [
        FalconTable(name=name, source=of["source"], heads=of["rows"], paper=of.get("paper", {}))
        for name, of in tables.items()
    ]


@dataclass(frozen=True, kw_only=True)
class FalconTable(SeededTable):
    """Heads as rows; how each decodes as columns."""

    name: str
    source: str
    heads: dict[str, tuple[str, ...]]  # overrides by the names of rows
    paper: dict[str, dict[str, float]] = field(default_factory=dict)

    def job(self, plan: Plan, row: str, seed: int) -> Job:
        """The training of a row's head from a seed."""
        overrides = (*EQUAL, *plan.overrides, *self.heads[row], f"train.seed={seed}")
        folder = plan.runs / "falcon" / f"{','.join(self.heads[row]) or 'recipe'}-seed{seed}"
        return Job("train/falcon.py", plan.recipe or self.recipe, overrides, folder)

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: the heads."""
        return [[self.job(plan, row, seed) for row in self.heads]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every head, decoded both ways."""
        return {name: _row(self.job(plan, name, seed).report()) for name in self.heads}


def _row(report: dict) -> Row:
    runs = {run["method"]: run for run in report["runs"]}
    drafted = {way: runs[method] for way, method in METHODS.items()}
    figures = {
        f"{way}: {title}": run[key]
        for title, key in FIGURES.items()
        for way, run in drafted.items()
    }
    return Row(figures, [*drafted.values()])
