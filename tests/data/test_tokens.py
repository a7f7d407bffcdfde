"""The token cache has the training rows, is named by its inputs, and is complete or absent."""

import json
import os
import re
import shutil
from pathlib import Path

import datasets
import pytest
import small_tokenizer as st
import torch
from commands import run, start

from specdraft.data.sources import Source
from specdraft.data.store import token_builder
from specdraft.data.store.token_builder import build_tokens
from specdraft.data.store.tokens import TokenCache
from specdraft.data.template import Template
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import CacheError, DataError
from specdraft.recipes.load import from_dict
from specdraft.recipes.schema import Recipe


def chats(count: int, start: int = 0) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Question number {n}?"},
                {"role": "assistant", "content": f"The answer is {n}."},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "I am fine."},
            ]
        }
        for n in range(start, start + count)
    ]


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def recipe(folder: Path, source: str, **data) -> Recipe:
    data = {"sources": [source], "cache_dir": str(folder / "cache"), **data}
    return from_dict({"name": "test", "data": data, "train": {"steps": 1}})


def test_rows_are_the_rendered_chats(tmp_path):
    source, tokenizer = write(tmp_path / "a.jsonl", chats(5)), st.small_tokenizer()
    cache = build_tokens(recipe(tmp_path, source), tokenizer)
    assert len(cache) == 5
    for n, chat in enumerate(chats(5)):
        ids, mask = Template(tokenizer).render(chat["messages"])
        assert cache[n]["input_ids"].tolist() == ids
        assert cache[n]["loss_mask"].tolist() == mask
        assert cache.origin(n) == f"{source}:{n + 1}"
    assert cache[0]["input_ids"].dtype == torch.int64
    assert cache[0]["loss_mask"].dtype == torch.bool
    assert cache.lengths == [len(cache[n]["input_ids"]) for n in range(5)]
    assert cache.stats["tokens"] == sum(cache.lengths)
    assert cache.stats["supervised"] == sum(int(cache[n]["loss_mask"].sum()) for n in range(5))


def test_the_summary_counts_supervised_tokens_and_lost_rows(tmp_path):
    """The supervised share is of tokens, as in the losses, not of rows."""
    answer = {"role": "assistant", "content": "word " * 200}
    long = {"messages": [{"role": "user", "content": "Go on."}, answer]}
    useless = {"messages": [{"role": "user", "content": "Nobody answers"}]}
    source = write(tmp_path / "a.jsonl", [*chats(40), long, useless])
    cache = build_tokens(recipe(tmp_path, source, max_length=128), st.small_tokenizer())
    supervised = sum(int(mask.sum()) for mask in cache.masks())
    first, second, of, *lost = map(str.strip, cache.summary().splitlines())
    share = f"{supervised:,} ({supervised / sum(cache.lengths):.0%}) are trained on"
    assert first == f"data: 41 rows, {sum(cache.lengths):,} tokens, of which {share}"
    assert second.endswith(" / 128 (shortest / median / longest)")
    rejects = cache.directory / "rejects.jsonl"
    assert of == "from 41 conversations"
    assert lost == ["1 truncated at 128 tokens", f"1 rejected ({rejects})"]
    assert rejects.is_file()


def test_a_file_name_may_have_invalid_utf_8(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    source = write(tmp_path / "a.jsonl", chats(3))
    os.rename(source, os.fsencode(folder) + b"/caf\xe9.jsonl")
    cache = build_tokens(recipe(tmp_path, str(folder)), st.small_tokenizer())
    assert len(cache) == 3
    assert cache.origin(0).endswith("caf\\udce9.jsonl:1")


def test_a_token_cache_is_an_arrow_dataset_that_datasets_can_load(tmp_path):
    source = write(tmp_path / "a.jsonl", chats(3))
    cache = build_tokens(recipe(tmp_path, source), st.small_tokenizer())
    dataset = datasets.load_from_disk(str(cache.directory))
    assert dataset[1]["input_ids"] == cache[1]["input_ids"].tolist()


def test_only_our_own_progress_bar_is_shown(tmp_path, capfd):
    Target.load("tiny")
    source = write(tmp_path / "a.jsonl", chats(3))
    build_tokens(recipe(tmp_path, source), st.small_tokenizer())
    drawn = capfd.readouterr()
    assert drawn.out == ""
    bars = [line for line in re.split(r"[\r\n]+", drawn.err) if line]
    assert bars
    assert [line for line in bars if not line.startswith("tokens: ")] == []


def test_a_second_build_only_opens_the_cache(tmp_path, monkeypatch):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(3)))
    first = build_tokens(settings, st.small_tokenizer())
    monkeypatch.setattr(token_builder, "_build", lambda *_: pytest.fail("built again"))
    assert build_tokens(settings, st.small_tokenizer()).directory == first.directory


def test_whatever_changes_rows_changes_the_caches_name(tmp_path):
    source, tokenizer = write(tmp_path / "a.jsonl", chats(4)), st.small_tokenizer()

    def name(tokenizer=tokenizer, **data) -> str:
        return build_tokens(recipe(tmp_path, source, **data), tokenizer).directory.name

    names = [name(), name(max_length=40), name(limit=2), name(holdout=1)]
    names += [name(st.small_tokenizer(st.VICUNA)), name(st.small_tokenizer(merges=10))]
    write(tmp_path / "a.jsonl", chats(4, start=1))
    names.append(name())
    assert len(set(names)) == len(names)


