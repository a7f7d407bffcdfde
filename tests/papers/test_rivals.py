"""Falcon against other heads: fair comparisons, heads trained once, and the figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_here
from shallow import shallow_target

from specdraft.eval.papers.jobs import Job, run_all
from specdraft.eval.papers.rivals import check_fair
from specdraft.eval.papers.table import Plan, over_seeds, with_settings
from specdraft.eval.papers.tables import all_tables
from specdraft.eval.publishing.result import cell_text
from specdraft.models.shapes import TargetShape, llama_config
from specdraft.recipes.arguments import whole_numbers
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe

TABLE = all_tables()["rivals"]
SMALL = (
    "data.limit=8",
    "train.batch_size=4",
    "train.eval_every=null",
    "train.save_every=null",
    "eval.limit=2",
    "eval.max_new_tokens=8",
)


def test_the_table_has_every_head_and_falcon_also_as_a_chain_and_without_csgd():
    plan = Plan(Path("runs"))
    rivals = TABLE.line_up(plan)
    made = [(rival.name, rival.method, rival.job(plan, 0).script) for rival in rivals]
    assert made == [
        ("falcon", "falcon_tree", "train/falcon.py"),
        ("falcon, chain", "falcon_chain", "train/falcon.py"),
        ("falcon without CSGD", "falcon_tree", "train/falcon.py"),
        ("eagle", "eagle_tree", "train/eagle.py"),
        ("medusa", "medusa_tree", "train/medusa.py"),
    ]
    ours, chain, without, *_ = rivals
    assert ours.job(plan, 1) == chain.job(plan, 1)  # one head, two ways of decoding
    assert ours.job(plan, 1) != ours.job(plan, 2)
    assert ours.recipe.glance.enabled
    assert not without.recipe.glance.enabled


def test_rows_that_differ_only_in_decoding_share_a_head():
    plan = Plan(Path("runs"))
    rows = {row.name: row for row in all_tables()["heads"].line_up(plan)}
    ours, shallow = rows["falcon"], rows["falcon, 16 nodes to depth 6"]
    assert shallow.job(plan, 0) == ours.job(plan, 0)
    assert shallow.recipe.eval.tree != ours.recipe.eval.tree
    compiled = all_tables()["heads"].line_up(replace(plan, overrides=("eval.compile=true",)))
    assert compiled[0].recipe.eval.compile
    assert compiled[0].job(plan, 0) == ours.job(plan, 0)
    trained = {row.job(plan, 0).folder.name for row in rows.values()}
    assert {"falcon-seed0", "medusa-seed0"} < trained
    for kind in ("eagle", "eagle3"):
        assert (
            sum(name.startswith(f"{kind}_") for name in trained)
            == 1
            < sum(name.startswith(f"{kind}, ") for name in rows)
        )
    assert rows["eagle3, 16 nodes to depth 6"].method == "eagle3_tree"


def test_rows_can_be_left_out_by_the_start_of_their_names():
    table, plan = all_tables()["heads"], Plan(Path("runs"))
    layers = replace(plan, overrides=("data.feature_layers=[3]",))  # Medusa cannot read layers
    assert with_settings(table, ["table.without=[eagle3,medusa]"]).line_up(layers)
    every = {row.name: row.method for row in table.line_up(plan)}
    some = with_settings(table, ["table.without=[eagle3,medusa]"]).line_up(plan)
    kept = {name for name in every if not name.startswith(("eagle3", "medusa"))}
    assert {row.name for row in some} == kept < every.keys()
    assert every["eagle, chain"] == "eagle_chain"
    assert every["falcon, every alignment, chain"] == "falcon_chain"
    stories = {row.name: row.method for row in all_tables()["heads_stories"].line_up(plan)}
    assert stories["falcon, dynamic"] == "falcon_dynamic"
    assert stories["eagle, dynamic"] == "eagle_dynamic"


def test_a_heads_folder_does_not_depend_on_the_chosen_rows_or_on_overrides():
    table, plan = all_tables()["heads_stories"], Plan(Path("runs"))
    whole = {row.name: row.job(plan, 0).folder for row in table.line_up(plan)}
    others = {name: folder for name, folder in whole.items() if not name.startswith("eagle, 16")}
    some = with_settings(table, ["table.without=['eagle, 16']"]).line_up(plan)
    assert {row.name: row.job(plan, 0).folder for row in some} == others
    every = replace(plan, overrides=("train.alignments=all",))  # some rows set this themselves
    rows = {row.name: row for row in table.line_up(every)}
    assert rows["falcon, every alignment, chain"].job(every, 0) == rows["falcon"].job(every, 0)
    assert whole["falcon, every alignment, chain"] != whole["falcon"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("train", {"steps": 1}), ("train", {"batch_size": 2}), ("data", {"max_length": 99})],
)
def test_an_unfair_comparison_is_refused(key, value):
    ours = replace(TABLE, against={}).line_up(Plan(Path("runs")))[0].recipe
    theirs = replace(ours, **{key: replace(getattr(ours, key), **value)})
    with pytest.raises(RecipeError, match=f"{key}.* differ"):
        check_fair(ours, theirs, TABLE.equal)


def test_a_finished_run_is_not_repeated_and_failures_are_reported(tmp_path):
    done = Job("train/falcon.py", "recipes/tiny.yaml", ("train.seed=4",), tmp_path)
    recipe = load_recipe(done.recipe, [*done.settings, "output.dir=elsewhere"])
    (tmp_path / "report.json").write_text(json.dumps({"recipe": recipe.to_dict()}))
    run_all([done], 1, "training")
    with pytest.raises(RecipeError, match=r"a run with train.seed = 4, not 5: .*--runs"):
        run_all([replace(done, overrides=("train.seed=5",))], 1, "training")
    missing = replace(done, recipe="no/such.yaml", folder=tmp_path / "new")
    with pytest.raises(RecipeError, match=r"falcon.py no/such.yaml .*failed: .*such.yaml"):
        run_all([missing], 1, "training")


def test_a_killed_run_is_reported_with_its_signal(tmp_path):
    (script := tmp_path / "killed.py").write_text(
        "import os, sys\nsys.stderr.write('train 3/9')\nsys.stderr.flush()\nos.kill(os.getpid(), 9)"
    )
    killed = Job(str(script), "recipes/tiny.yaml", (), tmp_path / "run")
    with pytest.raises(RecipeError, match="failed: ended by SIGKILL"):
        run_all([killed], 1, "training")


def test_runs_are_executed_in_parallel(tmp_path):
    """Each ends only once the other has started."""
    (script := tmp_path / "run.py").write_text(
        """import sys, time
