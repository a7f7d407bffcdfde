"""How long a repeated phrase must be before what follows it may be shared (GSD, Appendix C).

    python eval/papers/tau.py recipes/tiny_distill.yaml [section.key=value ..] [--taus 0,1,2,3,4]
        [--out FILE.json]

For every tau, the prompts are decoded by GSD. At each merged node the student is also asked what
would have followed there: q after its own path, against q after the path of the first occurrence,
which is what is shared. Their KL divergence is the price of merging, fewer drafter forwards the
gain. The longer tau, the closer the two and the rarer the merges.

Shapes: N paths, T tokens of the longest, V vocabulary.
"""

import statistics
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.data.prompts import load_prompts
from specdraft.eval.drafters.gsd import GSD, GraphGrowth
from specdraft.eval.drafters.registry import Setup, problems
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.tree import Tree
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.methods import Engine
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.report import write_json
from specdraft.models.student import finished_student
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole_numbers
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

FIGURES = (
    "tokens_per_step",
    "drafted_per_step",
    "verified_per_step",
    "drafter_forwards_per_step",
    "graph_success",
)


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


@entry
def main() -> None:
    """Parse, decode with every tau, write and show."""
    parser = recipe_parser(__doc__, "tiny_distill")
    parser.add_argument("--taus", default="0,1,2,3,4", help="comma-separated")
    parser.add_argument("--out", type=Path, help="default: tau.json of output.dir")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    rows = sweep(recipe, whole_numbers("--taus", options.taus, most=256))
    out = options.out or Path(recipe.output.dir) / "tau.json"
    write_json({"recipe": recipe.to_dict(), "rows": rows}, out)
    show(rows)
    print(f"wrote {out}")  # noqa: T201


def sweep(recipe: Recipe, taus: list[int]) -> list[dict]:
    """One row of figures per tau."""
    target = Target.of_recipe(recipe.target)
    prompts = load_prompts(recipe, target.tokenizer)
    student = finished_student(recipe.student, Path(recipe.output.dir) / "student", target)
    requests = make_requests(recipe.eval, prompts)
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    size, rows = recipe.eval.batch_size, []
    for tau in taus:
        setup = Setup(recipe, target, Trained(student=student), size, capacity)
        drafter = ComparingGSD(*setup.student, tau, setup.drafting.max_copies, **setup.pruned)
        decoder = Decoder(target, drafter, size, capacity + drafter.max_nodes)
        with cpu_threads(recipe.eval.threads):
            figures = counts([Engine(decoder)(requests)], Costs(0.0, None))
        rows.append(
            {"tau": tau, "prompts": len(prompts)}
            | {key: figures[key] for key in FIGURES}
            | divergence(drafter.divergences, figures["steps"])
        )
    return rows


def divergence(found: list[float], steps: int) -> dict:
    """Merged nodes per step, and the mean of their KL divergences with its standard error."""
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
    mean = statistics.fmean(found) if found else None
    return {"merged_per_step": len(found) / steps, "kl": mean, "kl_standard_error": error}


def show(rows: list[dict]) -> None:
    """The rows as a table."""
    columns = ("tau", "kl", "kl_standard_error", "merged_per_step", *FIGURES)
    table = Table(title=f"GSD on {rows[0]['prompts']} prompts", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.replace("_per_step", "\n/step").replace("_", "\n"), justify="right")
    for row in rows:
        cells = (row[name] for name in columns[1:])
        table.add_row(str(row["tau"]), *("-" if c is None else f"{c:.3f}" for c in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
