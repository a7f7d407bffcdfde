"""The fitted tree compared with others: all decode, and the table keeps what was measured."""

import json

import pytest
import torch
from shallow import shallow_target
from test_compare import falcon, finished

from specdraft.eval.papers.table import Plan, with_settings
from specdraft.eval.papers.tables import all_tables
from specdraft.eval.papers.trees import FITTED, OVER_BEST
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.static_trees import load_tree_paths

TABLE = all_tables()["trees"]
FEW = ("eval.limit=3", "eval.validation=2", "eval.max_new_tokens=12", "eval.repeats=1")


def test_the_other_trees_are_the_best_of_each_size_and_depth():
    shares = torch.tensor([0.6, 0.2, 0.1]).expand(4, 3)
    table = with_settings(TABLE, ["table.nodes=[1,3,9]", "table.depths=[1,2,4]"])
    found = dict(table.others(shares))
    # Depth 1 has three tokens, not nine; one node cannot reach depth 2; the best three nodes to
    # depth 4 reach only depth 3.
    assert found["3 nodes to depth 1"] == ((0,), (1,), (2,))
    assert found["3 nodes to depth 2"] == ((0,), (0, 0), (1,))
    assert {*found} == {"1 nodes to depth 1", "9 nodes to depth 4"} | {
        f"{count} nodes to depth {depth}" for count, depth in ((3, 1), (3, 2), (9, 2))
    }
    for name, paths in found.items():
        assert name == f"{len(paths)} nodes to depth {max(map(len, paths))}"


def test_every_tree_decodes_exactly_and_is_compared_with_the_fitted_one(tmp_path):
    target = Target.load(shallow_target(tmp_path / "target"))
    of_two_layers = (f"target.model={target.name}", "data.feature_layers=[1]")
    run = finished(tmp_path, "run", falcon(target, 0), (), *of_two_layers)
    table = with_settings(TABLE, ["table.nodes=[1,2,3]", "table.depths=[1,2]"])
    made = table.make(Plan(tmp_path, (*FEW, "eval.batch_size=2"), run), (), 1)
    cells = {row["row"]: row["ours"] for row in made["rows"]}
    assert {FITTED, OVER_BEST} < cells.keys()
    for row in made["rows"][:-1]:
        assert row["identical"] + row["near_ties"] == row["outputs"] == 3
    speeds = {name: own["tokens/s"]["mean"] for name, own in cells.items() if "tokens/s" in own}
    assert cells[OVER_BEST]["x plain"]["mean"] == speeds[FITTED] / max(speeds.values())
    fitted = load_tree_paths(str(tmp_path / "trees-run-2" / "fitted.yaml"))
    assert cells[FITTED]["nodes"]["mean"] == len(fitted)
    assert json.loads(json.dumps(made)) == made


def test_sizes_outside_the_search_are_refused():
    with pytest.raises(RecipeError, match=r"table\.nodes"):
        with_settings(TABLE, ["table.nodes=[65]"])
    with pytest.raises(RecipeError, match=r"table\.depths"):
        with_settings(TABLE, ["table.depths=[0]"])