def test_a_moved_source_gives_the_same_cache(tmp_path):
    names = set()
    for place in ("a.jsonl", "b.jsonl"):
        settings = recipe(tmp_path, write(tmp_path / place, chats(2)))
        names.add(build_tokens(settings, st.small_tokenizer()).directory.name)
    assert len(names) == 1


def test_a_long_chat_is_truncated_at_its_end_together_with_its_mask(tmp_path):
    tokenizer, (chat,) = st.small_tokenizer(), chats(1)
    ids, mask = Template(tokenizer).render(chat["messages"])
    cut = mask.index(True) + 4  # in the middle of the first answer
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", [chat]), max_length=cut)
    cache = build_tokens(settings, tokenizer)
    assert cache[0]["input_ids"].tolist() == ids[:cut]
    assert cache[0]["loss_mask"].tolist() == mask[:cut]
    assert cache.stats["truncated"] == 1


def test_a_row_with_all_answers_truncated_is_dropped_and_counted(tmp_path):
    long = chats(1)[0]
    long["messages"][0]["content"] = "very long " * 30
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", [*chats(3), long]), max_length=90)
    cache = build_tokens(settings, st.small_tokenizer())
    assert (len(cache), cache.stats["dropped_unsupervised"]) == (3, 1)


def test_held_out_rows_are_not_in_the_cache(tmp_path):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(5)), holdout=2)
    cache = build_tokens(settings, st.small_tokenizer())
    assert [cache.origin(n).rpartition(":")[2] for n in range(len(cache))] == ["1", "2", "3"]


@pytest.mark.parametrize("broken", ["{broken", json.dumps(chats(1)[0]).replace("Sure", "\\ud800")])
def test_rejected_lines_are_counted_and_listed(tmp_path, broken):
    rows = chats(120)
    rows.insert(7, broken)
    cache = build_tokens(recipe(tmp_path, write(tmp_path / "a.jsonl", rows)), st.small_tokenizer())
    assert (cache.stats["rows"], cache.stats["rejected"]) == (120, 1)
    (reject,) = map(json.loads, (cache.directory / "rejects.jsonl").read_text().splitlines())
    assert (reject["line"], Path(reject["file"]).name) == (8, "a.jsonl")


def test_half_a_surrogate_pair_in_a_key_only_rejects_its_row(tmp_path):
    rows = [*chats(120), '{"\\ud83d": 1}']
    cache = build_tokens(recipe(tmp_path, write(tmp_path / "a.jsonl", rows)), st.small_tokenizer())
    (reject,) = map(json.loads, (cache.directory / "rejects.jsonl").read_text().splitlines())
    assert "\ud83d" in reject["reason"]


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(chats(4)).to_parquet(str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 16 + whole[20:])
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        list(Source(str(path)).rows())


def test_a_parquet_file_is_identified_by_its_contents_not_its_time(tmp_path):
    path, found = tmp_path / "a.parquet", []
    for first in (0, 5):
        datasets.Dataset.from_list(chats(4, first)).to_parquet(str(path))
        os.utime(path, (0, 0))
        cache = build_tokens(recipe(tmp_path, str(path)), st.small_tokenizer())
        found.append(st.small_tokenizer().decode(cache[0]["input_ids"]))
    assert "number 0?" in found[0]
    assert "number 5?" in found[1]


def test_saved_splits_without_train_are_named(tmp_path):
    rows = datasets.Dataset.from_list(chats(4))
    datasets.DatasetDict({"train_sft": rows}).save_to_disk(str(tmp_path / "chats"))
    with pytest.raises(DataError, match=r"no split train, but train_sft; .*chats/train_sft"):
        build_tokens(recipe(tmp_path, str(tmp_path / "chats")), st.small_tokenizer())
    settings = recipe(tmp_path, str(tmp_path / "chats" / "train_sft"))
    assert len(build_tokens(settings, st.small_tokenizer())) == 4


def test_all_of_a_text_but_its_prompt_is_supervised(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"text": "Hello there, how are you today?"}])
    base = st.small_tokenizer(None)  # a base model has no chat template and needs none
    for prompt_tokens, unsupervised in ((None, 1), (4, 4)):
        settings = recipe(tmp_path, source, format="text", prompt_tokens=prompt_tokens)
        row = build_tokens(settings, base)[0]
        assert row["input_ids"].tolist() == base("Hello there, how are you today?")["input_ids"]
        assert row["loss_mask"].tolist() == [
            n >= unsupervised for n in range(len(row["input_ids"]))
        ]


def test_a_chat_for_a_tokenizer_without_template_is_an_error(tmp_path):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(2)))
    with pytest.raises(DataError, match="no chat template"):
        build_tokens(settings, st.small_tokenizer(None))
    assert not [p for p in (tmp_path / "cache").glob("tokens-*") if p.suffix != ".partial"]


