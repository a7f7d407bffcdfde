"""Conversations are read from every format, and only what the assistant wrote is supervised."""

import json
from pathlib import Path

import pytest
import small_tokenizer as st

from specdraft.data.chat import read_conversations, split_holdout
from specdraft.data.template import Template, UnrenderableError, preview
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import DataSection

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
TURNS = [("user", "Hello there"), ("assistant", " The answer is 42. "), ("user", "USER: sure?")]
TURNS += [("assistant", "I am fine")]
CHAT = [{"role": role, "content": content} for role, content in TURNS]


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return str(path)


def sharegpt(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": name, "value": value} for name, value in turns]}


def good(count: int) -> list[dict]:
    return [sharegpt(("human", f"question {n}"), ("gpt", f"answer {n}")) for n in range(count)]


def supervised(template: str, messages: list[dict]) -> list[str]:
    """Return the supervised spans of a rendered chat as text."""
    tokenizer = st.small_tokenizer(template)
    ids, mask = Template(tokenizer).render(messages)
    stretches, before = [], False
    for token, marked in zip(ids, mask, strict=True):
        if marked and not before:
            stretches.append([])
        if marked:
            stretches[-1].append(token)
        before = marked
    return [tokenizer.decode(stretch) for stretch in stretches]


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("row", "question"),
    [
        (sharegpt(("human", "q"), ("gpt", "a")), "q"),
        (sharegpt(("user", "q"), ("chatgpt", "a")), "q"),
        (sharegpt(("user", "q"), ("bing", "a"), ("user", "more"), ("bard", "b")), "q"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "q",
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "q"),
        ({"instruction": "q", "input": "x", "output": "a"}, "q\n\nx"),
    ],
)
def test_every_chat_format_is_recognised_by_its_keys(tmp_path, row, question):
    corpus = read_conversations([write(tmp_path / "rows.jsonl", [row])])
    messages = corpus.conversations[0].messages
    assert messages[0] == {"role": "user", "content": question}
    assert messages[1] == {"role": "assistant", "content": "a"}


def test_openai_messages_with_developer_roles_and_content_parts_are_read(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [("developer", "be kind"), ("user", parts), ("assistant", "c")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    messages = read_conversations([write(tmp_path / "r.jsonl", [row])]).conversations[0].messages
    assert messages[0] == {"role": "system", "content": "be kind"}
    assert messages[1] == {"role": "user", "content": "ab"}


def test_a_text_row_is_not_read_as_a_chat(tmp_path):
    corpus = read_conversations([write(tmp_path / "rows.jsonl", [{"text": "Once"}])])
    assert (corpus.conversations[0].text, corpus.conversations[0].messages) == ("Once", [])


def test_json_array_json_lines_arrow_and_parquet_give_the_same_conversations(tmp_path):
    import datasets

    rows = good(3)
    array = tmp_path / "array.json"
    array.write_text(json.dumps(rows, indent=1))
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    places = [array, write(tmp_path / "rows.jsonl", rows), tmp_path / "saved"]
    places.append(tmp_path / "rows.parquet")
    read = [read_conversations([str(place)]).conversations for place in places]
    assert all([c.messages for c in other] == [c.messages for c in read[0]] for other in read)
    assert read[1][2].origin == f"{tmp_path / 'rows.jsonl'}:3"


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    row = sharegpt(("human", "one\u2028two\x85three"), ("gpt", "a"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_conversations([str(path)]).conversations[0].messages[0]["content"].count("\u2028")


@pytest.mark.parametrize("end", [("human", "and?"), ("tool", "42")])
def test_leading_answers_and_unanswered_last_turns_are_dropped(tmp_path, end):
    turns = [("gpt", "before"), ("human", "q"), ("gpt", "a"), end]
    corpus = read_conversations([write(tmp_path / "rows.jsonl", [sharegpt(*turns)])])
    assert [m["content"] for m in corpus.conversations[0].messages] == ["q", "a"]


def test_a_system_prompt_is_kept_and_none_is_invented(tmp_path):
    rows = [sharegpt(("system", "be kind"), ("human", "q"), ("gpt", "a")), *good(1)]
    corpus = read_conversations([write(tmp_path / "rows.jsonl", rows)])
    roles = [[m["role"] for m in c.messages] for c in corpus.conversations]
    assert roles == [["system", "user", "assistant"], ["user", "assistant"]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "does not parse as JSON"),
        ({"other": 1}, "no 'conversations'"),
        (sharegpt(("human", "q"), ("alien", "a")), "unknown role 'alien'"),
        (sharegpt(("human", "q")), "no assistant turn"),
        (sharegpt(("human", "q"), ("gpt", " ")), "an empty assistant turn"),
        (sharegpt(("human", "q"), ("human", "q"), ("gpt", "a")), "a user turn after user"),
        (
            sharegpt(("human", "q" * 10_000_000), ("gpt", "a")),
            "turn of 10,000,000 characters, more",
        ),
        (
            sharegpt(("human", "\ud800"), ("gpt", "a")),
            "is no Unicode text (surrogates not allowed)",
        ),
        ("[" * 100_000, "does not parse as JSON (maximum recursion depth"),
        (
            b'{"conversations": [{"from": "human", "value": "\xff"}]}',
            "does not parse as JSON ('utf-8'",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, "is NoneType, not text"),
        (
            {"conversations": [{"from": "human", "value": [{"type": "image_url", "url": "x"}]}]},
            "turn 1 has a part that is not text: {'type': 'image_url'",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "Let me see.", "tool_calls": [{"name": "look"}]},
                ]
            },
            "a turn with tool_calls",
        ),
    ],
)
def test_a_bad_row_is_counted_with_its_line_and_skipped(tmp_path, row, reason):
    rows = good(150)
    rows.insert(4, row)
    corpus = read_conversations([write(tmp_path / "rows.jsonl", rows)])
    assert len(corpus.conversations) == 150
    (reject,) = corpus.rejects
    assert (reject.file, reject.line) == (str(tmp_path / "rows.jsonl"), 5)
    assert reason in reject.reason


