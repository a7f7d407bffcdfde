"""GSD's Figure 5 (ACL Findings 2024): drafts by what prunes them, and token graphs by tau."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from specdraft.eval.papers.paper_students import DISTILLED, MEASURED, drafting_with, student
from specdraft.eval.papers.paper_table import Paper, Plan, Row
from specdraft.eval.papers.seeded import Job

DROP = "drafting.sibling_pruning=drop"  # a weak sibling is no leaf: the published code
WIDER = ("drafting.theta_prob=0.15", "drafting.theta_sib=0.35")
GRAPHS: dict[str, tuple[str, ...]] = {  # rows: a method and how it drafts
    "SSD, 10 tokens": ("ssd", "drafting.gamma=10", "drafting.theta_prob=0"),
    "TSD, siblings not pruned": ("tsd", "drafting.theta_sib=0"),
    "TSD": ("tsd",),
    "GSD": ("gsd",),
    "GSD, theta_prob 0.1": ("gsd", "drafting.theta_prob=0.1"),
    "GSD, theta_prob 0.4": ("gsd", "drafting.theta_prob=0.4"),
    "TSD, dropped below 0.3": ("tsd", DROP),
    "GSD, dropped below 0.1": ("gsd", DROP, "drafting.theta_sib=0.1"),
    "GSD, dropped below 0.3": ("gsd", DROP),
    "GSD, dropped below 0.5": ("gsd", DROP, "drafting.theta_sib=0.5"),
    "TSD, 0.15 and 0.35": ("tsd", *WIDER),
    "GSD, 0.15 and 0.35, dropped": ("gsd", *WIDER, DROP),
    "GSD, 0.15 and 0.35, dropped, tau 1": ("gsd", *WIDER, DROP, "drafting.tau=1"),
}


@dataclass(frozen=True)
class GraphTable:
    """Chains, trees and token graphs by what prunes them, and graphs by tau.

    GSD's text for Figure 5 is not at hand. What is swept here are the parameters of its drafts:
    both pruning thresholds (eval/bench.py; theta_sib where weak siblings are dropped, for as leaves
    they are verified all the same), and how many tokens must agree for a merge (Appendix C;
    eval/papers/tau.py), with the KL divergence between what follows a merged node and what is
    shared there. The paper's figures are those of its main table: LLaMA-2-70B with 7B, GSM8K.
    """

    source: str = "GSD, Figure 5: pruning and merging"
    recipe: str = DISTILLED
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GRAPHS)
    taus: tuple[int, ...] = (0, 1, 2, 3, 4)
    columns: ClassVar[dict[str, str]] = {
        "acceptance": "matchness",
        "drafted/step": "drafted_per_step",
        "verified/step": "verified_per_step",
        "tokens/step": "tokens_per_step",
        "student passes/step": "drafter_forwards_per_step",
        "graph success": "graph_success",
        "x plain": "speedup",
        "merged/step": "merged_per_step",
        "KL": "kl",
    }
    paper: ClassVar[Paper] = {
        "SSD, 10 tokens": {"acceptance": 0.795, "x plain": 1.85},
        "TSD, siblings not pruned": {"acceptance": 0.894, "x plain": 1.81},
        "GSD": {"acceptance": 0.917, "x plain": 1.96, "graph success": 0.277},
    }

    def bench(self, plan: Plan, row: str, seed: int) -> Job:
        """The measurement of one setting."""
        method, *drafting = self.settings[row]
        name = row.replace(", ", "_").replace(" ", "_")
        return self._job(
            "eval/bench.py", plan, seed, name, f"eval.methods=[plain,{method}]", *drafting
        )

    def tau(self, plan: Plan, seed: int) -> Job:
        """The sweep of tau."""
        taus = ("--taus", ",".join(map(str, self.taus)))
        return replace(
            self._job("eval/papers/tau.py", plan, seed, "tau"), options=taus, ends_with="tau.json"
        )

    def _job(self, script: str, plan: Plan, seed: int, name: str, *drafting: str) -> Job:
        settings = (*MEASURED, *plan.overrides, *drafting, *drafting_with(student(plan, seed)))
        return Job(
            script, plan.recipe or self.recipe, settings, plan.runs / "gsd" / f"{name}-seed{seed}"
        )

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The student, then all settings."""
        measured = [self.bench(plan, row, seed) for row in self.settings]
        return [[student(plan, seed)], [*measured, self.tau(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every setting, then every tau."""
        found = {}
        for row in self.settings:
            run = self.bench(plan, row, seed).report()["runs"][-1]
            found[row] = self._row(run, [run])
        for run in self.tau(plan, seed).report()["rows"]:
            found[f"GSD, tau {run['tau']}"] = self._row(run)
        return found

    def _row(self, run: dict, runs: Sequence[dict] = ()) -> Row:
        return Row({title: run.get(key) for title, key in self.columns.items()}, runs)
