"""Published prompt sets are read by name, in their own formats, turn by turn."""

import json
from dataclasses import replace

import pytest
import small_tokenizer as st
from test_prompts import SHARED, prompts, rendered
from test_tokens import write

from specdraft.data.prompt_sets import MASKED, SETS, read_questions, set_of
from specdraft.data.prompts import load_prompts, next_turn, validation_prompts
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Completion, Request, Step
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.categories import add_speedups, by_category, macro
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.report import evaluate
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import load_recipe

TWO = {"question_id": 81, "category": "writing", "turns": ["Hello", "Once more"]}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {
    "mt_bench": (TWO, "Hello", "writing"),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():"}, "def f():", "humaneval"),
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, "How many?", "gsm8k"),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": ""}, "Sort.\n\nb a", "alpaca"),
    "cnn_dailymail": ({"article": "News.", "id": "x"}, "Summarize: News.", "cnn_dailymail"),
    "xsum": ({"document": "News.", "id": "x"}, "Summarize: News.", "xsum"),
    "wmt14_en_de": (
        {"translation": {"de": "Ja", "en": "Yes"}},
        "Translate English to German: Yes",
        "wmt14_en_de",
    ),
    "spec_bench": (TWO, "Hello", "mt_bench"),
    "math500": ({"problem": "x?", "unique_id": "a/1.json"}, f"x?{BOXED}", "math500"),
    "aime25": ({"problem": "x?", "answer": "70", "id": "0"}, f"x?{BOXED}", "aime25"),
    "mbpp": ({"task_id": 2, "prompt": "Write it.", "code": ""}, "Write it.", "mbpp"),
    "livecodebench": (
        {"question_id": "1873_A", "question_content": "Sort.", "starter_code": ""},
        "### Question:\nSort.\n\n### Format: Read the input from stdin, solve the problem and "
        "write the answer to stdout.\n```python\n# YOUR CODE HERE\n```\n\n### Answer:",
        "livecodebench",
    ),
    "arena_hard": (
        {"uid": "2edb", "category": "hard_prompt", "prompt": "Plan."},
        "Plan.",
        "arena_hard",
    ),
    **dict.fromkeys(
        ["speed_bench", *(f"speed_bench_{n}k" for n in (1, 2, 8, 16, 32))],
        (
            TWO | {"sub_category": None, "source": "x", "src_id": "1", "multiturn": True},
            "Hello",
            "writing",
        ),
    ),
}
NINE = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "alpaca", "arena_hard"]


def test_every_set_is_tested_here():
    assert ROWS.keys() == SETS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_published_format_becomes_a_question(tmp_path, name):
    row, text, category = ROWS[name]
    (prompt,) = prompts(tmp_path, f"{name}:{write(tmp_path / 'set.jsonl', [row])}")
    assert (prompt.text, prompt.category) == (text, category)
    assert st.small_tokenizer().decode(prompt.input_ids) == rendered(("user", text))
    assert prompt.later == (("Once more",) if "turns" in row else ())


def test_the_hubs_copy_of_mt_bench_reads_like_the_published_one(tmp_path):
    row = {"prompt": TWO["turns"], "category": "writing", "prompt_id": 81, "reference": []}
    path = write(tmp_path / "hub.jsonl", [row])
    ours = write(tmp_path / "published.jsonl", [TWO])
    (hub,), (published,) = (list(read_questions(f"mt_bench:{p}")) for p in (path, ours))
    assert (hub.id, hub.turns) == (published.id, published.turns) == ("81", TWO["turns"])


@pytest.mark.parametrize("name", NINE)
def test_only_the_first_turn_of_deepspecs_files_is_asked(tmp_path, name):
    (prompt,) = prompts(tmp_path, f"{name}:{write(tmp_path / 'set.jsonl', [TWO])}")
    assert (prompt.text, prompt.category, prompt.later) == ("Hello", name, ())