def test_more_than_one_percent_broken_rows_is_an_error_showing_the_first(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*good(98), "{broken", "nonsense"])
    with pytest.raises(DataError, match=r"2 of 100 rows cannot be read.*rows.jsonl:99") as error:
        read_conversations([path])
    assert "\n" not in str(error.value)


def test_a_file_without_any_answer_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", [sharegpt(("human", "q"))] * 3)
    with pytest.raises(DataError, match="no assistant turn that answers a user"):
        read_conversations([path])


@pytest.mark.parametrize("name", ["nowhere/rows.jsonl", "/nowhere.json", "nowhere"])
def test_a_missing_file_is_named(name):
    with pytest.raises(DataError, match=f"no file at {name}"):
        read_conversations([name])


def test_a_file_of_unknown_format_is_refused_with_the_known_formats(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"title": "x"}])
    with pytest.raises(DataError, match=r"keys title.*sharegpt, messages, alpaca, text"):
        read_conversations([path])


def answers_of(conversations):
    """The numbers of the `good` rows that the conversations come from."""
    return [int(one.messages[1]["content"].removeprefix("answer ")) for one in conversations]


def test_the_last_rows_are_held_out_and_the_first_ones_trained_on(tmp_path):
    path = write(tmp_path / "rows.jsonl", good(10))
    corpus, held_out = split_holdout(DataSection(sources=(path,), holdout=3, limit=4))
    assert answers_of(corpus.conversations) == [0, 1, 2, 3]
    assert answers_of(held_out) == [7, 8, 9]
    with pytest.raises(DataError, match=r"data.holdout = 10 leaves none of the 10"):
        split_holdout(DataSection(sources=(path,), holdout=10))


@pytest.mark.parametrize("holdout", [0, 3])
def test_a_seed_chooses_the_rows_of_a_limit_and_never_a_held_out_one(tmp_path, holdout):
    path = write(tmp_path / "rows.jsonl", good(10))

    def drawn(seed, limit=None):
        section = DataSection(sources=(path,), holdout=holdout, limit=limit, shuffle_seed=seed)
        corpus, held_out = split_holdout(section)
        assert answers_of(held_out) == [*range(10 - holdout, 10)]
        return answers_of(corpus.conversations)

    assert sorted(drawn(0)) == [*range(10 - holdout)]
    assert drawn(0, 6) == drawn(0)[:6]
    assert drawn(0) == drawn(0) != drawn(1)


