"""The target rewrites the answers, turn by turn, each only once."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import small_tokenizer as st
from test_tokens import chats, recipe, write
from thread_ranks import on_ranks

from specdraft.data.answers import Answer, Ask
from specdraft.data.store.token_builder import build_tokens
from specdraft.data.store.tokens import TokenCache
from specdraft.recipes.errors import DataError

IDENTITY = {"name": "parrot", "weights": "0" * 64, "config": "0" * 64}


class Parrot:
    """A target with a fixed answer per prompt; it is interrupted after `stop_after` answers."""

    def __init__(self, tokenizer, end: str = "<|im_end|>", stop_after: int | None = None):
        self.tokenizer, self.end, self.stop_after = tokenizer, end, stop_after
        self.asks: list[Ask] = []
        self.levels: list[int] = []

    def says(self, ask: Ask) -> list[int]:
        warm = f" and {ask.seed % 97}" if ask.temperature else ""
        text = f"I heard {len(ask.prompt_ids)} tokens{warm}.{self.end}"
        return self.tokenizer.encode(text, add_special_tokens=False)[: ask.max_new_tokens]

    def __call__(self, asks: list[Ask]):
        self.levels.append(len(asks))
        for index in reversed(range(len(asks))):  # rows may finish in any order
            if self.stop_after is not None and len(self.asks) == self.stop_after:
                raise KeyboardInterrupt
            self.asks.append(asks[index])
            tokens = self.says(asks[index])
            yield index, Answer(tokens, ended=len(tokens) < asks[index].max_new_tokens)


def rewriting(folder: Path, rows: list | None = None, **data):
    source = write(folder / "a.jsonl", chats(4) if rows is None else rows)
    return recipe(folder, source, answers="target", **{"max_new_tokens": 60, **data})


def build(settings, parrot: Parrot, **ranks) -> TokenCache:
    return build_tokens(settings, parrot.tokenizer, parrot, IDENTITY, **ranks)


def contents(cache: TokenCache) -> list[tuple[list[int], list[bool]]]:
    rows = (cache[n] for n in range(len(cache)))
    return [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in rows]


def test_every_turn_follows_the_targets_own_earlier_answers(tmp_path):
    parrot = Parrot(st.small_tokenizer())
    cache = build(rewriting(tmp_path), parrot)
    assert parrot.levels == [4, 4]
    text = parrot.tokenizer.decode(cache[0]["input_ids"])
    first, second = (
        ask for ask in parrot.asks if "number 0" in parrot.tokenizer.decode(ask.prompt_ids)
    )
    said = parrot.tokenizer.decode(parrot.says(first))
    assert parrot.tokenizer.decode(second.prompt_ids).count(said) == 1
    assert text == parrot.tokenizer.decode(second.prompt_ids + parrot.says(second))
    assert "The answer is" not in text
    ids, mask = contents(cache)[0]
    supervised = [token for token, marked in zip(ids, mask, strict=True) if marked]
    assert supervised == parrot.says(first) + parrot.says(second)


def test_the_bar_counts_the_answers_of_conversations_of_any_length(tmp_path, capsys):
    rows = chats(6)
    for row in rows[::2]:
        del row["messages"][2:]
    build(rewriting(tmp_path, rows), Parrot(st.small_tokenizer()))
    assert "answers: 100%|" in (shown := capsys.readouterr().err.split("\r")[-1])
    assert " 9/9 [" in shown


def test_the_first_sample_is_greedy_and_others_have_their_own_seeds(tmp_path):
    parrot = Parrot(st.small_tokenizer())
    cache = build(rewriting(tmp_path, samples=3, temperature=0.8), parrot)
    assert len(cache) == 12
    assert [ask.temperature for ask in parrot.asks].count(0.0) == 8
    warm = [ask.seed for ask in parrot.asks if ask.temperature == 0.8]
    assert len(set(warm)) == 16
    again = build(
        rewriting(tmp_path, samples=3, temperature=0.8, cache_dir=str(tmp_path / "2")),
        Parrot(st.small_tokenizer()),
    )
    assert contents(again) == contents(cache)


def test_another_seed_samples_other_answers_into_another_cache(tmp_path):
    seeds, names = [], []
    for seed in (0, 1):
        parrot = Parrot(st.small_tokenizer())
        cache = build(rewriting(tmp_path, samples=2, temperature=0.8, seed=seed), parrot)
        names.append(cache.directory.name)
        seeds += [ask.seed for ask in parrot.asks if ask.temperature]
    assert len(set(names)) == 2
    assert len(set(seeds)) == len(seeds) == 16


def test_a_row_ends_at_an_unfinished_answer(tmp_path):
    parrot = Parrot(st.small_tokenizer())
    cache = build(rewriting(tmp_path, max_new_tokens=5), parrot)
    assert parrot.levels == [4]
    for ids, mask in contents(cache):
        assert mask == [False] * (len(ids) - 5) + [True] * 5
    assert "4 end within an answer (data.max_new_tokens, data.max_length)" in cache.summary()
    whole = build(rewriting(tmp_path), parrot).summary()
    assert "none was cut, dropped or rejected" in whole


def test_answers_end_at_max_length_and_prompts_beyond_it_are_rejected(tmp_path):
    parrot = Parrot(st.small_tokenizer())
    prompt = len(
        parrot.tokenizer.apply_chat_template(
            chats(1)[0]["messages"][:1], add_generation_prompt=True
        )["input_ids"]
    )
    cache = build(rewriting(tmp_path, max_length=prompt + 7), parrot)
    assert cache.lengths == [prompt + 7] * 4
    long = chats(4)
    long[2]["messages"][0]["content"] = "much too long " * 20
    cache = build(rewriting(tmp_path, long + chats(16), max_length=prompt + 9), parrot)
    assert (len(cache), cache.stats["rejected"]) == (19, 1)


def test_texts_are_continued_from_their_first_tokens(tmp_path):
    tokenizer = st.small_tokenizer(None)
    parrot = Parrot(tokenizer, end="</s>")
    text = "Hello there, how are you today?"
    settings = rewriting(tmp_path, [{"text": text}], format="text", prompt_tokens=6)
    (row,) = contents(build(settings, parrot))
    answer = parrot.says(parrot.asks[0])
    assert row == (
        tokenizer(text)["input_ids"][:6] + answer,
        [False] * 6 + [True] * len(answer),
    )


def test_an_interrupted_run_resumes_without_repeating_answers(tmp_path):
    settings = rewriting(tmp_path)
    interrupted = Parrot(st.small_tokenizer(), stop_after=6)
    with pytest.raises(KeyboardInterrupt):
        build(settings, interrupted)
    (answers,) = (tmp_path / "cache").glob("tokens-*.partial/answers-0.jsonl")
    torn = answers.read_bytes()
    answers.write_bytes(torn[:-9])  # interrupted within the sixth line
    resumed = Parrot(st.small_tokenizer())
    cache = build(settings, resumed)
    assert resumed.levels == [3]
    assert not {ask.seed for ask in interrupted.asks[:5]} & {ask.seed for ask in resumed.asks}
    whole = build(rewriting(tmp_path, cache_dir=str(tmp_path / "2")), Parrot(st.small_tokenizer()))
    assert contents(cache) == contents(whole)


def questions(parrot: Parrot) -> set[tuple]:
    """What it was asked; a seed does not matter to a greedy answer."""
    return {(*ask.prompt_ids, ask.temperature, ask.temperature and ask.seed) for ask in parrot.asks}


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"limit": 7}, 0),
        ({"limit": 12}, 4),
        ({"shuffle_seed": 1}, 4),  # the two rows that were left out are among them
        ({"samples": 2, "temperature": 0.8}, 20),  # the greedy answers are there
        ({"max_new_tokens": 61}, 0),
        ({"max_new_tokens": 5}, 0),  # cut, and nothing follows
    ],
)
def test_what_is_answered_in_a_cache_beside_it_is_not_asked_again(changed, asked, tmp_path, capsys):
    tokenizer, rows = st.small_tokenizer(), chats(12)
    settings = {"limit": 10} | changed
    first, second, alone = (Parrot(tokenizer) for _ in range(3))
    build(rewriting(tmp_path, rows, limit=10), first)
    cache = build(rewriting(tmp_path, rows, **settings), second)
    told = capsys.readouterr().err
    elsewhere = rewriting(tmp_path, rows, **settings, cache_dir=str(tmp_path / "2"))
    assert contents(cache) == contents(build(elsewhere, alone))
    assert questions(second) == questions(alone) - questions(first)
    assert len(second.asks) == asked
    known = len(alone.asks) - asked
    assert (f"{known} answers were taken over from other caches in" in told) == (known > 0)


def test_answers_that_had_to_stop_are_asked_for_again_where_they_may_go_on(tmp_path):
    tokenizer = st.small_tokenizer()
    for most, asked in ((5, 4), (60, 8), (7, 0), (61, 0)):
        parrot = Parrot(tokenizer)
        cache = build(rewriting(tmp_path, max_new_tokens=most), parrot)
        assert len(parrot.asks) == asked
        alone = rewriting(tmp_path, max_new_tokens=most, cache_dir=str(tmp_path / "2" / str(most)))
        assert contents(cache) == contents(build(alone, Parrot(tokenizer)))


def test_sampled_answers_are_taken_over_with_their_seeds_alone(tmp_path):
    tokenizer, sampled = st.small_tokenizer(), {"samples": 3, "temperature": 0.8}
    for changed, asked in (({"limit": 3}, 18), ({"limit": 4}, 6), ({"limit": 4, "seed": 1}, 16)):
        parrot = Parrot(tokenizer)
        build(rewriting(tmp_path, **sampled, **changed), parrot)
        assert len(parrot.asks) == asked


def test_answers_of_another_target_or_damaged_ones_are_not_taken_over(tmp_path):
    tokenizer, first = st.small_tokenizer(), rewriting(tmp_path, limit=3)
    other = Parrot(tokenizer, end=" Indeed.<|im_end|>")
    build_tokens(first, tokenizer, other, {**IDENTITY, "weights": "1" * 64})
    kept = build(first, Parrot(tokenizer))
    answers = kept.directory / "answers-0.jsonl"
    whole = answers.read_text().splitlines(keepends=True)
    damaged = whole[0].replace('"tokens": [', '"tokens": ["", ')
    failed = whole[1].replace('"failure": null', '"failure": "no"')
    unnamed = whole[2].replace('"ask": "', '"ask": ["').replace('", "tokens"', '"], "tokens"')
    answers.write_text(damaged + failed + unnamed + "".join(whole[3:-1]) + whole[-1][:-1])
    parrot = Parrot(tokenizer)
    cache = build(rewriting(tmp_path, limit=4), parrot)
    assert len(parrot.asks) == 2 + 4
    alone = rewriting(tmp_path, limit=4, cache_dir=str(tmp_path / "2"))
    assert contents(cache) == contents(build(alone, Parrot(tokenizer)))


def test_ranks_divide_the_answers(tmp_path):
    settings, parrots = rewriting(tmp_path), [Parrot(st.small_tokenizer()) for _ in range(2)]
    caches = on_ranks(2, lambda r: build(settings, parrots[r.rank], ranks=r))
    assert [parrot.levels for parrot in parrots] == [[2, 2], [2, 2]]
    alone = build(rewriting(tmp_path, cache_dir=str(tmp_path / "2")), Parrot(st.small_tokenizer()))
    assert contents(caches[0]) == contents(caches[1]) == contents(alone)


def test_another_target_or_dtype_makes_another_cache(tmp_path):
    settings, parrot = rewriting(tmp_path), Parrot(st.small_tokenizer())
    first = build(settings, parrot)
    for key in ("weights", "config"):
        other = build_tokens(settings, parrot.tokenizer, parrot, {**IDENTITY, key: "1" * 64})
        assert first.directory != other.directory
    rounded = dataclasses.replace(
        settings, target=dataclasses.replace(settings.target, dtype="bfloat16")
    )
    assert first.directory != build(rounded, parrot).directory


def test_different_answers_change_the_key_of_a_cache_but_not_its_folder(tmp_path):
    settings, tokenizer = rewriting(tmp_path), st.small_tokenizer()
    first = build(settings, Parrot(tokenizer))
    shutil.rmtree(first.directory)
    again = build(settings, Parrot(tokenizer))
    shutil.rmtree(first.directory)
    other = build(settings, Parrot(tokenizer, end=" Indeed.<|im_end|>"))
    assert first.directory == again.directory == other.directory
    (tmp_path / "moved").mkdir()
    moved = build(rewriting(tmp_path / "moved"), Parrot(tokenizer))  # the same in another folder
    assert first.key == again.key == moved.key != other.key


def test_without_a_target_the_error_names_the_command_to_run(tmp_path):
    with pytest.raises(DataError, match=r"data/cache.py"):
        build_tokens(rewriting(tmp_path), st.small_tokenizer(), None, IDENTITY)
