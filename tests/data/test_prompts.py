"""Prompts come from every benchmark's rows, and end where the target starts to write."""

from pathlib import Path

import pytest
import small_tokenizer as st
from test_tokens import chats, recipe, write
from tokenizers.processors import TemplateProcessing

from specdraft.data.prompts import load_prompts, validation_prompts
from specdraft.data.sources import bundled_file
from specdraft.models.target_files import bundled_target_dir, load_tokenizer
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import from_dict

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def prompts(folder: Path, rows: list | str, tokenizer=None, data: dict | None = None, **evaluation):
    source = write(folder / "train.jsonl", chats(6))
    name = rows if isinstance(rows, str) else write(folder / "bench.jsonl", rows)
    tree = recipe(folder, source, **(data or {})).to_dict()
    tree["eval"] |= {"prompts": name, **evaluation}
    return load_prompts(from_dict(tree), tokenizer or st.small_tokenizer())


def rendered(*messages: tuple[str, str]) -> str:
    parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
    return "".join(parts) + "<|im_start|>assistant\n"


ASKED = rendered(("user", "Hello"))
USER, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"turns": ["Hello", "Again"]}, ASKED),
        ({"prompt": "Hello"}, ASKED),
        ({"question": "Hello", "answer": "Hi"}, ASKED),
        ({"instruction": "Hello", "output": "Hi"}, ASKED),
        ({"messages": [USER]}, ASKED),
        ({"messages": [USER, ANSWER]}, ASKED),
        ({"conversations": [{"from": "human", "value": "Hello"}]}, ASKED),
        (
            {"messages": [USER, ANSWER, {"role": "user", "content": "more"}]},
            rendered(("user", "Hello"), ("assistant", "Hi"), ("user", "more")),
        ),
    ],
)
def test_a_row_of_any_benchmark_becomes_a_prompt(tmp_path, row, text):
    tokenizer = st.small_tokenizer()
    (prompt,) = prompts(tmp_path, [{"id": 7, "category": "math", **row}], tokenizer)
    assert tokenizer.decode(prompt.input_ids) == text
    assert (prompt.id, prompt.category) == ("7", "math")


def test_a_question_is_preferred_to_a_text_that_contains_its_answer(tmp_path):
    """The Hub's copy of Alpaca has both."""
    tokenizer, row = st.small_tokenizer(), {"instruction": "Hello", "input": "", "output": "Hi"}
    (prompt,) = prompts(tmp_path, [row | {"text": "Below is: Hello. Hi"}], tokenizer)
    assert tokenizer.decode(prompt.input_ids) == ASKED


@pytest.mark.parametrize("name", ["", "gsm8k:"])
def test_empty_columns_of_a_row_are_ignored(tmp_path, name):
    """As in a table with rows of several kinds."""
    row = dict.fromkeys(("id", "messages", "conversations", "text", "category"))
    rows = write(tmp_path / "table.jsonl", [{**row, "question": "Hello"}] * 3)
    found = prompts(tmp_path, name + rows)
    assert [prompt.id for prompt in found] == ["1", "2", "3"]


@pytest.mark.parametrize("row", [{"prompt": "a\ud800b"}, {"text": "a\ud800b"}])
def test_half_a_surrogate_pair_is_refused_with_its_place(tmp_path, row):
    half = r"bench.jsonl:2: \\ud800 at character \d+ is half of a pair"
    with pytest.raises(DataError, match=half):
        prompts(tmp_path, [{"prompt": "Hello"}, row], data={"prompt_tokens": 4})


def test_a_text_is_cut_to_its_first_tokens(tmp_path):
    tokenizer, text = st.small_tokenizer(None), "Hello there, how are you today?"
    (prompt,) = prompts(tmp_path, [{"text": text}], tokenizer, prompt_tokens=5)
    assert prompt.input_ids == tokenizer(text)["input_ids"][:5]
    assert text.startswith(prompt.text)
    for own, length in ({"prompt_tokens": 5}, 5), ({}, 3):  # data.prompt_tokens is the default
        (prompt,) = prompts(tmp_path, [{"text": text}], tokenizer, {"prompt_tokens": 3}, **own)
        assert len(prompt.input_ids) == length
    with pytest.raises(DataError, match=r"eval.prompt_tokens = None"):
        prompts(tmp_path, [{"text": text}], tokenizer)