# ---------------------------------------------------------------- loss mask


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (st.CHATML, [" The answer is 42. <|im_end|>", "I am fine<|im_end|>"]),
        (st.CHATML_MARKED, [" The answer is 42. <|im_end|>", "I am fine<|im_end|>"]),
        (st.LLAMA2, [" The answer is 42. </s>", " I am fine </s>"]),
        (st.VICUNA, ["  The answer is 42. </s>", " I am fine</s>"]),
        # The header ends in a space, and " I" is one token, which counts as the assistant's.
        (st.EOS_AT_THE_END, [" The answer is 42. \n", " I am fine\n</s>"]),
        (
            st.THINKING,
            [" The answer is 42. <|im_end|>", "<think>\n\n</think>\n\nI am fine<|im_end|>"],
        ),
    ],
    ids=["chatml", "generation_tags", "llama2", "vicuna", "eos_at_the_end", "thinking"],
)
def test_exactly_the_answers_and_their_end_of_turn_tokens_are_supervised(template, answers):
    assert supervised(template, CHAT) == answers


def test_masks_from_generation_tags_and_from_prefixes_are_equal():
    render = [Template(st.small_tokenizer(t)).render(CHAT) for t in (st.CHATML, st.CHATML_MARKED)]
    assert render[0] == render[1]


def test_the_mask_from_generation_tags_equals_the_tokenizers():
    tokenizer = st.small_tokenizer(st.CHATML_MARKED)
    encoded = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = Template(tokenizer).render(CHAT)
    assert ids == encoded["input_ids"]
    assert mask == [bool(m) for m in encoded["assistant_masks"]]


def test_an_answer_that_repeats_the_question_or_contains_an_end_of_turn_is_found():
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "write <|im_end|> at the end"},
    ]
    assert supervised(st.CHATML, chat) == ["a<|im_end|>", "write <|im_end|> at the end<|im_end|>"]


def test_an_answer_that_repeats_a_tools_output_is_found():
    chat = [
        {"role": "user", "content": "read it"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "one\n"},
        {"role": "assistant", "content": "it says: one\n!"},
    ]
    # Like Llama 3.1's, the template writes a tool's text as JSON, so it cannot be located.
    assert supervised(st.TOOLS_AS_JSON, chat) == ["call<|im_end|>", "it says: one\n!<|im_end|>"]


@pytest.mark.parametrize("begins", ["Hello", "<tool_call>"])
def test_an_older_answer_without_its_thinking_is_fully_supervised(begins):
    asks = [{"role": "user", "content": text} for text in ("how", "and")]
    thought = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{begins} there"}
    last = {"role": "assistant", "content": "ok"}
    found = supervised(st.THOUGHTS_DROPPED, [asks[0], thought, asks[1], last])
    assert found[0] == f"{begins} there<|im_end|>"


def test_an_answer_whose_end_cannot_be_found_is_refused():
    """Older answers are rewritten, and only the last turn has an end token."""
    template = st.THOUGHTS_DROPPED.replace("<|im_start|>", "").replace("<|im_end|>", "")
    tokenizer = st.small_tokenizer(template + "<|im_end|>")
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello there"}
    chat = [{"role": "user", "content": "how"}, thought, {"role": "user", "content": "and"}]
    with pytest.raises(UnrenderableError, match="unlike the whole"):
        Template(tokenizer).render([*chat, {"role": "assistant", "content": "ok"}])


def test_a_prompt_is_the_text_before_the_answer():
    template = Template(st.small_tokenizer(st.VICUNA))
    ids, mask = template.render(CHAT)
    assert template.prompt(CHAT[:3]) == ids[: len(ids) - mask[::-1].index(False)]


def test_a_prompt_keeps_the_mask_of_the_answers_before_it():
    template = Template(st.small_tokenizer(st.CHATML))
    whole, mask = template.render(CHAT)
    ids, prompt_mask = template.render(CHAT[:3], prompt=True)
    assert (ids, prompt_mask) == (whole[: len(ids)], mask[: len(ids)])


def test_a_template_that_moves_text_is_refused_and_not_masked_wrongly():
    chat = [{"role": "system", "content": "be very kind"}, *CHAT]
    with pytest.raises(UnrenderableError, match="generation"):
        Template(st.small_tokenizer(st.SYSTEM_LAST)).render(chat)
    assert supervised(st.SYSTEM_LAST, CHAT) == ["  The answer is 42. </s>", " I am fine</s>"]