from pathlib import Path
own = Path(sys.argv[-1].removeprefix("output.dir="))
own.mkdir()
for _ in range(600):
    if len([*own.parent.glob("run-*")]) == 2:
        break
    time.sleep(0.1)
else:
    sys.exit("alone")
"""
    )
    jobs = [Job(str(script), "recipes/tiny.yaml", (), tmp_path / f"run-{n}") for n in range(2)]
    run_all(jobs, 2, "training")


def test_figures_over_seeds_have_mean_and_standard_error():
    assert over_seeds([1.0]) == {"values": [1.0], "mean": 1.0, "standard_error": None}
    figure = over_seeds([1.0, 3.0])
    assert (figure["mean"], figure["standard_error"]) == (2.0, 1.0)
    assert cell_text(figure) == "2.00 +- 1.00"
    assert whole_numbers("--seeds", "0,2") == [0, 2]
    with pytest.raises(RecipeError, match="--seeds 0,x"):
        whole_numbers("--seeds", "0,x")


def test_heads_are_trained_and_compared_also_at_the_size_of_a_larger_target(tmp_path):
    """Three kinds of heads from one seed; step costs are measured for the dynamic row only."""
    options = [
        "table.against={medusa: [recipes/tiny_medusa.yaml], 'eagle, dynamic': "
        "[recipes/tiny_eagle.yaml]}",
        "train.steps=2",
        "--seeds",
        "1",
    ]
    target = f"target.model={shallow_target(tmp_path / 'target')}"
    places = ["--runs", str(tmp_path), f"data.cache_dir={tmp_path / 'cache'}", target]
    done = run_here("eval/paper.py", "rivals", *SMALL, *options, *places)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "rivals.json").read_text())
    names = ["falcon", "falcon, chain", "falcon without CSGD", "medusa", "eagle, dynamic"]
    assert [row["row"] for row in report["rows"]] == names
    _, *runs = report["runs"]  # plain decoding first
    for row, run_of_it in zip(report["rows"], runs, strict=True):
        assert row["identical"] == row["outputs"] == 2
        gain = runs[0]["speedup"] / run_of_it["speedup"]
        assert row["ours"]["ours over it: speed"]["mean"] == pytest.approx(gain, rel=1e-4)
        assert row["ours"]["tokens/step"]["values"] == [run_of_it["tokens_per_step"]]
    assert report["rows"][3]["paper"] == {"ours over it: speed": 1.5}
    assert (tmp_path / "rivals" / "falcon-seed1" / "falcon").is_dir()
    assert (tmp_path / "rivals" / "medusa-seed1" / "medusa").is_dir()
    assert (tmp_path / "rivals" / "eagle_dynamic-seed1" / "costs.json").is_file()
    # For heads trained elsewhere, the table names the machine that measured them.
    first = tmp_path / "rivals" / "falcon-seed1" / "report.json"
    trained = json.loads(first.read_text())
    trained["environment"]["cpu"] = "another"
    first.write_text(json.dumps(trained))
    # The same heads with several rows at once, at the size of a larger target.
    config = llama_config(TargetShape(256, 3, 8, 4, 768, 2100, 1e6), 512)
    (larger := tmp_path / "larger.json").write_text(json.dumps(config.to_dict()))
    measured = [f"table.shape={larger}", "table.measured=[eval.batch_size=2,target.dtype=bfloat16]"]
    done = run_here("eval/paper.py", "rivals", *SMALL, *options, *measured, *places)
    assert done.returncode == 0, done.stderr
    large = json.loads((tmp_path / "rivals.json").read_text())
    assert large["environment"]["cpu"] == report["environment"]["cpu"]
    assert [row["row"] for row in large["rows"]] == names
    assert all(row["outputs"] == 2 for row in large["rows"])
    assert {run["batch_size"] for run in large["runs"]} == {2}
    assert set(measured) < set(large["overrides"])
    done = run_here("eval/paper.py", "rivals", *SMALL, *options, "table.shape=llama9b", *places)
    assert done.returncode == 2
    assert "llama9b" in done.stderr
