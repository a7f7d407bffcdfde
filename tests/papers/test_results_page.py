"""eval/results/README.md is its template filled from the result files, or is reported as stale."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from commands import ROOT, run_here

from specdraft.eval.papers.jobs import resolved
from specdraft.eval.papers.tables import all_tables
from specdraft.eval.publishing.page import check_page, page_of, write_page
from specdraft.eval.publishing.result import one_row_per_line, rounded, write_result
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import load_recipe

RESULTS = ROOT / "eval" / "results"
KEPT = sorted(RESULTS.glob("*.json"))


def test_the_page_is_up_to_date():
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == page_of(RESULTS)
    assert run_here("eval/paper.py", "--check").returncode == 0


def test_a_changed_figure_makes_the_page_stale(tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder)
    check_page(folder)
    path = folder / "tiny.json"
    made = json.loads(path.read_text())
    made["rows"][-1]["ours"]["tokens/step"]["mean"] = 9.87
    write_result(made, path)
    with pytest.raises(DataError, match=r"stale; make it again: python eval/paper\.py --write"):
        check_page(folder)
    write_page(folder)
    assert "| falcon_tree | 9.87 |" in (folder / "README.md").read_text()
    check_page(folder)


def folder_of(tmp_path: Path, template: str) -> Path:
    cells = {"tokens/step": {"mean": 2.0, "standard_error": 0.5}}
    row = {"row": "a", "ours": cells, "paper": {"tokens/step": 3.5}, "identical": 1, "outputs": 2}
    write_result({"command": "make a", "columns": ["tokens/step"], "rows": [row]},
                 tmp_path / "one.json")  # fmt: skip
    (tmp_path / "README.md.jinja").write_text(template)
    return tmp_path


def test_placeholders_are_filled_from_the_files(tmp_path):
    words = '{{ cell("one", "a", "tokens/step") }} {{ ratio("one", "a", "a", "tokens/step") }}\n'
    page = page_of(folder_of(tmp_path, words + '{{ table("one") }}\n{{ again("one") }}\n'))
    assert page.splitlines() == [
        "2.00 +- 0.50 1.00",
        "|  | tokens/step | the paper's | identical |",
        "| --- | ---: | ---: | ---: |",
        "| a | 2.00 +- 0.50 | 3.5 | 1/2 |",
        "`make a` ([one.json](one.json))",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "has nothing of one"),
        ('{{ cell("one", "b", "tokens/step") }}', "nothing kept as 'b'"),
        ('{{ cell("one", "a", "speed") }}', "nothing kept as 'speed'"),
        ('{{ table("two") }}', "nothing kept as 'two'"),
    ],
)
def test_a_placeholder_without_its_figure_and_a_file_without_a_placeholder_are_refused(
    template, message, tmp_path
):
    with pytest.raises(DataError, match=message):
        page_of(folder_of(tmp_path, template))


# -- the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_result_file_has_a_row_per_line_and_a_valid_command(path):
    made = json.loads(path.read_text())
    assert one_row_per_line(made) == path.read_text()
    assert len(path.read_text().splitlines()) < 20 + len(made["rows"]) + len(made["runs"])
    assert "samples" not in made
    assert not any(isinstance(part, dict) for part in made["overrides"])
    resolved(made["recipe"], made["overrides"])  # a valid recipe
    command = shlex.split(made["command"])
    assert command[0] in ("python", "accelerate")
    if command[1] == "eval/paper.py":
        assert command[2] in all_tables()
    for row in made["rows"]:  # the paper's figures are for our rows and columns
        assert row["paper"].keys() <= row["ours"].keys() <= set(made["columns"])


def test_every_table_with_a_papers_figures_has_a_result_file_with_all_of_them():
    for table in all_tables().values():
        if table.paper:
            (path, *_) = [each for each in KEPT if each.stem.startswith(table.name)]
            rows = {row["row"]: row["paper"] for row in json.loads(path.read_text())["rows"]}
            assert {name: rows[name] for name in table.paper} == rounded(dict(table.paper))


def test_a_report_is_stored_as_overrides_and_without_replays():
    recipe = load_recipe("recipes/tiny.yaml", ["eval.limit=3", "output.dir=elsewhere"])
    run = {"method": "plain", "prompt_set": "tiny_chat", "batch_size": 1, "temperature": 0.0,
           "outputs": 3, "identical": 3, "near_ties": 0, "tokens_per_step": 1.0, "speedup": None,
           "acceptance_by_node": [{"path": [0]}], "categories": [{"category": "chat"}]}  # fmt: skip
    report = {"recipe": recipe.to_dict(), "runs": [run], "samples": [{"replay": []}]}
    keep = all_tables()["report"].kept
    made = keep(report)
    assert made["overrides"] == ["eval.limit=3"]
    assert made["command"] == "python eval/bench.py recipes/tiny.yaml eval.limit=3"
    assert made["rows"][0]["ours"] == {"tokens/step": {"mean": 1.0}}
    assert not {"samples", "acceptance_by_node", "categories", "speedup"} & {
        *made, *made["runs"][0]
    }  # fmt: skip
    both = keep(
        report | {"runs": [run | {"speedup": 1.0}, run | {"batch_size": 8, "speedup": 1.5}]}
    )
    assert both["columns"] == ["batch 1", "batch 8"]
    assert both["command"].endswith("eval.limit=3 --batch-sizes 1,8")