def test_a_role_that_the_template_refuses_is_reported():
    with pytest.raises(UnrenderableError, match="no such role"):
        Template(st.small_tokenizer(st.LLAMA2)).render([{"role": "system", "content": "x"}, *CHAT])


def test_a_missing_template_is_an_error_that_says_how_to_give_one():
    with pytest.raises(DataError, match=r"no chat template; put a chat_template.jinja"):
        Template(st.small_tokenizer(None))
    tokenizer = st.small_tokenizer()
    tokenizer.chat_template = {"rag": st.CHATML, "tool_use": st.CHATML}
    with pytest.raises(DataError, match=r"put the template to use into target\.chat_template"):
        Template(tokenizer)


def test_the_preview_shows_the_whole_text_with_the_answers_marked():
    tokenizer = st.small_tokenizer(st.CHATML)
    ids, mask = Template(tokenizer).render(CHAT)
    text = preview(tokenizer, ids, mask)
    assert text.plain.replace("«", "").replace("»", "") == tokenizer.decode(ids)
    marked = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert marked == [f"«{part}»" for part in supervised(st.CHATML, CHAT)]


# ---------------------------------------------------------------- real conversations


def real_rows(name: str) -> tuple[Path, list]:
    path = SHARED / "sharegpt" / name
    if not path.exists():
        pytest.skip(f"no {name} beside the repository")
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if name.endswith(".json") else map(json.loads, text.split("\n")[:-1])
    return path, [row.get("conversations") or row["messages"] for row in rows]


@pytest.mark.parametrize(
    "name",
    [
        "sharegpt_gpt4_256.jsonl",
        "nvidia_synthetic_conversations_1k.jsonl",
        "fastchat_dummy_conversation.json",
    ],
)
def test_counts_of_real_conversations_equal_a_naive_count(name):
    path, rows = real_rows(name)
    tokenizer = st.small_tokenizer(st.CHATML, merges=0)  # one token per byte or special token
    corpus = read_conversations([str(path)])
    assert (len(corpus.conversations), corpus.rejects) == (len(rows), [])
    template, turns, tokens, answered = Template(tokenizer), 0, 0, 0
    for conversation in corpus.conversations:
        ids, mask = template.render(conversation.messages)
        turns += len(conversation.messages)
        tokens += len(ids)
        answered += sum(mask)

    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    expected = [0, 0, 0]
    for row in rows:
        for turn in row:
            name, content = (
                turn.get("from", turn.get("role")),
                turn.get("value", turn.get("content")),
            )
            user = name in ("human", "user")
            expected[0] += 1
            # <|im_start|> role \n content <|im_end|> \n
            expected[1] += 1 + len("user" if user else "assistant") + 1 + size(content) + 2
            expected[2] += 0 if user else size(content) + 1
    assert [turns, tokens, answered] == expected


def test_patterns_and_folders_are_read_as_their_files_in_order_of_name(tmp_path):
    (tmp_path / "chats" / "more").mkdir(parents=True)
    for name in ("b.jsonl", "a.json", "more/c.jsonl", ".hidden.jsonl"):
        write(tmp_path / "chats" / name, good(2))
    (tmp_path / "chats" / "notes.md").write_text("none")

    def read(*names: str) -> list[str]:
        found = read_conversations([f"{tmp_path}/{name}" for name in names]).conversations
        return [Path(one.origin.rpartition(":")[0]).name for one in found[::2]]

    assert read("chats") == read("chats/*.json*") == ["a.json", "b.jsonl"]
    assert read("chats/**/*.jsonl") == ["b.jsonl", "c.jsonl"]
    assert read("chats/more", "chats/a.json") == ["c.jsonl", "a.json"]
    for nothing in ("chats/*.txt", "nowhere/*.jsonl"):
        with pytest.raises(DataError, match=r"no file of \.json, .* at .*; give files, a folder"):
            read(nothing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file of"):
        read("empty")
    write(tmp_path / "chats" / "more" / "c.jsonl", [*good(2), "{"])
    with pytest.raises(DataError, match=r"more/c\.jsonl:3: does not parse"):
        read("chats/**/*.jsonl")