EVERYTHING = """{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}\
{% endgeneration %}"""
NOTHING = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}"


@pytest.mark.parametrize(("template", "share"), [(EVERYTHING, "100%"), (NOTHING, "0%")])
def test_a_template_that_supervises_all_or_nothing_is_an_error(tmp_path, template, share):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(2)))
    with pytest.raises(DataError, match=f"^{share} of the tokens are supervised"):
        build_tokens(settings, st.small_tokenizer(template))


def test_a_template_that_refuses_many_chats_is_an_error_with_its_message(tmp_path):
    chat = {"messages": [{"role": "system", "content": "be kind"}, *chats(1)[0]["messages"]]}
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", [chat, *chats(3)]))
    with pytest.raises(DataError, match=r"1 of 4 conversations cannot .*a.jsonl:1.*no such role"):
        build_tokens(settings, st.small_tokenizer(st.LLAMA2))


def test_an_interrupted_build_is_not_taken_for_a_cache(tmp_path, monkeypatch):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(3)))
    with monkeypatch.context() as patch:
        patch.setattr(token_builder, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_tokens(settings, st.small_tokenizer())
    assert len(build_tokens(settings, st.small_tokenizer())) == 3


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_damaged_cache_is_named_and_rebuilt_once_deleted(tmp_path, harm):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(3)))
    cache = build_tokens(settings, st.small_tokenizer())
    rows = [cache[n]["input_ids"].tolist() for n in range(3)]
    (path,) = cache.directory.glob("*.arrow")
    content = bytearray(path.read_bytes())
    place = content.index(torch.tensor(rows[0][:4]).int().numpy().tobytes())
    content[place] ^= 1
    path.unlink()  # the open cache has mapped it
    path.write_bytes(content if harm == "flip" else content[:-1])
    words = {"flip": "has the sha256", "cut": "bytes and should have"}[harm]
    with pytest.raises(CacheError, match=rf"{path.name} has .*; delete {cache.directory}") as told:
        build_tokens(settings, st.small_tokenizer())
    assert words in str(told.value)
    shutil.rmtree(cache.directory)
    again = build_tokens(settings, st.small_tokenizer())
    assert [again[n]["input_ids"].tolist() for n in range(3)] == rows


def test_renaming_a_damaged_cache_as_advised_keeps_its_answers(tmp_path):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(3)))
    cache, tokenizer = build_tokens(settings, st.small_tokenizer()), st.small_tokenizer()
    answers = cache.directory / "answers-0.jsonl"
    answers.write_text("")
    (cache.directory / "meta.json").write_text("{")
    partial = cache.directory.with_name(f"{cache.directory.name}.partial")
    with pytest.raises(CacheError, match=f"rename it to {partial.name}, which keeps the answers"):
        build_tokens(settings, tokenizer)
    cache.directory.rename(partial)
    (partial / "data-00001-of-00002.arrow").write_bytes(b"of the damaged one")
    assert len(again := build_tokens(settings, tokenizer)) == 3
    assert (again.directory / answers.name).is_file()
    assert again.meta["stats"]["rows"] == 3
    assert len(again.meta["files"]) == 1


def test_a_missing_and_a_damaged_cache_are_errors(tmp_path):
    with pytest.raises(CacheError, match="no token cache at"):
        TokenCache.open(tmp_path / "tokens-0")
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(3)))
    cache = build_tokens(settings, st.small_tokenizer())
    (cache.directory / "meta.json").write_text("{")
    with pytest.raises(CacheError, match="damaged"):
        TokenCache.open(cache.directory)


def test_a_disk_too_full_for_the_rows_is_reported_with_their_folder(tmp_path):
    """A limit on file sizes stands for a full disk."""
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats(40)))
    words = [f"data.sources=[{tmp_path / 'a.jsonl'}]", f"data.cache_dir={tmp_path / 'cache'}"]
    done = start("data/cache.py", "recipes/tiny.yaml", *words, largest_file=1000)
    _, errors = done.communicate()
    assert done.returncode == 2
    assert f"error: out of disk: {tmp_path}/cache/tokens-" in errors
    assert "make room, and the same command goes on" in errors


def test_token_ids_beyond_the_targets_vocabulary_are_refused(tmp_path):
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(2)))
    cache = build_tokens(settings, st.small_tokenizer())
    largest = max(int(cache[n]["input_ids"].max()) for n in range(2))
    cache.check_vocabulary(largest + 1, "small")
    with pytest.raises(DataError, match=rf"\.\.{largest}, and small knows 0\.\.{largest - 1}"):
        cache.check_vocabulary(largest, "small")


def test_rows_of_another_models_tokenizer_are_refused_before_a_forward(tmp_path):
    target = shutil.copytree(bundled_target_dir(), tmp_path / "model")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[next(token for token, number in vocabulary.items() if number == 300)] = 7000
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = [f"target.model={target}", f"data.cache_dir={tmp_path / 'cache'}", "data.limit=40"]
    done = run("data/cache.py", "recipes/tiny.yaml", *words)
    assert done.returncode == 2
    assert f"..7000, and {target} knows 0..2047: its tokenizer is another model's" in done.stderr