def test_other_published_forms_of_a_row(tmp_path):
    forms = {
        "arena_hard": {"question_id": "a", "turns": [{"content": "Plan."}]},  # version 0.1
        "mbpp": {"task_id": 11, "text": "Plan.", "code": ""},  # the full set
        "livecodebench": {"question_content": "Sort.", "starter_code": "class Solution: ..."},
    }
    texts = {}
    for name, row in forms.items():
        (prompt,) = prompts(tmp_path, f"{name}:{write(tmp_path / 'set.jsonl', [row])}")
        texts[name] = prompt.text
    assert texts["arena_hard"] == texts["mbpp"] == "Plan."
    assert "starter code.\n```python\nclass Solution: ...\n```" in texts["livecodebench"]


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("gsm8k", {"turns": []}, "no turns"),
        ("arena_hard", {"turns": []}, "no turns"),
        ("arena_hard", {"turns": [{"text": "x"}]}, "no 'content'"),
        ("math500", {"problem": None}, "not a row of math500"),
        ("livecodebench", {"question_content": "x"}, "no 'starter_code'"),
        ("speed_bench", {"category": "qa", "turns": None}, "not a row of speed_bench"),
        (
            "speed_bench_2k",
            {"category": "qa", "turns": [f"{MASKED} USING SPECDEC_BENCH"]},
            "not published with the set; fetch all with prepare_data.py",
        ),
        ("gsm8k", {"prompt": "x"}, r"no 'question'\); its format is \{\"question\""),
        ("humaneval", {"prompt": " "}, "an empty question"),
        ("mt_bench", {"category": "a", "turns": "Hello"}, "no turns"),
        ("mt_bench", {"turns": ["Hello"]}, "no 'category'"),
        ("wmt14_en_de", {"translation": "Yes"}, "not a row of wmt14_en_de"),
        ("xsum", {"document": 3}, "not a row of xsum"),
        ("alpaca", ["x"], "list is not an object"),
        ("alpaca", "{broken", "does not parse"),
    ],
)
def test_a_row_of_another_format_is_an_error_naming_its_line(tmp_path, name, row, reason):
    path = write(tmp_path / "set.jsonl", [ROWS[name][0], row, row])
    with pytest.raises(DataError, match=rf"set.jsonl:2: .*{reason}"):
        prompts(tmp_path, f"{name}:{path}")


def test_an_unknown_set_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"no file at mtbench; .*mt_bench, humaneval, gsm8k"):
        prompts(tmp_path, "mtbench")
    with pytest.raises(DataError, match=r"eval.prompts = gsm8k:gone.jsonl: no file at gone.jsonl"):
        prompts(tmp_path, "gsm8k:gone.jsonl")


def test_a_set_that_cannot_be_fetched_says_what_to_do(tmp_path, monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"openai/gsm8k .*\(no route\); give .* gsm8k:PATH"):
        prompts(tmp_path, "gsm8k")
    with pytest.raises(DataError, match=r"hemingkx/Spec-Bench and give spec_bench:PATH"):
        prompts(tmp_path, "spec_bench")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(DataError, match=r"= arena_hard: cannot fetch hf://.* give .* arena_hard:"):
        prompts(tmp_path, "arena_hard")


@pytest.mark.parametrize("name", [name for name in SETS if SETS[name].hub])
def test_a_set_named_without_a_file_is_fetched_from_the_hub(tmp_path, monkeypatch, name):
    import datasets
    import huggingface_hub

    asked = []

    def reached(repository, configuration, split):
        asked.append((repository, configuration, split))
        return datasets.Dataset.from_list([ROWS[name][0]])

    def file_reached(repository, filename, **_):
        asked.append(f"hf://datasets/{repository}/{filename}")
        return write(tmp_path / "rows.jsonl", [ROWS[name][0]])

    monkeypatch.setattr(datasets, "load_dataset", reached)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", file_reached)
    (prompt,) = prompts(tmp_path, name)
    assert (prompt.text, prompt.category) == ROWS[name][1:]
    assert asked == [SETS[name].hub]


