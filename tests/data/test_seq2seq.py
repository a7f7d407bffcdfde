"""Sources and targets for encoder-decoders: rows, features, prompts, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import small_tokenizer as st
import torch
from random_seq2seq import generated, random_seq2seq

from specdraft.data.answers import Ask
from specdraft.data.prompts import load_prompts
from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.features import OnlineFeatures
from specdraft.data.store.token_builder import build_tokens
from specdraft.eval.bench import measure
from specdraft.eval.generation.answers import Answers, answer, within_context
from specdraft.models.falcon import FalconHead
from specdraft.models.shapes import TargetShape, head_config
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, RecipeError, TargetError
from specdraft.recipes.load import from_dict
from specdraft.recipes.schema import Recipe

ROWS = [
    {"source": f"{'How are you? ' * n}The answer is {n}.", "target": f"I am fine, {n}, today."}
    for n in range(1, 12)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random FLAN-T5 with more decoder than encoder layers, and a tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), st.small_tokenizer(None)
    sizes = {"vocab_size": len(tokenizer), "num_layers": 2, "num_decoder_layers": 4}
    model = random_seq2seq("flan-t5", eos_token_id=1, **sizes).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(folder: Path, out: Path, rows: list, **sections) -> Recipe:
    source = out / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"sources": [str(source)], "cache_dir": str(out / "cache"), "format": "seq2seq"}
    evaluation = {"tree": "tiny_k2", "prompts": "holdout", "max_new_tokens": 12, "batch_size": 2}
    return from_dict(
        {
            "name": "seq2seq",
            "target": {"model": str(folder)},
            "data": data | {"holdout": 3} | sections.pop("data", {}),
            "train": {"steps": 1},
            "output": {"dir": str(out / "run")},
            "eval": evaluation | sections.pop("eval", {}),
            **sections,
        }
    )


def test_rows_and_features_do_not_depend_on_other_sources(folder, tmp_path):
    made = recipe(folder, tmp_path, ROWS)
    target = Target.of_recipe(made.target, "cpu")
    tokens = build_tokens(made, target.tokenizer)
    encode = target.tokenizer.encode
    for n, row in enumerate(ROWS[:8]):
        answer = [*encode(row["target"]), target.tokenizer.eos_token_id]
        assert tokens[n]["input_ids"].tolist() == [0, *answer]
        assert tokens[n]["loss_mask"].tolist() == [False] + [True] * len(answer)
        assert tokens[n]["source_ids"].tolist() == encode(row["source"])
    cached, online = build_features(made, tokens, target), OnlineFeatures(made, tokens, target)
    for n in range(8):
        ids, source = (tokens[n][name][None] for name in ("input_ids", "source_ids"))
        alone = target.features(ids, source=source)[0]
        for item in (cached[n], online.__getitems__([n, 7])[0]):  # batched with a longer source
            torch.testing.assert_close(item["features"], alone, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"document": "Hello there", "summary": "Hello"}, "Summarize: Hello there"),
        ({"article": "Hello there", "highlights": "Hello"}, "Summarize: Hello there"),
        ({"translation": {"en": "Hi", "de": "Ha"}}, "Translate English to German: Hi"),
    ],
)
def test_rows_of_published_datasets_are_read_as_sources_and_targets(folder, tmp_path, row, asked):
    made = recipe(folder, tmp_path, [row] * 4, data={"holdout": 1})
    tokenizer = Target.of_recipe(made.target, "cpu").tokenizer
    (prompt,) = load_prompts(made, tokenizer)
    assert (prompt.input_ids, prompt.source) == ([0], tokenizer.encode(asked))


def test_an_invalid_row_is_named_by_its_line(folder, tmp_path):
    made = recipe(folder, tmp_path, [*ROWS, {"source": "no target"}])
    tokenizer = Target.of_recipe(made.target, "cpu").tokenizer
    with pytest.raises(DataError, match=r"rows.jsonl:12: has neither of source and target, .*"):
        build_tokens(made, tokenizer)


def test_every_method_gives_the_targets_own_answers(folder, tmp_path):
    methods = ["plain", "generate", "prompt_lookup", "ssd", "falcon_tree"]
    student = {"model": str(folder), "training": "none"}
    made = recipe(folder, tmp_path, ROWS, eval={"methods": methods}, student=student)
    target = Target.of_recipe(made.target, "cpu")
    head = head_config(made, TargetShape.of(target.config), identity=target.identity())
    torch.manual_seed(0)
    FalconHead(head).save_pretrained(tmp_path / "run" / "falcon")
    report = measure([made], tmp_path / "out")
    for run in report["runs"]:
        assert (run["identical"], run["outputs"]) == (3, 3), run["method"]
    assert next(r for r in report["runs"] if r["method"] == "ssd")["accepted_per_step"] > 1


def test_regenerated_answers_are_the_targets_own_for_each_source(folder, tmp_path):
    rewriting = {"answers": "target", "max_new_tokens": 9, "batch_rows": 3, "max_length": 24}
    made = recipe(folder, tmp_path, ROWS, data=rewriting)
    target = Target.of_recipe(made.target, "cpu")
    tokens = build_tokens(made, target.tokenizer, Answers(made, target), target.identity())
    assert len({tuple(tokens[n]["input_ids"].tolist()) for n in range(8)}) > 3
    for n, row in enumerate(ROWS[:8]):
        source = target.tokenizer.encode(row["source"])[:24]  # truncated as in the row
        assert tokens[n]["source_ids"].tolist() == source
        assert tokens[n]["input_ids"].tolist() == [0, *generated(target, source, 9)]


def test_a_source_beyond_the_targets_positions_gets_no_answer():
    target = random_seq2seq("bart")  # it has 128 positions
    asks = [Ask([2, 5], 200, 0.0, 0, source=[7] * length) for length in (128, 129)]
    (_, first), (_, last) = sorted(within_context(partial(answer, target, 2), target)(asks))
    assert len(first.tokens) == 126
    assert (last.tokens, last.failure[:22]) == ([], "a source of 129 tokens")


def test_unsupported_combinations_are_refused_with_a_remedy(folder, tmp_path):
    served = {"answers": "target", "max_new_tokens": 9, "server": "http://127.0.0.1:1/v1"}
    with pytest.raises(RecipeError, match="answers need sources; set it to null"):
        recipe(folder, tmp_path, ROWS, data=served)
    target = Target.load(str(folder))
    with pytest.raises(DataError, match="tiny is no encoder-decoder"):
        load_prompts(recipe("tiny", tmp_path, ROWS), st.small_tokenizer())
    with pytest.raises(TargetError, match=r"set data\.format=seq2seq"):
        target.features(torch.tensor([[1, 2]]))
