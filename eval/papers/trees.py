"""The fitted tree beside others: is it the fastest, and do steps take what was expected?

Nothing is trained: the head is a run's, named by --recipe, and its tree is fitted here for
`eval.batch_size` rows, on the validation prompts. Of each number of nodes and each depth the best
tree by the shares of these prompts takes turns with it, beside plain decoding, on the measured
ones. What is expected is replayed on the measured prompts, too (eval/costing/replay.py): it differs
from what is measured by milliseconds alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import Tensor

from specdraft.data.prompts import Prompt
from specdraft.eval.costing.fitting import fit_tree, write_tree
from specdraft.eval.costing.race import fitting_prompts
from specdraft.eval.costing.replay import Load, answers
from specdraft.eval.costing.search import LARGEST, Candidate, TreePrices
from specdraft.eval.costing.shares import DEEPEST, TreeDrafter
from specdraft.eval.costing.tree_growth import best_paths
from specdraft.eval.drafters.static import Path as Ranks
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.methods.trained import Trained
from specdraft.eval.papers.contenders import Contender, asked, measured
from specdraft.eval.papers.table import Found, Plan, Row, Table
from specdraft.eval.pricing.cost import COSTS, load_costs
from specdraft.models.target import Target
from specdraft.recipes.fields import Interval
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import load_tree_paths

FITTED, OVER_BEST = "fitted", "the fitted tree over the fastest"
Nodes = Annotated[int, Interval(1, LARGEST)]
Depth = Annotated[int, Interval(1, DEEPEST)]


@dataclass(frozen=True, kw_only=True)
class TreeTable(Table):
    """Trees as rows; what they bring and take, measured and expected, as columns."""

    nodes: tuple[Nodes, ...] = (4, 8, 12, 20, 32)
    depths: tuple[Depth, ...] = (2, 3, 6, 8)

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Fit the tree, price it and the others, and let all decode in turns."""
        recipe = self.loaded(plan, f"eval.methods=[{REFERENCE}]")
        target = Target.of_recipe(recipe.target)
        drafter = TreeDrafter.of_run(recipe, target)
        folder = plan.runs / f"{self.name}-{recipe.name}-{recipe.eval.batch_size}"
        folder.mkdir(parents=True, exist_ok=True)
        file, _ = fit_tree(recipe, target, drafter, out=folder / f"{FITTED}.yaml")
        length, prompts = recipe.eval.max_new_tokens, asked(recipe, target)
        with cpu_threads(recipe.eval.threads):
            where = environment(target)
            known = answers(target, fitting_prompts(recipe, target), length)
            _, shares = drafter.right(target, known)
            trees = {FITTED: tuple(sorted(load_tree_paths(str(file))))}
            trees |= {name: paths for name, paths in self.others(shares) if paths != trees[FITTED]}
            costs = load_costs(Path(recipe.output.dir) / COSTS, target)  # as they were fitted to
            load = Load(answers(target, prompts, length), recipe.eval.batch_size)
            ranks, _ = drafter.right(target, load.texts)
            prices = TreePrices(ranks, costs, drafter.block_size, drafter.coupled, load)
            expected = {name: prices.priced(paths) for name, paths in trees.items()}
            plain = 1e3 * load.tokens / load.plain_ms(costs)  # tokens/s
            runs = decoded(recipe, target, drafter, prompts, trees, folder)
        rows = {name: row(expected[name], plain, run) for name, run in runs.items()}
        best = max(run["tokens_per_second"] for run in runs.values())
        over = {"x plain": {"mean": runs[FITTED]["tokens_per_second"] / best}}
        return Found({**rows, OVER_BEST: Row(over)}, where, [*runs.values()])

    def others(self, shares: Tensor) -> Iterator[tuple[str, tuple[Ranks, ...]]]:
        """The best trees of so many nodes that reach so deep, for shares [D, W], by name."""
        for depth in self.depths:
            paths = best_paths(shares[:depth], max(self.nodes))
            for nodes in self.nodes:
                chosen = tuple(sorted(paths[:nodes]))
                if max(map(len, chosen)) == depth and len(chosen) == nodes:
                    yield f"{nodes} nodes to depth {depth}", chosen


def decoded(
    recipe: Recipe,
    target: Target,
    drafter: TreeDrafter,
    prompts: Sequence[Prompt],
    trees: dict[str, tuple[Ranks, ...]],
    folder: Path,
) -> dict[str, dict]:
    """Every tree's figures on all prompts, in turns with plain decoding."""
    rows = [Contender(REFERENCE, REFERENCE, recipe, Trained())]
    for number, (name, paths) in enumerate(trees.items()):
        file = folder / f"{number}.yaml"
        write_tree(file, drafter.block_size, name, paths)
        own = recipe.with_eval(tree=str(file))
        rows.append(Contender(name, drafter.method, own, drafter.trained))
    _, *runs = measured(rows, target, prompts)
    return {run["row"]: run for run in runs}


def row(expected: Candidate, plain: float, run: dict) -> Row:
    """A tree's figures. plain: tokens per second that are expected of plain decoding."""
    speed = expected.speedup * plain
    figures = {
        "nodes": len(expected.paths),
        "passes": expected.passes,
        "tokens/step": run["tokens_per_step"],
        "x plain": run["speedup"],
        "expected": expected.speedup,
        "tokens/s": run["tokens_per_second"],
        "expected tokens/s": speed,
        "expected over measured": speed / run["tokens_per_second"],
    }
    return Row({title: {"mean": float(figure)} for title, figure in figures.items()}, [run])