def test_the_next_turn_follows_the_answer(tmp_path):
    recipe, tokenizer = load_recipe("recipes/tiny.yaml"), st.small_tokenizer()
    (prompt,) = prompts(tmp_path, [{"id": 7, "turns": ["Hello", "more", "USER: sure?"]}])
    second = next_turn(recipe, tokenizer, prompt, "Hi")
    chat = [("user", "Hello"), ("assistant", "Hi"), ("user", "more")]
    assert tokenizer.decode(second.input_ids) == rendered(*chat)
    assert (second.id, second.turn, second.text, second.later) == ("7", 2, "more", ("USER: sure?",))
    bare = next_turn(recipe, st.small_tokenizer(None), prompt, "Hi")
    assert bare.input_ids == st.small_tokenizer(None)("Hello\n\nHi\n\nmore")["input_ids"]


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


def test_a_prompt_that_leaves_no_room_for_its_answer_is_refused(tiny, tmp_path):
    name = write(tmp_path / "long.jsonl", [{"id": "long", "prompt": "word " * 1010}])
    recipe = load_recipe("recipes/tiny.yaml", [f"eval.prompts={name}", "eval.max_new_tokens=16"])
    (prompt,) = load_prompts(recipe, tiny.tokenizer)
    length = len(prompt.input_ids)
    assert length < 1024 < length + 16
    with pytest.raises(DataError, match=rf"prompt long has {length} tokens .* a context of 1024"):
        expand_turns(recipe, tiny, [prompt])


def test_a_later_turn_that_leaves_no_room_for_its_answer_is_refused(tiny, tmp_path):
    turns = ["word " * 500, "word " * 500]
    name = write(tmp_path / "long.jsonl", [{"id": "long", "turns": turns}])
    recipe = load_recipe("recipes/tiny.yaml", [f"eval.prompts={name}", "eval.max_new_tokens=16"])
    with pytest.raises(DataError, match=r"prompt long \(turn 2\) has \d+ tokens .* of 1024"):
        expand_turns(recipe, tiny, load_prompts(recipe, tiny.tokenizer))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_gets_the_history_written_by_plain_decoding(tiny, tmp_path, temperature):
    rows = [
        {"question_id": 1, "category": "math", "turns": ["What is 3 + 4?", "And now double it."]},
        {"question_id": 2, "category": "coding", "turns": ["Tell me a story about a fox."]},
        {"question_id": 3, "category": "math", "turns": ["Will I like honey bread?", "Why?"]},
    ]
    name = f"mt_bench:{write(tmp_path / 'question.jsonl', rows)}"
    settings = [f"eval.prompts={name}", "eval.max_new_tokens=16", "train.threads=1"]
    recipe = load_recipe("recipes/tiny.yaml", [*settings, f"eval.temperature={temperature}"])
    questions = load_prompts(recipe, tiny.tokenizer)
    turns = expand_turns(recipe, tiny, questions)
    assert [(p.id, p.turn) for p in turns] == [("1", 1), ("1", 2), ("2", 1), ("3", 1), ("3", 2)]
    for number in (0, 3):  # by hand: answer, render, compare
        request = Request(turns[number].input_ids, 16, temperature, seed=number)
        (done,) = Decoder(tiny, capacity=512).run([request])
        history = [{"role": "user", "content": turns[number].text}]
        answer = tiny.tokenizer.decode(done.tokens, skip_special_tokens=True).strip()
        history.append({"role": "assistant", "content": answer})
        history.append({"role": "user", "content": turns[number + 1].text})
        text = tiny.tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=True
        )
        ids = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert turns[number + 1].input_ids == ids
    report = evaluate(recipe, tiny, Trained(), questions, ["plain", "prompt_lookup"])
    assert len(report["runs"]) == 2
    for row in report["runs"]:
        assert row["outputs"] == row["identical"] + row["near_ties"] == 5
        found = [(c["category"], c["questions"], c["outputs"]) for c in row["categories"]]
        assert found == [("math", 2, 4), ("coding", 1, 1)]
        assert sum(c["tokens"] for c in row["categories"]) == row["tokens"]
        assert row["macro_speedup"] > 0


