"""The table for a paper: every figure is the report's, and no cell breaks Markdown or LaTeX."""

import copy
import json
import re

import pytest
import torch
from commands import run_here
from shallow import shallow_tiny

from specdraft.data.prompts import load_prompts
from specdraft.eval.comparing.field_table import field_table
from specdraft.eval.measure.report import evaluate
from specdraft.eval.methods.trained import Trained
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import load_recipe


@pytest.fixture(scope="module")
def report() -> dict:
    """With an untrained head; only how it drafts matters here."""
    tiny, small = shallow_tiny(), ["eval.limit=3", "eval.max_new_tokens=40", "eval.threads=1"]
    recipe = load_recipe("recipes/tiny.yaml", [*small, "eval.tree=tiny_k2"])
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    head = FalconHead(FalconConfig(hidden_size=128, vocab_size=tiny.vocab_size, **shape))
    prompts = load_prompts(recipe, tiny.tokenizer)
    methods = ["plain", "prompt_lookup", "falcon_chain", "falcon_tree"]
    return evaluate(recipe, tiny, Trained(head), prompts, methods)


def write(folder, report, name="report.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(report))
    return folder / name


def cells(text: str) -> list[dict[str, str]]:
    """The rows of a Markdown table as dicts by heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_every_cell_shows_a_figure_of_the_report(tmp_path, report):
    table = field_table([write(tmp_path, report)])
    for row, run in zip(cells(table.markdown()), report["runs"], strict=True):
        assert (row["method"], row["prompts"], row["T"]) == (run["method"], run["prompt_set"], "0")
        assert (row["τ"], row["τ - 1"]) == (
            f"{run['tokens_per_step']:.2f}",
            f"{run['accepted_per_step']:.2f}",
        )
        assert row["tokens/s at 1"] == f"{run['tokens_per_second']:.0f}"
        by_depth = run["acceptance_by_depth"][:5]
        reached = [f"{share:.2f}" for share in run["accepted_by_depth"][:5]]
        assert row["P(n given n - 1)"] == (" ".join(f"{p:.2f}" for p in by_depth) or "-")
        assert row["P(n)"] == (" ".join(reached) or "-")
    drafts = {row["method"]: row["draft"].split(",")[0] for row in cells(table.markdown())}
    assert (drafts["plain"], drafts["falcon_chain"], drafts["falcon_tree"]) == (
        "-",
        "chain",
        "tree",
    )
    assert report["environment"]["cpu"] in table.caption


def test_batch_sizes_are_columns_and_temperatures_are_rows(tmp_path, report):
    other, changed = copy.deepcopy(report), {4: 4000.0, 16: 16000.0}
    runs = []
    for temperature in (0.0, 1.0):
        for rows in (1, 4, 16):
            more = {"batch_size": rows, "temperature": temperature}
            runs += [
                run | more | {"tokens_per_second": changed.get(rows, run["tokens_per_second"])}
                for run in report["runs"]
            ]
    other["runs"] = runs
    first = write(tmp_path / "a", report)
    alone, both = field_table([first]), field_table([first, write(tmp_path / "b", other)])
    assert (
        "4 rows, 16 rows, temperature 1; measure them with: python eval/bench.py" in alone.missing
    )
    assert both.missing is None
    found = cells(both.markdown())
    assert len(found) == 2 * len(report["runs"])
    assert {(r["tokens/s at 4"], r["tokens/s at 16"]) for r in found} == {("4000", "16000")}


def test_latex_rows_have_all_cells_and_escaped_special_characters(tmp_path, report):
    text = field_table([write(tmp_path, report)]).latex()
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == len(report["runs"])
    assert {line.count(" & ") + 1 for line in body} == {10}
    assert r"\begin{tabular}{llrrrrrrrr}" in text
    assert re.findall(r"(?<!\\)[_%#]", text) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("recipe", "target", "model", "other"),
            r"b/report.json: the target is other, and tiny in",
        ),
        (("recipe", "target", "dtype", "bfloat16"), "the dtype is bfloat16"),
        (("environment", "gpu", "H200"), "the machine is .*H200"),
    ],
)
def test_reports_of_different_targets_or_machines_are_refused(tmp_path, report, change, message):
    other = copy.deepcopy(report)
    *path, key, value = change
    part = other
    for name in path:
        part = part[name]
    part[key] = value
    with pytest.raises(DataError, match=message):
        field_table([write(tmp_path / "a", report), write(tmp_path / "b", other)])


def test_conflicting_figures_for_one_method_are_refused(tmp_path, report):
    other = copy.deepcopy(report)
    tree = next(run for run in other["runs"] if run["method"] == "falcon_tree")
    tree |= {"steps": tree["steps"] + 1}
    with pytest.raises(DataError, match=r"falcon_tree on .* is in two of the reports"):
        field_table([write(tmp_path / "a", report), write(tmp_path / "b", other)])
    again = field_table([write(tmp_path / "a", report), write(tmp_path / "c", report)])
    assert again.markdown() == field_table([tmp_path / "a" / "report.json"]).markdown()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": []}', '{"runs": [{"method": "x"}]}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match=r"no report; give report.json"):
        field_table([tmp_path / "report.json"])


@pytest.mark.parametrize(
    ("key", "value"),
    [("drafted_per_step", None), ("prompt_set", None), ("acceptance_by_depth", ["x"]), (None, 0)],
)
def test_an_incomplete_report_is_refused(tmp_path, report, key, value):
    half = copy.deepcopy(report)
    tree = next(run for run in half["runs"] if run["method"] == "falcon_tree")
    part = tree if key else half["environment"]
    del part[key or "gpu"]
    if value is not None or key == "drafted_per_step":
        part[key] = value
    with pytest.raises(DataError, match=r"no report; give report.json"):
        field_table([write(tmp_path, half)])


def test_special_characters_in_a_name_break_no_cell(tmp_path, report):
    named = copy.deepcopy(report)
    for run in named["runs"]:
        run["prompt_set"] = "a|b\\c"
    table = field_table([write(tmp_path, named)])
    for line in table.markdown().splitlines()[2:-2]:
        assert len(re.findall(r"(?<!\\)\|", line)) == len(table.headings) + 1
        assert r"| a\|b\c |" in line
    assert r"& a\textbar{}b\textbackslash{}c &" in table.latex()


def test_the_command_takes_a_folder_and_names_the_missing_figures(tmp_path, report):
    write(tmp_path, report)
    done = run_here("eval/table.py", str(tmp_path), "--latex")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(r"\begin{table}")
    assert "note: no figures at 4 rows" in done.stderr
    assert run_here("eval/table.py", str(tmp_path / "none")).returncode == 2
