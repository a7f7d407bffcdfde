"""GSD's Figure 5 (ACL Findings 2024): drafts by what prunes them, and token graphs by tau.

The second part is a table of its own, of a student that is there: how long a repeated phrase must
be before what follows it may be shared (Appendix C). At each merged node the student is also asked
what would have followed there: q after its own path, against q after the path of the first
occurrence, which is what is shared. Their KL divergence is the price of merging, fewer drafter
forwards the gain. The longer tau, the closer the two and the rarer the merges.

Shapes: N paths, T tokens of the longest, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.data.prompts import load_prompts
from specdraft.eval.drafters.token_graph import GSD, GraphGrowth
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.tree import Tree, path_to
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.methods import Engine
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.methods.registry import Setup, load_trained
from specdraft.eval.methods.trained import Trained
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.students import OverStudents
from specdraft.eval.papers.table import Found, Plan, Row, Table, mean_of
from specdraft.models.target import Target
from specdraft.recipes.fields import Natural
from specdraft.recipes.schema import Recipe

MERGED, KL = "merged/step", "KL"


@dataclass(frozen=True, kw_only=True)
class TauTable(Table):
    """What merging costs and gains by tau, with the student of the recipe's run."""

    taus: tuple[Natural, ...] = (0, 1, 2, 3, 4)

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """One row per tau."""
        recipe = self.loaded(plan)
        target = Target.of_recipe(recipe.target)
        student = load_trained(recipe, target, ["gsd"]).student
        with cpu_threads(recipe.eval.threads):
            rows = sweep(recipe, target, student, self.taus, self.columns)
            return Found(rows, environment(target))


@dataclass(frozen=True, kw_only=True)
class GraphTable(OverStudents, TauTable):
    """Chains, trees and token graphs by what prunes them, and graphs by tau."""

    def bench(self, plan: Plan, row: str, seed: int) -> Job:
        """The measurement of one draft."""
        method, *drafting = self.variants[row]
        folder = f"gsd/{row.replace(', ', '_').replace(' ', '_')}-seed{seed}"
        chosen = (f"eval.methods=[plain,{method}]", *drafting, *self.drafting(plan, seed))
        return self.job(plan, "eval/bench.py", folder, *chosen)

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The student, then all drafts."""
        trained, swept = super().stages(plan, seed)
        return [trained, [*(self.bench(plan, row, seed) for row in self.variants), *swept]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every draft, then every tau."""
        reports = {name: self.bench(plan, name, seed).report() for name in self.variants}
        found = {name: self.row(report["runs"][-1]) for name, report in reports.items()}
        return found | {f"GSD, {tau}": row for tau, row in super().rows(plan, seed).items()}


def sweep(
    recipe: Recipe, target: Target, student: Target, taus: Sequence[int], columns: dict[str, str]
) -> dict[str, Row]:
    """Decode the recipe's prompts with every tau."""
    requests = make_requests(recipe.eval, load_prompts(recipe, target.tokenizer))
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    size, rows = recipe.eval.batch_size, {}
    for tau in taus:
        setup = Setup(recipe, target, Trained(student=student), size, capacity)
        drafter = ComparingGSD(*setup.student, tau, setup.drafting.max_copies, **setup.pruned)
        decoder = Decoder(target, drafter, size, capacity + drafter.max_nodes)
        figures = counts([Engine(decoder)(requests)], Costs(0.0, None))
        drafted = {title: {"mean": figures[key]} for title, key in columns.items()}
        rows[f"tau {tau}"] = Row(drafted | merges(drafter.divergences, figures["steps"]))
    return rows


def merges(divergences: Sequence[float], steps: int) -> dict[str, dict]:
    """Merged nodes per step, and the mean of their KL divergences with its standard error."""
    cells = {MERGED: {"mean": len(divergences) / steps}}
    return cells | ({KL: mean_of(divergences)} if divergences else {})


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
            torch.tensor([*committed, *(growth.tokens[n] for n in path_to(node, growth.parents))])
            for node in nodes
        ]
        # Padded on the right: attention is causal.
        ids = pad_sequence(paths, batch_first=True).to(self.student.device)  # [N, T]
        ends = torch.tensor([len(path) - 1 for path in paths], device=ids.device)
        features = self.student.features(ids)[torch.arange(len(paths), device=ids.device), ends]
        return self.student.logits(features).double().log_softmax(-1)
