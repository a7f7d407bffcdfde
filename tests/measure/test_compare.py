"""Comparing drafters: each drafts as in its own run, and the advice follows from the figures."""

import io
import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from commands import run_here
from rich.console import Console
from shallow import shallow_target
from test_maxgram import Shards

from specdraft.data.prompts import load_prompts
from specdraft.eval.comparing.contestants import enter, read_recipes
from specdraft.eval.comparing.race import advice, race
from specdraft.eval.comparing.show import frontier, outrun_by_none, print_comparison
from specdraft.eval.costing import enlarged
from specdraft.eval.costing.enlarged import enlarge_entrants
from specdraft.eval.costing.room import bytes_of
from specdraft.eval.costing.shapes import Shape
from specdraft.eval.measure.report import evaluate, write_report
from specdraft.eval.page.canvas import FONT, LETTER, WIDTH, Label
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.serving import serve_eagle
from specdraft.models.shapes import TargetShape, llama_config
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, TargetError
from specdraft.recipes.load import dump, load_recipe
from specdraft.train.counting.bigrams import count, save_table

SMALL = ["eval.limit=3", "eval.max_new_tokens=12", "eval.threads=1"]
LARGER = Shape("larger", llama_config(TargetShape(256, 3, 4, 4, 400, 2100), 512))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Target.load(shallow_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def small(tiny):
    """Overrides for a small comparison."""
    return [*SMALL, f"target.model={tiny.name}", "data.feature_layers=[]"]


def falcon(tiny, seed: int, **identity) -> FalconHead:
    torch.manual_seed(seed)
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    whose = {"target": tiny.identity() | identity}
    return FalconHead(FalconConfig(hidden_size=128, vocab_size=tiny.vocab_size, **shape, **whose))


def finished(folder, name: str, drafter, log=(), *overrides: str):
    """A run's folder as training leaves it, with an untrained drafter."""
    run = folder / name
    kind = "medusa" if isinstance(drafter, MedusaHeads) else "head"
    bundled = "tiny_medusa" if kind == "medusa" else "tiny"
    trees = {"medusa": "eval.tree=tiny_medusa_k4", "head": "eval.tree=tiny_k2"}
    recipe = load_recipe(
        bundled, [f"output.dir={run}", trees[kind], "head.block_size=2", *overrides]
    )
    dump(replace(recipe, name=name), run / "recipe.yaml")
    if drafter is not None:
        drafter.save_pretrained(run / kind)
    if log:
        lines = ({"kind": "train", "step": step, "minutes": minutes} for step, minutes in log)
        (run / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(run)


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(2)
    config = MedusaConfig(128, tiny.vocab_size, heads=4, target=tiny.identity())
    steps = load_recipe("tiny").train.steps
    return [
        finished(folder, "one", falcon(tiny, 0), [(10, 0.1), (steps, 3.0)]),
        finished(folder, "other", falcon(tiny, 1), [(steps, 1.5)]),
        finished(folder, "medusa", MedusaHeads.of(config, tiny.lm_head_weight)),
    ]


@pytest.fixture(scope="module")
def report(runs, tiny, small):
    recipes = read_recipes(runs, small)
    entered, left_out = enter(recipes, tiny)
    prompts = load_prompts(recipes[runs[0]], tiny.tokenizer)
    return race(entered, tiny, prompts, left_out)


def test_every_drafter_gives_plain_decodings_answers_and_the_figures_of_its_own_run(
    runs, tiny, small, report
):
    assert [run["method"] for run in report["runs"]] == ["plain", "one", "other", "medusa"]
    drafts_by = [one["drafts_by"] for one in report["contestants"]]
    assert drafts_by == ["falcon_tree", "falcon_tree", "medusa_tree"]
    for name, run, method in zip(runs, report["runs"][1:], drafts_by, strict=True):
        recipe = load_recipe(name, small)
        (alone,), _ = enter({name: recipe}, tiny)
        prompts = load_prompts(recipe, tiny.tokenizer)
        _, own = evaluate(recipe, tiny, alone.trained, prompts, ["plain", method])["runs"]
        for key in ("tokens", "steps", "tokens_per_step", "drafted_per_step", "tree"):
            assert run[key] == own[key]
        assert run["outputs"] == run["identical"] + run["near_ties"] == 3


def test_a_drafters_parameters_bytes_training_time_and_speed_are_reported(tiny, report):
    one, other, medusa = report["contestants"]
    head = falcon(tiny, 0)
    assert one["parameters"] == sum(tensor.numel() for tensor in head.parameters())
    assert one["bytes"] == 4 * one["parameters"]
    assert [one["training_minutes"], other["training_minutes"]] == [3.0, 1.5]
    assert medusa["training_minutes"] is None
    assert one["drafted_per_second"] > 0


def test_overrides_apply_to_all_runs_and_each_keeps_its_own_tree(runs):
    first, second = read_recipes([runs[0], runs[2]], ["eval.max_new_tokens=7"]).values()
    assert (first.eval.max_new_tokens, second.eval.max_new_tokens) == (7, 7)
    assert (first.eval.tree, second.eval.tree) == ("tiny_k2", "tiny_medusa_k4")


def test_a_run_folder_enters_all_its_drafters(tiny, small, tmp_path):
    run = tmp_path / "run"
    falcon(tiny, 0).save_pretrained(run / "falcon")
    falcon(tiny, 1).save_pretrained(run / "eagle")  # the folder decides, not the head's form
    recipe = load_recipe("tiny", [f"output.dir={run}", "eval.tree=tiny_k2", "head.block_size=2"])
    for kind, minutes in {"falcon": 2.0, "eagle": None}.items():
        dump(recipe, run / kind / "recipe.yaml")
        if minutes:
            line = {"kind": "train", "step": recipe.train.steps, "minutes": minutes}
            (run / kind / "log.jsonl").write_text(json.dumps(line))
    recipes = read_recipes([str(run)], small)
    assert [*recipes] == [str(run / "falcon"), str(run / "eagle")]
    entered, _ = enter(recipes, tiny)
    assert [one.name for one in entered] == ["falcon", "eagle"]
    assert entered[0].minutes == 2.0


def test_a_table_counted_for_a_head_enters_by_its_own_folder_and_as_a_table(tiny, small, tmp_path):
    """It has the recipe of the head's run, which measures the head last."""
    run = finished(tmp_path, "run", falcon(tiny, 0))
    recipe, table = load_recipe(run), tmp_path / "run" / "table"
    counts = count(Shards(range(2)), tmp_path / "counts", tiny.vocab_size)
    save_table(counts.table(None, {}), table)
    dump(recipe, table / "recipe.yaml")
    assert [*read_recipes([run], small)] == [run]
    entered, left_out = enter(read_recipes([run, str(table)], small), tiny)
    found = [(one.name, one.method) for one in entered]
    assert found == [("run", "falcon_tree"), ("table", "maxgram")]
    assert not left_out
    dump(recipe.with_eval(methods=("plain", "ngram_dynamic")), table / "recipe.yaml")  # its own
    (one,), _ = enter(read_recipes([str(table)], small), tiny)
    assert one.method == "ngram_dynamic"


def test_an_unfinished_run_is_left_out_with_the_reason(runs, tiny, small, tmp_path):
    nothing = finished(tmp_path, "nothing", None)
    midway = finished(tmp_path, "midway", falcon(tiny, 3), [(5, 0.1)])
    treeless = finished(tmp_path, "treeless", falcon(tiny, 3), (), "eval.tree=auto")
    names = [runs[0], nothing, midway, treeless]
    entered, left_out = enter(read_recipes(names, small), tiny)
    assert [one.name for one in entered] == ["one"]
    assert [*left_out] == [nothing, midway, treeless]
    assert "stands at step 5 of" in left_out[midway]
    with pytest.raises(RecipeError, match=r"none of them is finished: .*nothing.*; .*midway"):
        enter(read_recipes(names[1:3], small), tiny)


def test_a_run_of_another_target_is_refused_with_the_difference(runs, tiny, small, tmp_path):
    half = finished(tmp_path, "half", falcon(tiny, 0), (), "target.dtype=bfloat16")
    with pytest.raises(RecipeError, match=r"half is of another target: target.dtype = bfloat16"):
        read_recipes([runs[0], half], small)
    stranger = finished(tmp_path, "stranger", falcon(tiny, 0, weights="0" * 64))
    with pytest.raises(TargetError):
        enter(read_recipes([runs[0], stranger], small), tiny)


def test_a_head_without_a_run_drafts_by_the_method_of_its_form(runs, tiny, small, tmp_path):
    torch.manual_seed(4)
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64, "block_size": 1}
    eagle = {"fusion": "linear", "input_norm": False, "target": tiny.identity()}
    config = FalconConfig(hidden_size=128, vocab_size=tiny.vocab_size, **shape, **eagle)
    head = FalconHead(config)
    head.save_pretrained(tmp_path / "head")
    serve_eagle(head, "vllm", None).write(tmp_path / "served")
    recipes = read_recipes([runs[0], str(tmp_path / "head"), str(tmp_path / "served")], small)
    entered, left_out = enter(recipes, tiny)
    assert left_out == {}
    assert [one.method for one in entered] == ["falcon_tree", "eagle_chain", "eagle_tree"]
    assert [one.minutes for one in entered] == [3.0, None, None]  # not those of the first run
    report = race(entered, tiny, load_prompts(entered[0].recipe, tiny.tokenizer), {})
    assert report["runs"][2]["identical"] == 3


def test_duplicate_names_and_a_lone_head_without_a_run_are_refused(runs):
    with pytest.raises(RecipeError, match="named twice"):
        read_recipes([runs[0], runs[0]], [])
    with pytest.raises(RecipeError, match="named twice"):
        read_recipes([runs[0], f"{runs[0]}/"], [])
    with pytest.raises(RecipeError, match="you/a-head: a run or a recipe of its target"):
        read_recipes(["you/a-head"], [])
    recipes = read_recipes([runs[0], "you/a-head"], [])
    assert recipes["you/a-head"].head.model == "you/a-head"


def figures(**speeds: float) -> list[dict]:
    return [{"method": name, "speedup": speed} for name, speed in {"plain": 1.0, **speeds}.items()]


def costs(**minutes: float | None) -> list[dict]:
    return [{"name": name, "training_minutes": spent} for name, spent in minutes.items()]


@pytest.mark.parametrize(
    ("speeds", "minutes", "told"),
    [
        ({"a": 2.0, "b": 1.2}, {"a": 3.0, "b": 1.0}, "Take a: 2.00 x .* 3.0 minutes .*; no other"),
        ({"a": 2.0, "b": 1.95}, {"a": 3.0, "b": 1.0}, "Take a: .*; b has 98% of that after 1.0"),
        ({"a": 2.0, "b": 1.95}, {"a": 1.0, "b": 3.0}, "b within 5% of that cost no less"),
        (
            {"a": 2.0, "b": 1.95},
            {"a": 1.0, "b": None},
            "minutes of training; b within 5% of that.$",
        ),
        (
            {"a": 0.9, "b": 0.8},
            {"a": 1.0, "b": 3.0},
            r"None of these is faster .*\(a comes nearest",
        ),
        ({"a": None}, {"a": 1.0}, "None of them decoded all prompts"),
    ],
)
def test_the_advice_follows_from_the_figures(speeds, minutes, told):
    assert re.search(told, advice(figures(**speeds), costs(**minutes)))


def test_a_drafter_that_failed_on_a_prompt_is_not_recommended():
    rows = figures(a=2.0, b=9.0)
    rows[2]["failures"] = ["math-00"]
    assert advice(rows, costs(a=1.0, b=1.0)).startswith("Take a: 2.00 x")


def test_a_head_whose_recipe_decodes_plainly_drafts_by_its_tree(tiny, small, tmp_path):
    """As in the runs of the papers' tables."""
    name = finished(tmp_path, "plain", falcon(tiny, 3), (), "eval.methods=[plain]")
    other = finished(tmp_path, "lr0.1", falcon(tiny, 3))
    (first, second), _ = enter(read_recipes([name, other], small), tiny)
    assert (first.method, second.method) == ("falcon_tree", "falcon_tree")
    assert (first.name, second.name) == (str(tmp_path / "plain"), "lr0.1")


def test_the_frontier_has_the_drafters_that_none_cheaper_outruns():
    points = {"slow": (1.0, 1.1), "dear": (9.0, 2.0), "fast": (3.0, 2.5), "same": (1.0, 1.0)}
    assert outrun_by_none(points) == ["slow", "fast"]


def test_names_in_the_frontier_plot_fit_and_do_not_overlap():
    minutes = {"a/very/long/name/of/a/run/of/2026": 480.0, "near": 479.0, "far": 3.0}
    speeds = {**dict.fromkeys(minutes, 2.0), "far": 1.1}
    plot = frontier({"runs": figures(**speeds), "contestants": costs(**minutes)})
    labels = [shape for shape in plot.shapes if isinstance(shape, Label)]
    assert {"0", "240", "480"} <= {label.text for label in labels}
    names = [label for label in labels if label.anchor == "start"]
    assert [label.text for label in names] == ["…of/a/run/of/2026", "near", "far"]
    assert all(label.x + LETTER * len(label.text) <= WIDTH for label in names)
    assert all(low.y - high.y >= FONT for high, low in pairwise(names))


def test_a_comparison_fits_80_columns_and_is_written_with_plot_and_advice(report, tmp_path):
    with_one_out = report | {"left_out": {"runs/gone": "no head"}}
    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(with_one_out, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "left out: runs/gone: no head" in text
    plot = frontier(report)
    assert {shape.text for shape in plot.shapes if hasattr(shape, "text")} >= {"one", "other"}
    write_report(report, tmp_path, [plot])
    page = (tmp_path / "report.html").read_text()
    assert 'data-plot="frontier"' in page
    assert "data-advice" in page
    assert json.loads((tmp_path / "report.json").read_text())["advice"] == report["advice"]


def test_a_narrow_terminal_wraps_a_long_name_and_truncates_no_figure(report):
    *rows, last = report["runs"]
    named = last | {"method": "a/run/of/2026/that/has/a/long/name"}
    for width in (40, 80):
        console = Console(width=width, record=True, file=io.StringIO())
        print_comparison(report | {"runs": [*rows, named]}, console)
        lines = [line.split() for line in console.export_text().splitlines()]
        for run, name in [*((row, row["method"]) for row in rows), (named, "a/run/of/202")]:
            line = next(line for line in lines if line and line[0].startswith(name))
            assert line[1:3] == [f"{run[key]:.2f}" for key in ("tokens_per_step", "speedup")]


def test_the_command_compares_runs_and_refuses_settings_without_runs(runs, small, tmp_path):
    swept = shutil.copytree(runs[0], tmp_path / "lr=3e-4")  # a folder, not a setting
    names = str(swept), runs[1]
    done = run_here("eval/compare.py", *names, *small, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "report.json" in done.stdout
    assert run_here("eval/compare.py", "eval.limit=3").returncode == 2


def test_the_command_compares_runs_at_the_size_of_a_larger_target(
    runs, tiny, small, report, tmp_path
):
    (tmp_path / "larger.json").write_text(LARGER.config.to_json_string(use_diff=False))
    shape, out = ["--shape", str(tmp_path / "larger.json")], tmp_path / "out"
    done = run_here("eval/compare.py", *runs, *small, *shape, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "at the size of larger" in " ".join(done.stdout.split())
    large = json.loads((out / "report.json").read_text())
    assert (report["target"], large["target"]) == (tiny.name, f"{tiny.name} at the size of larger")
    for own, run in zip(report["runs"], large["runs"], strict=True):
        for key in ("method", "tokens", "steps", "tokens_per_step", "tree"):
            assert run.get(key) == own.get(key)
    for own, one in zip(report["contestants"], large["contestants"], strict=True):
        assert one["parameters"] > own["parameters"]
        assert one["training_minutes"] == own["training_minutes"]


def test_memory_for_all_entrants_is_checked_before_any_is_enlarged(runs, tiny, small, monkeypatch):
    entered, _ = enter(read_recipes(runs, [*small, "target.prepack_gib=0"]), tiny)
    needed = []
    monkeypatch.setattr(enlarged, "check_room", lambda what, count, device: needed.append(count))
    for some in (entered[:1], entered):
        _, large = enlarge_entrants(LARGER, some, tiny)
    added = sum(bytes_of(network) for one in large[1:] for network in one.networks())
    assert needed[1] - needed[0] == added