def test_an_end_token_that_the_tokenizer_appends_is_removed_from_a_prompt(tmp_path):
    """After it the target would start another text."""
    plain, tokenizer = st.small_tokenizer(None), st.small_tokenizer(None)
    end = [("</s>", tokenizer.eos_token_id)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=end)
    assert tokenizer("Hello")["input_ids"][-1] == tokenizer.eos_token_id
    for row in ({"prompt": "Hello"}, {"text": "Hello"}):
        (prompt,) = prompts(tmp_path, [row], tokenizer, prompt_tokens=99)
        assert prompt.input_ids == plain("Hello")["input_ids"]


def test_a_base_model_is_given_the_bare_question(tmp_path):
    tokenizer = st.small_tokenizer(None)
    (prompt,) = prompts(tmp_path, [{"turns": ["Hello"]}], tokenizer)
    assert prompt.input_ids == tokenizer("Hello")["input_ids"]


def test_rows_that_share_an_id_are_separate_prompts(tmp_path):
    rows = [{"id": n % 2, "prompt": f"What is {n} plus 2?"} for n in range(10)]
    measured = prompts(tmp_path, rows, limit=4)
    assert len({prompt.id for prompt in measured}) == 4
    tree = recipe(tmp_path, str(tmp_path / "train.jsonl")).to_dict()
    tree["eval"] |= {"prompts": str(tmp_path / "bench.jsonl"), "limit": 4, "validation": 4}
    chosen = validation_prompts(from_dict(tree), st.small_tokenizer())
    assert len(chosen) == 4
    assert not {prompt.text for prompt in chosen} & {prompt.text for prompt in measured}


def test_a_limit_is_spread_over_the_categories(tmp_path):
    rows = [
        {"id": f"{c}{n}", "category": c, "prompt": "x"}
        for c, many in (("a", 5), ("b", 1), ("c", 3))
        for n in range(many)
    ]
    taken = [p.id for p in prompts(tmp_path, rows, limit=6)]
    assert taken == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert len(prompts(tmp_path, rows, limit=99)) == 9


def test_the_prompts_of_held_out_conversations_are_their_first_questions(tmp_path):
    tokenizer = st.small_tokenizer()
    asked = prompts(tmp_path, "holdout", tokenizer, data={"holdout": 2})
    assert [tokenizer.decode(p.input_ids) for p in asked] == [
        rendered(("user", f"Question number {n}?")) for n in (4, 5)
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "does not parse"),
        ({"nothing": 1}, "its keys: nothing"),
        ({"messages": [ANSWER]}, "no user turn"),
        ({"turns": []}, "its keys: turns"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role"),
    ],
)
def test_a_row_that_is_no_prompt_is_an_error_with_its_line(tmp_path, row, reason):
    with pytest.raises(DataError, match=rf"bench.jsonl:2: .*{reason}"):
        prompts(tmp_path, [{"prompt": "fine"}, row])


def test_missing_prompts_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file at /nowhere.jsonl; give tiny_chat, holdout"):
        prompts(tmp_path, "/nowhere.jsonl")


def test_the_bundled_prompts_cover_five_categories(tmp_path):
    if not bundled_file("prompts.jsonl").exists():
        pytest.skip("data/tiny.py has not written its prompts yet")
    tokenizer = load_tokenizer(bundled_target_dir())
    assert len({p.category for p in prompts(tmp_path, "tiny_chat", tokenizer)}) == 5


@pytest.mark.parametrize(
    ("name", "count", "categories"),
    [
        ("mt_bench/question.jsonl", 80, 8),
        ("spec_bench/question.jsonl", 480, 13),
        ("humaneval/HumanEval.jsonl", 164, 1),
        ("gsm8k/test.jsonl", 1319, 1),
    ],
)
def test_real_benchmarks_are_read_completely(tmp_path, name, count, categories):
    if not (SHARED / name).exists():
        pytest.skip(f"no {name} beside the repository")
    found = prompts(tmp_path, str(SHARED / name))
    assert (len(found), len({p.category for p in found})) == (count, categories)


def test_the_bundled_prompts_are_refused_for_another_target(tmp_path):
    with pytest.raises(DataError, match=r"tiny_chat.* knows nothing; set eval.prompts=holdout"):
        prompts(tmp_path, "tiny_chat")
    assert len(prompts(tmp_path, "tiny_chat", load_tokenizer(bundled_target_dir()))) == 200
