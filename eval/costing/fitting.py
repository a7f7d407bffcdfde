"""A tree is fitted to a head and a machine, and written beside the weights.

Costs that are lacking are measured; every tree is priced by them, for the validation prompts as the
target answers them; the best few decode these prompts in turns, and the best by both is kept.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from specdraft.data.atomic import write_atomic
from specdraft.data.prompts import Prompt
from specdraft.eval.costing.grid import Grid
from specdraft.eval.costing.ledger import ELSEWHERE
from specdraft.eval.costing.measuring import measure_costs
from specdraft.eval.costing.race import FINALISTS, combined_speedup, fitting_prompts, speedups
from specdraft.eval.costing.replay import Load, answers
from specdraft.eval.costing.search import Candidate, TreePrices, finalists
from specdraft.eval.costing.shares import TreeDrafter
from specdraft.eval.drafters.static import Path as Ranks
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.models.target import Target
from specdraft.models.weights.identity import hash_weights
from specdraft.recipes.fields import plain
from specdraft.recipes.fitted_tree import Fit, Trial, read_fit
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import TREE, load_tree_paths


def fit_tree(
    recipe: Recipe,
    target: Target,
    drafter: TreeDrafter,
    count: int = FINALISTS,
    out: Path | None = None,
) -> tuple[Path, Fit]:
    """Fit a drafter's tree, and write it: by default, beside the weights.

    count: trees that are decoded with. Raises DataError where no validation prompts are left, or
    costs.json holds no costs.
    """
    prompts = fitting_prompts(recipe, target)
    with cpu_threads(recipe.eval.threads):
        grid = Grid.for_rows(recipe.eval.batch_size)
        costs = measure_costs(recipe, target, drafter.trained, grid).model
        load = Load(answers(target, prompts, recipe.eval.max_new_tokens), recipe.eval.batch_size)
        ranks, shares = drafter.right(target, load.texts)
        prices = TreePrices(ranks, costs, drafter.block_size, drafter.coupled, load)
        best = finalists([*prices.candidates(shares)], count)
        seconds = load.plain_ms(costs) / 1e3
        found = zip(best, _race(recipe, target, drafter, prompts, best, seconds), strict=True)
        ranked = sorted(found, key=lambda pair: -combined_speedup(pair[0].speedup, pair[1]))
        trials = tuple(asdict(_trial(*pair)) for pair in ranked)
        weights, machine = hash_weights(drafter.part), machine_of(target)
    fit = Fit(weights=weights, machine=machine, rows=load.rows, trials=trials)
    out = out or drafter.part.folder / TREE
    source = f"fitted by eval/fit.py on recipe {recipe.name}"
    write_tree(out, drafter.block_size, source, ranked[0][0].paths, fit)
    return out, fit


def leave_tree(recipe: Recipe, drafter: TreeDrafter) -> None:
    """Write the tree that a recipe names beside the weights, for whoever loads them alone; one that
    was fitted to them stays."""
    file, weights = drafter.part.folder / TREE, hash_weights(drafter.part)
    if file.is_file() and (fit := read_fit(file)) and fit.weights == weights:
        return
    source = f"eval.tree of recipe {recipe.name}: {recipe.eval.tree}"
    write_tree(file, drafter.block_size, source, load_tree_paths(recipe.eval.tree))


def is_fitted(recipe: Recipe, target: Target, drafter: TreeDrafter) -> bool:
    """Whether a tree lies beside the weights that was fitted to them on this machine."""
    part = drafter.part
    file = part.folder / TREE
    fit = read_fit(file) if file.is_file() else None
    with cpu_threads(recipe.eval.threads):
        here = (hash_weights(part), machine_of(target), recipe.eval.batch_size)
    return fit is not None and (fit.weights, fit.machine, fit.rows) == here


def machine_of(target: Target) -> dict[str, str]:
    """The machine that a fit is made for, as text, so that two can be compared."""
    known = environment(target).items()
    return {key: str(value) for key, value in known if key not in ELSEWHERE and value is not None}


def _race(
    recipe: Recipe,
    target: Target,
    drafter: TreeDrafter,
    prompts: Sequence[Prompt],
    trees: Sequence[Candidate],
    plain_seconds: float,
) -> list[float]:
    """Decode by every tree in turns; return how many times as fast as plain decoding each is."""
    with TemporaryDirectory() as folder:
        recipes = []
        for number, one in enumerate(trees):
            file = Path(folder) / f"{number}.yaml"
            write_tree(file, drafter.block_size, "a finalist", one.paths)
            recipes.append(recipe.with_eval(tree=str(file)))
        seconds = plain_seconds * (1 + sum(1 / one.speedup for one in trees))
        return speedups(drafter.method, recipes, target, drafter.trained, prompts, seconds)


def _trial(one: Candidate, measured: float) -> Trial:
    numbers = {"tokens": one.tokens, "expected": one.speedup, "measured": measured}
    rounded = {key: round(value, 3) for key, value in numbers.items()}
    return Trial(nodes=len(one.paths), depth=one.depth, passes=one.passes, **rounded)


def write_tree(
    path: Path, block_size: int, source: str, paths: Sequence[Ranks], fit: Fit | None = None
) -> None:
    """Write a tree file as recipes name it in eval.tree, whole or not at all."""
    content = {
        "name": path.stem,
        "block_size": block_size,
        "source": source,
        "paths": [list(ranks) for ranks in sorted(paths, key=lambda ranks: (len(ranks), ranks))],
    }
    if fit:
        content["fit"] = plain(asdict(fit))
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=99)
    write_atomic(path, text.encode())
