"""GSD's Figure 5 (ACL Findings 2024): drafts by what prunes them, and token graphs by tau.

The second part is a table of its own, of a student that is there: how long a repeated phrase must
be before what follows it may be shared (Appendix C). At each merged node the student is also asked
what would have followed there: q after its own path, against q after the path of the first
occurrence, which is what is shared. Their KL divergence is the price of merging, fewer drafter
forwards the gain. The longer tau, the closer the two and the rarer the merges.

Shapes: N paths, T tokens of the longest, V vocabulary.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.data.prompts import load_prompts
from specdraft.eval.drafters.gsd import GSD, GraphGrowth
from specdraft.eval.drafters.registry import Setup
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.tree import Tree
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.methods import Engine
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.students import (
    DISTILLED,
    MEASURED,
    OverStudents,
    drafting_with,
    student,
)
from specdraft.eval.papers.table import Found, Paper, Plan, Row, Table
from specdraft.models.student import finished_student
from specdraft.models.target import Target
from specdraft.recipes.fields import Natural
from specdraft.recipes.schema import Recipe

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
DRAFTED = {
    "drafted/step": "drafted_per_step",
    "verified/step": "verified_per_step",
    "tokens/step": "tokens_per_step",
    "student passes/step": "drafter_forwards_per_step",
    "graph success": "graph_success",
}
MERGED, KL = "merged/step", "KL"


@dataclass(frozen=True, kw_only=True)
class TauTable(Table):
    """What merging costs and gains by tau, with the student of the recipe's run."""

    name, source = "tau", "GSD, Appendix C: how many tokens must agree for a merge"
    recipe: ClassVar[str] = DISTILLED
    seeds: ClassVar[tuple[int, ...]] = ()
    taus: tuple[Natural, ...] = (0, 1, 2, 3, 4)

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """One row per tau."""
        recipe = self.loaded(plan)
        target = Target.of_recipe(recipe.target)
        student = finished_student(recipe.student, Path(recipe.output.dir) / "student", target)
        with cpu_threads(recipe.eval.threads):
            return Found(sweep(recipe, target, student, self.taus), environment(target))


@dataclass(frozen=True, kw_only=True)
class GraphTable(OverStudents):
    """Chains, trees and token graphs by what prunes them, and graphs by tau.

    GSD's text for Figure 5 is not at hand. What is swept here are the parameters of its drafts:
    both pruning thresholds (theta_sib where weak siblings are dropped, for as leaves they are
    verified all the same), and how many tokens must agree for a merge. The paper's figures are
    those of its main table: LLaMA-2-70B with 7B, GSM8K.
    """

    name, source = "gsd", "GSD, Figure 5: pruning and merging"
    drafts: dict[str, tuple[str, ...]] = field(default_factory=lambda: GRAPHS)
    inner = TauTable
    taus: tuple[Natural, ...] = TauTable.taus
    paper: ClassVar[Paper] = {
        "SSD, 10 tokens": {"acceptance": 0.795, "x plain": 1.85},
        "TSD, siblings not pruned": {"acceptance": 0.894, "x plain": 1.81},
        "GSD": {"acceptance": 0.917, "x plain": 1.96, "graph success": 0.277},
    }

    def bench(self, plan: Plan, row: str, seed: int) -> Job:
        """The measurement of one draft."""
        method, *drafting = self.drafts[row]
        chosen = (f"eval.methods=[plain,{method}]", *drafting)
        settings = (*MEASURED, *plan.overrides, *chosen, *drafting_with(student(plan, seed)))
        folder = plan.runs / "gsd" / f"{row.replace(', ', '_').replace(' ', '_')}-seed{seed}"
        return Job("eval/bench.py", plan.recipe or self.recipe, settings, folder)

    def settings(self, plan: Plan, seed: int) -> tuple[str, ...]:
        """The sweep of tau with the student of a seed."""
        return (*super().settings(plan, seed), f"table.taus={list(self.taus)}")

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The student, then all drafts."""
        trained, swept = super().stages(plan, seed)
        return [trained, [*(self.bench(plan, row, seed) for row in self.drafts), *swept]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every draft, then every tau."""
        columns = {"acceptance": "matchness", **DRAFTED, "x plain": "speedup"}
        found = {}
        for name in self.drafts:
            run = self.bench(plan, name, seed).report()["runs"][-1]
            found[name] = Row({title: run[key] for title, key in columns.items()}, [run])
        return found | {f"GSD, {tau}": row for tau, row in super().rows(plan, seed).items()}


def sweep(recipe: Recipe, target: Target, student: Target, taus: Sequence[int]) -> dict[str, Row]:
    """Decode the recipe's prompts with every tau."""
    requests = make_requests(recipe.eval, load_prompts(recipe, target.tokenizer))
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    size, rows = recipe.eval.batch_size, {}
    for tau in taus:
        setup = Setup(recipe, target, Trained(student=student), size, capacity)
        drafter = ComparingGSD(*setup.student, tau, setup.drafting.max_copies, **setup.pruned)
        decoder = Decoder(target, drafter, size, capacity + drafter.max_nodes)
        figures = counts([Engine(decoder)(requests)], Costs(0.0, None))
        drafted = {title: {"mean": figures[key]} for title, key in DRAFTED.items()}
        rows[f"tau {tau}"] = Row(drafted | merges(drafter.divergences, figures["steps"]))
    return rows


def merges(divergences: Sequence[float], steps: int) -> dict[str, dict]:
    """Merged nodes per step, and the mean of their KL divergences with its standard error."""
    count = len(divergences)
    cells = {MERGED: {"mean": count / steps}}
    if count:
        error = statistics.stdev(divergences) / count**0.5 if count > 1 else None
        cells[KL] = {"mean": statistics.fmean(divergences), "standard_error": error}
    return cells


class ComparingGSD(GSD):
    """GSD that also reads, without a cache, what it need not read: the paths that it merges."""

    def __init__(self, *place, **shape):
        super().__init__(*place, **shape)
        self.divergences: list[float] = []

    def harvest(self, row: int, growth: GraphGrowth) -> Tree:
        shared = growth.graph.shared
        merged = [(node, first) for node, first in enumerate(shared) if first >= 0]
        if merged:
            own, theirs = (self._after(row, growth, nodes) for nodes in zip(*merged, strict=True))
            self.divergences += (own.exp() * (own - theirs)).sum(-1).tolist()
        return super().harvest(row, growth)

    def _after(self, row: int, growth: GraphGrowth, nodes: tuple[int, ...]) -> Tensor:
        """log q [N, V] after the paths that end at the nodes."""
        committed = self.memory[row].tokens
        paths = [
            torch.tensor([*committed, *(growth.tokens[a] for a in reversed(growth.path(node)))])
            for node in nodes
        ]
        # Padded on the right: attention is causal.
        ids = pad_sequence(paths, batch_first=True).to(self.student.device)  # [N, T]
        ends = torch.tensor([len(path) - 1 for path in paths], device=ids.device)
        features = self.student.features(ids)[torch.arange(len(paths), device=ids.device), ends]
        return self.student.logits(features).double().log_softmax(-1)
