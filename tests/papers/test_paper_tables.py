"""The papers' tables, made again: what is run for them, run once, and what becomes of it."""

import json
from pathlib import Path

import pytest
from commands import ROOT, run_here

from specdraft.data.sources import bundled_file
from specdraft.eval.papers.paper_budgets import BudgetTable
from specdraft.eval.papers.paper_falcon import FALCON_TABLES, VARIANTS
from specdraft.eval.papers.paper_graphs import GraphTable
from specdraft.eval.papers.paper_padding import WAYS, PaddingTable
from specdraft.eval.papers.paper_table import Plan, make, show
from specdraft.eval.papers.paper_tables import TABLES
from specdraft.eval.papers.seeded import over_seeds
from specdraft.recipes.load import load_recipe

SMALL = ("data.limit=24", "train.steps=2", "train.batch_size=4", "eval.limit=2")
SMALL += ("eval.max_new_tokens=8",)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("paper")
    return Plan(folder / "runs", (*SMALL, f"data.cache_dir={folder / 'cache'}"))


def jobs_of(name: str, runs: Path) -> list:
    plan = Plan(runs)
    return [job for seed in (0, 1) for some in TABLES[name].stages(plan, seed) for job in some]


# -- what is run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_run_is_a_script_on_a_valid_recipe_and_has_its_own_folder(name, tmp_path):
    runs, jobs = {}, jobs_of(name, tmp_path)
    assert jobs
    for job in jobs:
        assert (ROOT / job.script).is_file()
        load_recipe(job.recipe, job.settings)
        assert runs.setdefault(job.folder, job) == job


def test_tables_share_what_they_train(tmp_path):
    jobs = [job for name in TABLES for job in jobs_of(name, tmp_path)]
    trained = {job.folder: job for job in jobs if job.script.startswith("train/")}
    assert {job for job in jobs if job.script.startswith("train/")} == {*trained.values()}
    falcon = [job for job in trained.values() if job.script == "train/falcon.py"]
    assert len(falcon) == 2 * len(VARIANTS)  # from two seeds, and none is in no table
    assert len(trained) - len(falcon) == 2 * 2 + 1  # two students each, one Max-Gram table


def test_seeds_reach_training_and_an_override_reaches_every_run(tmp_path):
    plan = Plan(tmp_path, ("train.batch_size=3",))
    for table in FALCON_TABLES.values():
        for job in table.stages(plan, 7)[0]:
            recipe = load_recipe(job.recipe, job.settings)
            assert (recipe.train.seed, recipe.train.batch_size) == (7, 3)
            assert recipe.train.steps == 200


def test_the_papers_figures_stand_in_rows_and_columns_that_there_are():
    for name, table in FALCON_TABLES.items():
        assert set(table.paper) <= set(table.variants), name
    for table in TABLES.values():
        assert {column for row in table.paper.values() for column in row} <= set(table.columns)


# -- small tables --------------------------------------------------------------------------------


def command(plan: Plan, *options: str):
    places = ["--runs", str(plan.runs), "--seeds", "3"]
    return run_here("eval/paper.py", "fusion", *plan.overrides, *places, *options)


def test_heads_are_trained_once_and_the_table_has_their_figures(plan):
    done = command(plan)
    assert done.returncode == 0, done.stderr
    made = json.loads((plan.runs / "fusion.json").read_text())
    assert [row["row"] for row in made["rows"]] == ["LSTM", "linear"]
    assert made["environment"]["torch"]
    reports = [plan.runs / "falcon" / f"{name}-seed3/report.json" for name in ("recipe", "linear")]
    for row, path in zip(made["rows"], reports, strict=True):
        runs = {run["method"]: run for run in json.loads(path.read_text())["runs"]}
        for way, method in (("chain", "falcon_chain"), ("tree", "falcon_tree")):
            expected = over_seeds([runs[method]["accepted_per_step"]])
            assert row["ours"][f"{way}: accepted/step"] == expected
        assert (row["identical"], row["outputs"]) == (4, 4)  # two prompts, both ways

    times = [path.stat().st_mtime_ns for path in reports]
    again = command(plan, "--out", str(plan.runs / "again.json"))
    assert again.returncode == 0, again.stderr
    assert "LSTM" in again.stdout
    assert [path.stat().st_mtime_ns for path in reports] == times
    assert json.loads((plan.runs / "again.json").read_text()) == made

    other = command(plan, "train.steps=3")
    assert other.returncode == 2
    assert "train.steps = 2, not 3" in other.stderr


def test_students_are_trained_once_for_all_their_tables(plan, capsys):
    budgets = make(BudgetTable(lengths=(2,), budgets=(6,)), plan, [3], 1)
    trained = plan.runs / "students/student-seed3/report.json"
    time = trained.stat().st_mtime_ns
    rows = {row["row"]: row["ours"] for row in budgets["rows"]}
    assert list(rows) == ["SD", "SpecTr", "SpecInfer", "RSD-C", "RSD-S"]
    shapes = json.loads((plan.runs / "rsd_budgets/seed3/budgets.json").read_text())["rows"]
    drawn = [run for run in shapes if (run["comparison"], run["method"]) == ("budget 6", "rsd_s")]
    assert len(drawn) > 1
    assert rows["RSD-S"]["budget 6"]["mean"] == max(run["tokens_per_step"] for run in drawn)

    graphs = make(GraphTable(taus=(0,), settings={"GSD": ("gsd",)}), plan, [3], 1)
    assert trained.stat().st_mtime_ns == time
    gsd, tau = graphs["rows"]
    assert (gsd["identical"], gsd["paper"]["acceptance"]) == (2, 0.917)
    assert tau["row"] == "GSD, tau 0"
    assert "acceptance" not in tau["ours"]
    capsys.readouterr()
    show(graphs)
    assert "| 0.92" in capsys.readouterr().out


def test_a_seed_chooses_the_prompts_of_a_batch(plan):
    table = PaddingTable(sizes=(2,))
    made = make(table, plan, [0], 1)
    assert [row["row"] for row in made["rows"]] == [f"2 rows, {way}" for way in WAYS]
    *_, ours = made["rows"]
    assert ours["ours"]["pads/input"]["mean"] == ours["ours"]["pads/cached"]["mean"] == 0
    assert {row["identical"] for row in made["rows"]} == {2}
    table.stages(plan, 1)
    files = [plan.runs / "ems" / f"prompts-seed{seed}.jsonl" for seed in (0, 1)]
    lines = [path.read_text().splitlines() for path in files]
    assert lines[0] != lines[1]
    bundled = sorted(bundled_file("prompts.jsonl").read_text().splitlines())
    assert sorted(lines[0]) == sorted(lines[1]) == bundled


# -- refusals ------------------------------------------------------------------------------------


def test_an_unknown_table_names_the_known_ones():
    done = run_here("eval/paper.py", "table_4")
    assert done.returncode == 2
    assert f"unknown table 'table_4'; known: {', '.join(TABLES)}" in done.stderr
