"""A head's training counts the table that methods draft with beside it."""

import json

import pytest
from commands import end, run_here, start_ranks

from specdraft.models.maxgram import load_table
from specdraft.models.target import Target

SMALL = [
    *("data.limit=24", "train.steps=2", "train.batch_size=4", "train.eval_every=null"),
    *("train.save_every=2", "train.threads=1", "eval.limit=2", "eval.max_new_tokens=16"),
    *("eval.tree=tiny_k3", "eval.methods=[plain,falcon_ngram]"),
]


def places(folder) -> list[str]:
    return [f"output.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]


def report_of(folder) -> dict:
    runs = json.loads((folder / "run" / "report.json").read_text())["runs"]
    return {run["method"]: run for run in runs}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    done = run_here("train/falcon.py", "recipes/tiny.yaml", *SMALL, *places(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_a_table_of_the_heads_own_tokens_lies_beside_it(trained):
    target = Target.load("tiny")
    table = load_table(trained / "run" / "table", "tiny", target.vocab_size)
    assert table.config.corpus["rows"] == 24
    assert len(table.config.longer) == 5
    beside = report_of(trained)["falcon_ngram"]
    assert (beside["identical"], beside["outputs"]) == (2, 2)
    assert beside["accepted_per_step"] > 0


def test_a_table_that_the_recipe_names_is_taken(trained, tmp_path):
    named = f"maxgram.table={trained / 'run' / 'table'}"
    cache = f"data.cache_dir={trained / 'cache'}"
    out = f"output.dir={tmp_path / 'run'}"
    done = run_here("train/falcon.py", "recipes/tiny.yaml", *SMALL, out, cache, named)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "table").exists()
    assert report_of(tmp_path)["falcon_ngram"]["identical"] == 2


def test_two_processes_count_the_table_that_one_counts(trained, tmp_path):
    ranks = start_ranks(
        "train/falcon.py", "recipes/tiny.yaml", *SMALL, *places(tmp_path), ACCELERATE_USE_CPU="true"
    )
    end(ranks)
    one, two = (
        load_table(folder / "run" / "table", "tiny", Target.load("tiny").vocab_size)
        for folder in (trained, tmp_path)
    )
    assert one.followers() == two.followers()


def test_a_head_that_a_method_needs_is_not_made_by_another_training(tmp_path):
    settings = ["eval.methods=[plain,falcon_ngram]", "eval.tree=auto", *places(tmp_path)]
    done = run_here("train/medusa.py", "recipes/tiny_medusa.yaml", *settings)
    assert done.returncode == 2
    assert "falcon_ngram needs a trained head" in done.stderr
