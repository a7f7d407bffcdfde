"""A tree that fits: the best of all trees under the costs, the finalists, and the entry."""

from itertools import product

import pytest
import torch
import yaml
from commands import run_here

from specdraft.eval.costing.drafts import shape_of
from specdraft.eval.costing.search import Candidate, Load, candidates, finalists, plain_rate
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.drafters.tree_growth import probability
from specdraft.eval.engine.cost import CostModel, Curve, draft_terms, loop_terms, verify_terms
from specdraft.models.falcon import FalconHead
from specdraft.models.shapes import TargetShape, head_config
from specdraft.models.target import Target
from specdraft.recipes.load import load_recipe
from specdraft.recipes.static_trees import load_tree_paths

KNOTS = (1,)


def curve(terms: dict, **weights: float) -> Curve:
    return Curve({name: weights.get(name, 0.0) for name in terms}, 1, 0.0, 0.0, 0.0)


def costs(forward: float, node: float, per_pass: float, level: float) -> CostModel:
    """A machine where so many milliseconds go to each of these."""
    verify = {"forward": forward, "tokens from 1": node}
    draft = {"draft": per_pass, "passes": per_pass, "levels": level}
    return CostModel(
        verify=curve(verify_terms(1, 1, 1, KNOTS), **verify),
        knots=KNOTS,
        loop=curve(loop_terms(1, 1), step=0.1),
        draft=curve(draft_terms(1, [1], [1]), **draft),
    )


SHARES = torch.tensor([[0.6, 0.2], [0.7, 0.1], [0.5, 0.3], [0.8, 0.1]])
MACHINES = {
    "a node costs nothing": costs(5.0, 0.01, 0.3, 0.05),
    "a node costs its share": costs(5.0, 0.8, 0.3, 0.05),
    "a pass costs a forward": costs(5.0, 0.01, 5.0, 0.05),
}


def every_tree(depth: int, nodes: int) -> list[list[tuple[int, ...]]]:
    """All prefix-closed trees over two ranks."""
    paths = [p for length in range(1, depth + 1) for p in product(range(2), repeat=length)]
    trees, frontier = [], [[path] for path in paths if len(path) == 1]
    seen = set()
    while frontier:
        tree = frontier.pop()
        key = frozenset(tree)
        if key in seen:
            continue
        seen.add(key)
        trees.append(sorted(tree))
        if len(tree) < nodes:
            frontier += [
                [*tree, path]
                for path in paths
                if path not in key and (len(path) == 1 or path[:-1] in key)
            ]
    return trees


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("coupled", [False, True])
def test_no_tree_is_expected_to_be_faster_than_the_first_finalist(machine, coupled):
    model, load = MACHINES[machine], Load(cached=10)

    def rate(paths: list[tuple[int, ...]]) -> float:
        tokens = 1 + sum(probability(SHARES, path) for path in paths)
        passes, levels = shape_of(StaticTree(paths, 2, coupled))
        ms = model.verify_ms(1, len(paths) + 1, 10) + model.draft_ms(passes, levels)
        return tokens / (ms + model.loop_ms(1, len(paths) + 1))

    best = finalists([*candidates(SHARES, model, 2, coupled, load)], 1)[0]
    assert best.rate == pytest.approx(rate([*best.paths]))
    assert best.rate >= max(map(rate, every_tree(depth=4, nodes=6))) - 1e-12


def test_the_machine_decides_how_large_a_tree_is():
    chosen = {
        name: finalists([*candidates(SHARES, model, 2, True, Load(cached=10))], 1)[0]
        for name, model in MACHINES.items()
    }
    cheap, dear, slow = chosen.values()
    assert len(cheap.paths) > 2 * len(dear.paths)
    assert (cheap.passes, slow.passes) == (2, 1)
    assert plain_rate(MACHINES["a node costs nothing"], Load()) == pytest.approx(1 / 5.1)


def test_finalists_differ_in_passes_or_in_size():
    def one(nodes: int, passes: int, tokens: float) -> Candidate:
        return Candidate(tuple((rank,) for rank in range(nodes)), passes, tokens, 1.0)

    best, close, other, large = one(10, 2, 4.0), one(11, 2, 3.9), one(10, 3, 3.5), one(14, 2, 3.0)
    assert finalists([large, other, close, best], 3) == [best, other, large]
    assert finalists([best, close], 4) == [best]


def test_the_entry_writes_a_tree_that_a_recipe_takes(tmp_path):
    target, places = Target.load("tiny"), [f"output.dir={tmp_path}", "eval.limit=1"]
    recipe = load_recipe("recipes/tiny.yaml", places)
    shape = TargetShape.of(target.config)
    scales = {"embed_scale": 1.0, "feature_scale": 1.0}
    config = head_config(recipe, shape, **scales, identity=target.identity())
    FalconHead(config).save_pretrained(tmp_path / "head")
    small = ["recipes/tiny.yaml", *places, "eval.validation=2", "eval.max_new_tokens=8"]
    missing = run_here("eval/fit.py", *small)
    assert missing.returncode == 2
    assert "measure them: python eval/costs.py RECIPE" in missing.stderr
    grid = ["--nodes", "1,4", "--rows", "1", "--cached", "16", "--repeats", "1"]
    assert run_here("eval/costs.py", *small, *grid).returncode == 0
    done = run_here("eval/fit.py", *small, "--finalists", "2")
    assert done.returncode == 0, done.stderr
    assert "x plain, measured" in " ".join(done.stdout.split())
    written = tmp_path / "head" / "tree.yaml"
    assert load_tree_paths(str(written))
    assert yaml.safe_load(written.read_text())["block_size"] == recipe.head.block_size
    load_recipe("recipes/tiny.yaml", [*places, f"eval.tree={written}"])