def test_validation_stops_after_the_first_turn(tiny, tmp_path):
    rows = [{**TWO, "question_id": n} for n in range(5)]
    name = f"mt_bench:{write(tmp_path / 'question.jsonl', rows)}"
    recipe = load_recipe("recipes/tiny.yaml", [f"eval.prompts={name}", "eval.limit=3"])
    found = validation_prompts(recipe, tiny.tokenizer)
    assert [(p.id, p.later) for p in found] == [("3", ()), ("4", ())]


def test_spec_bench_averages_speed_over_questions_and_pools_steps(tmp_path):
    rows = [
        {"question_id": 1, "category": "math", "turns": ["a", "b"]},
        {"question_id": 2, "category": "writing", "turns": ["a"]},
        {"question_id": 3, "category": "rag", "turns": ["a"]},
    ]
    name = f"spec_bench:{write(tmp_path / 'question.jsonl', rows)}"
    asked = prompts(tmp_path, name)
    recipe, tokenizer = load_recipe("recipes/tiny.yaml"), st.small_tokenizer()
    flat = [asked[0], next_turn(recipe, tokenizer, asked[0], "x"), *asked[1:]]

    def outcomes(times):  # (tokens, steps, seconds) per output
        done = [Completion(0, [1] * t, [Step(1, 0, 0, 0)] * s) for t, s, _ in times]
        pairs = zip(done, times, strict=True)
        return [Outcome([one], seconds, Timing()) for one, (_, _, seconds) in pairs]

    ours = outcomes([(8, 2, 1.0), (4, 2, 1.0), (6, 6, 3.0), (10, 5, 1.0)])
    plain = outcomes([(8, 8, 4.0), (4, 4, 2.0), (6, 6, 2.0), (10, 10, 2.0)])
    rows = [macro(flat, p) | {"categories": by_category(flat, p)} for p in (ours, plain)]
    for row in rows:
        add_speedups(row, rows[1])
    mt_bench, rag = rows[0]["categories"]
    assert (mt_bench["category"], mt_bench["questions"], mt_bench["outputs"]) == ("mt_bench", 2, 3)
    assert mt_bench["tokens_per_step"] == 18 / 10
    assert mt_bench["macro_tokens_per_second"] == (12 / 2 + 6 / 3) / 2
    assert mt_bench["macro_speedup"] == ((6 + 2) / 2) / ((2 + 3) / 2)
    assert rag["macro_speedup"] == 10 / 5
    assert rows[0]["macro_tokens_per_second"] == (6 + 2 + 10) / 3
    assert rows[0]["macro_speedup"] == ((6 + 2 + 10) / 3) / ((2 + 3 + 5) / 3)
    together = [Outcome([c for o in ours for c in o.completions], 6.0, Timing())]
    assert macro(flat, together)["macro_tokens_per_second"] is None
    assert by_category(flat, together)[0]["macro_tokens_per_second"] is None
    alone = macro(flat, ours) | {"categories": by_category(flat, ours)}
    add_speedups(alone, None)
    assert alone["macro_speedup"] is None


REAL = {
    "mt_bench": "mt_bench/question.jsonl",
    "spec_bench": "spec_bench/question.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl",
    "gsm8k": "gsm8k/test.jsonl",
}


