"""Reproducing the papers' tables: which runs they need, each made once, and their figures."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from commands import ROOT, run_here

from specdraft.data.sources import bundled_file
from specdraft.eval.papers.ems import WAYS
from specdraft.eval.papers.falcon import FalconTable
from specdraft.eval.papers.jobs import resolved
from specdraft.eval.papers.prepacking import FORMATS, HOW
from specdraft.eval.papers.table import Plan, over_seeds, with_settings
from specdraft.eval.papers.tables import all_tables
from specdraft.eval.publishing.result import rounded, show
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe

TABLES = all_tables()
ABLATIONS = [table for table in TABLES.values() if isinstance(table, FalconTable)]
# These tables measure existing drafters in their own process.
READY = {"tau", "tuned_cascades", "t5_cascades", "budgets", "ewif", "suffix", "contexts", "report"}
READY |= {"prepacked", "trees"}
SMALL = ("data.limit=8", "train.steps=2", "train.batch_size=4", "eval.limit=2")
SMALL += ("eval.max_new_tokens=8", "eval.validation=2")


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("paper")
    return Plan(folder / "runs", (*SMALL, f"data.cache_dir={folder / 'cache'}"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder for runs that are only planned."""
    return tmp_path_factory.mktemp("runs")


@cache
def jobs_of(name: str, runs: Path) -> list:
    plan = Plan(runs)
    return [job for seed in (0, 1) for some in TABLES[name].stages(plan, seed) for job in some]


# -- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_run_is_a_script_on_a_valid_recipe_and_has_its_own_folder(name, runs):
    folders, jobs = {}, jobs_of(name, runs)
    assert bool(jobs) == (name not in READY)
    for job in jobs:
        assert (ROOT / job.script).is_file()
        own = resolved(job.recipe, job.settings)["table"]
        assert not own or with_settings(TABLES[job.table], [f"table.{k}={own[k]}" for k in own])
        assert folders.setdefault(job.folder, job) == job


def test_tables_share_their_training_runs(runs):
    jobs = [job for name in TABLES for job in jobs_of(name, runs)]
    trained = {job.folder: job for job in jobs if job.script.startswith("train/")}
    assert {job for job in jobs if job.script.startswith("train/")} == {*trained.values()}
    recipes = {Path(table.recipe).stem for table in ABLATIONS}
    falcon = [job for job in trained.values() if job.folder.parent.name in recipes]
    heads = {(each.recipe, own) for each in ABLATIONS for own in each.variants.values()}
    assert len(falcon) == 2 * len(heads)
    others = [job for job in trained.values() if job.folder.parent.name == "students"]
    assert len(others) == 2 * 2 + 1  # two students each, one Max-Gram table


def test_seeds_reach_training_and_an_override_reaches_every_run(tmp_path):
    plan = Plan(tmp_path, ("train.batch_size=3",))
    for table in ABLATIONS:
        for job in table.stages(plan, 7)[0]:
            recipe = load_recipe(job.recipe, job.settings)
            assert (recipe.train.seed, recipe.train.batch_size) == (7, 3)
            assert recipe.train.steps in (200, 400) or table.name == "training_length"


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
    reports = [
        plan.runs / "tiny_paper" / f"{name}-seed3/report.json"
        for name in ("recipe", "head.fusion=linear")
    ]
    for row, path in zip(made["rows"], reports, strict=True):
        runs = {run["method"]: run for run in json.loads(path.read_text())["runs"]}
        for way, method in (("chain", "falcon_chain"), ("tree", "falcon_tree")):
            expected = rounded(over_seeds([runs[method]["accepted_per_step"]]))
            assert row["ours"][f"{way}: accepted/step"] == expected
        assert (row["identical"], row["outputs"]) == (4, 4)  # two prompts, chain and tree

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
    budgets = replace(TABLES["rsd_budgets"], lengths=(2,), budgets=(6,)).make(plan, [3], 1)
    trained = plan.runs / "students/student-seed3/report.json"
    time = trained.stat().st_mtime_ns
    rows = {row["row"]: row["ours"] for row in budgets["rows"]}
    assert list(rows) == ["SD", "SpecTr", "SpecInfer", "RSD-C", "RSD-S"]
    shapes = json.loads((plan.runs / "rsd_budgets/table-seed3/table.json").read_text())["runs"]
    drawn = [run for run in shapes if (run["comparison"], run["method"]) == ("budget 6", "rsd_s")]
    assert len(drawn) > 1
    assert rows["RSD-S"]["budget 6"]["mean"] == max(run["tokens_per_step"] for run in drawn)

    table = replace(TABLES["gsd"], taus=(0,), variants={"GSD": ("gsd",)})
    graphs = table.make(plan, [3], 1)
    assert trained.stat().st_mtime_ns == time
    gsd, tau = graphs["rows"]
    assert (gsd["identical"], gsd["paper"]["acceptance"]) == (2, 0.917)
    assert tau["row"] == "GSD, tau 0"
    assert "acceptance" not in tau["ours"]
    capsys.readouterr()
    show(graphs)
    assert "0.917" in capsys.readouterr().out


def test_a_seed_chooses_the_prompts_of_a_batch(plan):
    table = replace(TABLES["ems"], sizes=(2,))
    made = table.make(plan, [0], 1)
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tau", "table.tau=3"], "table.tau: no setting of the table tau; it has taus"),
        (["fusion", "table.k=3"], "table.k: no setting of the table fusion; it has none"),
        (["tau", "table.taus=3"], "table.taus = 3: must be a list"),
        (["tau", "table.taus=["], "table.taus=[: line 1"),
        (["tau", "--seeds", "1"], "--seeds 1: nothing is drawn for tau"),
        (["fusion", "--seeds", "a"], "--seeds a: give whole numbers"),
        (["report", "table.report=gone.json"], "gone.json: cannot be read"),
        (["ewif", "tabel.alpha=0.5"], "tabel.alpha=0.5: ewif reads no recipe; it has table.alpha"),
        (["fusion", "eval.methods=[plain,falcon_tree]"], "fusion shows falcon_chain; add it"),
        (["ewif", "--out", "ewif.txt"], "--out ewif.txt: give the name of a file that ends in"),
        (["report", "--recipe", "tiny"], "--recipe tiny: report reads no recipe; it has table.re"),
    ],
)
def test_invalid_settings_of_a_table_are_refused(words, message):
    done = run_here("eval/paper.py", *words)
    assert done.returncode == 2
    assert message in done.stderr
    with pytest.raises(RecipeError, match="must be >= 2"):
        with_settings(TABLES["budgets"], ["table.lengths=[1]"])


@pytest.mark.parametrize("text", ['{"recipe": {', "{}", "[]"])
def test_an_incomplete_report_is_refused(tmp_path, text):
    job = jobs_of("fusion", tmp_path)[0]
    job.folder.mkdir(parents=True)
    job.path.write_text(text)
    with pytest.raises(DataError, match="is no report; delete it, and the same command"):
        _ = job.done


def test_without_a_table_all_are_listed():
    done = run_here("eval/paper.py")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TABLES)


def test_prepacked_products_are_timed_next_to_unpacked_ones(plan):
    table = with_settings(TABLES["prepacked"], ["table.widths=[64]", "table.nodes=[1,300]"])
    found = table.find(plan, (0, 1))
    assert found.environment["threads"] == 1
    names = [f"64 wide, {dtype}, {how}" for dtype in FORMATS for how in HOW]
    assert [*found.rows] == names
    for row in found.rows.values():
        assert [*row.figures] == ["1", "300"]
        assert all(cell["mean"] > 0 for cell in row.figures.values())