def ten_rows(name: str) -> list[dict]:
    """Rows of the real file that fit a short context, if it is there; else ten made-up ones."""
    file = SHARED / REAL.get(name, "none")
    if file.is_file():
        rows = [json.loads(line) for line in file.read_bytes().splitlines() if len(line) < 1500]
        return rows[:: len(rows) // 10][:10]
    made = json.dumps(ROWS[name][0])
    return [json.loads(made.replace("Hello", f"Hello {n}")) for n in range(10)]


@pytest.mark.parametrize("name", SETS)
def test_ten_questions_of_every_set_are_decoded_and_counted(tiny, tmp_path, name):
    rows = ten_rows(name)
    file = write(tmp_path / "set.jsonl", rows)
    settings = [f"eval.prompts={name}:{file}", "eval.max_new_tokens=3", "eval.threads=1"]
    recipe = load_recipe("recipes/tiny.yaml", settings)
    questions = load_prompts(recipe, tiny.tokenizer)
    report = evaluate(recipe, tiny, Trained(), questions, ["plain", "prompt_lookup"])
    turns = sum(1 if name in NINE else len(row.get("turns", [0])) for row in rows)
    for row in report["runs"]:
        assert row["outputs"] == row["identical"] == turns
        assert sum(entry["questions"] for entry in row["categories"]) == 10
        assert row["protocol"] == str(set_of(name).protocol)
        assert (
            f"up to 3 new tokens, not {set_of(name).protocol.max_new_tokens}" in row["departures"]
        )
        assert row["macro_tokens_per_step"] >= 1


def test_departures_from_a_protocol_are_named_one_by_one():
    settings = load_recipe("recipes/tiny.yaml", ["eval.max_new_tokens=2048"]).eval
    gsm8k, mt_bench = set_of("gsm8k"), set_of("mt_bench:file.jsonl")
    assert [*gsm8k.departures(settings, True, [1] * 500)] == [
        "temperature 0, not 1",
        "trees, not chains",
    ]
    as_told = replace(settings, temperature=1.0)
    assert [*gsm8k.departures(as_told, False, [1] * 500)] == []
    assert [*gsm8k.departures(replace(as_told, batch_size=4, spread=2.0), False, [2] * 9)] == [
        "lengths spread, and no end token ends an answer",
        "batch 4, not 1",
        "second turns, too",
        "9 questions, not 500",
    ]
    cut = replace(as_told, top_k=20, top_p=0.8)
    assert [*gsm8k.departures(cut, False, [1] * 500)] == [
        "the likeliest 20 tokens, not all",
        "the likeliest tokens up to 0.8 of the probability, not all",
    ]
    greedy = replace(cut, temperature=0.0)  # greedy ignores both cuts
    assert [*gsm8k.departures(greedy, False, [1] * 500)] == ["temperature 0, not 1"]
    assert [*mt_bench.departures(settings, True, [2] * 80)] == ["up to 2048 new tokens, not 1024"]
    assert set_of("tiny_chat") is set_of("my/gsm8k.jsonl") is None


def test_acceptance_lengths_are_averaged_over_questions_and_categories(tmp_path):
    rows = [{**TWO, "question_id": n, "category": c} for n, c in enumerate(["qa", "qa", "rag"])]
    asked = prompts(tmp_path, f"speed_bench:{write(tmp_path / 'set.jsonl', rows)}")
    done = [(4, 2), (9, 3), (10, 2)]  # tokens and steps of an answer
    parts = [
        Outcome([Completion(0, [1] * t, [Step(1, 0, 0, 0)] * s)], 1.0, Timing()) for t, s in done
    ]
    qa, rag = by_category(asked, parts)
    assert (qa["macro_tokens_per_step"], rag["macro_tokens_per_step"]) == (2.5, 5.0)
    assert macro(asked, parts)["macro_tokens_per_step"] == (2 + 3 + 5) / 3


@pytest.mark.parametrize(
    ("name", "file", "count", "categories"),
    [
        ("mt_bench", "mt_bench/question.jsonl", 80, 8),
        ("spec_bench", "spec_bench/question.jsonl", 480, 6),
        ("humaneval", "humaneval/HumanEval.jsonl", 164, 1),
        ("gsm8k", "gsm8k/test.jsonl", 1319, 1),
    ],
)
def test_the_real_files_are_read_completely(tmp_path, name, file, count, categories):
    if not (SHARED / file).exists():
        pytest.skip(f"no {file} beside the repository")
    rows = [json.loads(line) for line in (SHARED / file).read_bytes().splitlines()]
    found = prompts(tmp_path, f"{name}:{SHARED / file}")
    assert (len(found), len({p.category for p in found})) == (count, categories)
    assert len({p.id for p in found}) == count
    if "turns" in rows[0]:
        assert [[p.text, *p.later] for p in found] == [row["turns"] for row in rows]
        assert sum(1 for p in found if p.later) == 80
    else:
        assert [p.text for p in found] == [row.get("prompt", row.get("question")) for row in rows]
