"""Max-Gram: bigrams counted exactly however the corpus is split, tables bound to their tokenizer,
drafts as defined, and plain decoding's tokens with any draft."""

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from commands import ROOT, run_here
from decoding import decode
from random_models import VOCAB, random_target
from small_tokenizer import CHATML_MARKED, small_tokenizer

from specdraft.data import fingerprint
from specdraft.data.ranks import Ranks
from specdraft.data.store.corpus import CachedTokens, Rows, StreamedTexts
from specdraft.data.store.token_builder import build_tokens
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.maxgram import CONTINUATIONS, MaxGramDrafter, PromptLookup
from specdraft.eval.lookup.suffix import FirstSuffixes, RecentSuffixes
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable, load_table
from specdraft.recipes.errors import CacheError, DataError, HeadError, RecipeError, TargetError
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.train.counting.bigrams import count, count_rows, save_table

# -- counting ------------------------------------------------------------------------------------


def random_rows(seed: int, rows: int = 30, vocab: int = 7) -> tuple[list, list]:
    """Rows of ids, some of a single token, and which tokens are the assistant's."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 3, 9, 20)) for _ in range(rows)]
    ids = [[rng.randrange(vocab - 2) for _ in range(length)] for length in lengths]
    return ids, [[rng.random() < 0.6 for _ in row] for row in ids]


def token_cache(ids: list[list[int]], mask: list[list[bool]], folder: Path) -> TokenCache:
    dataset = datasets.Dataset.from_dict(
        {"input_ids": ids, "loss_mask": mask},
        features=datasets.Features(
            {
                "input_ids": datasets.List(datasets.Value("int32")),
                "loss_mask": datasets.List(datasets.Value("bool")),
            }
        ),
    )
    key = fingerprint.of_settings({"ids": ids, "mask": mask})
    return TokenCache(folder, dataset, {"key": key, "lengths": [len(row) for row in ids]})


def by_hand(ids: list[list[int]], mask: list[list[bool]]) -> tuple[Counter, Counter]:
    """Every bigram that ends in a marked token, and every marked token."""
    pairs, tokens = Counter(), Counter()
    for row, marks in zip(ids, mask, strict=True):
        for place, (token, marked) in enumerate(zip(row, marks, strict=True)):
            if marked:
                tokens[token] += 1
                if place:
                    pairs[row[place - 1], token] += 1
    return pairs, tokens


def check_table(table: MaxGramTable, pairs: Counter, tokens: Counter, vocab: int) -> None:
    fallback = min(tokens, key=lambda token: (-tokens[token], token))
    assert table.config.fallback == fallback
    for first in range(vocab):
        behind = {second: n for (a, second), n in pairs.items() if a == first}
        best = min(behind, key=lambda second: (-behind[second], second), default=fallback)
        assert table.next_id[first] == best
        assert table.seen[first] == sum(behind.values())
        assert table.agreed[first] == behind.get(best, 0)
    assert table.coverage == len({first for first, _ in pairs}) / vocab


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("shard_tokens", [1, 13, 50, 10_000])
def test_counts_equal_a_count_by_hand(tmp_path, everything, shard_tokens):
    vocab = 7
    for seed in range(3):
        ids, mask = random_rows(seed)
        corpus = CachedTokens(token_cache(ids, mask, tmp_path), everything, shard_tokens)
        if everything:
            mask = [[True] * len(row) for row in ids]
        pairs, tokens = by_hand(ids, mask)
        counts = count(corpus, tmp_path, vocab)
        assert (counts.rows, counts.tokens) == (len(ids), sum(map(len, ids)))
        for at_once in (1, 5, 10_000):
            found: list[list[int]] = []
            for keys, numbers in counts.merged(at_once):
                found += np.stack((keys // vocab, keys % vocab, numbers), 1).tolist()
            assert found == [[*pair, n] for pair, n in sorted(pairs.items())]
        check_table(counts.table("hash", {}), pairs, tokens, vocab)


def test_large_ids_do_not_overflow():
    vocab, ids = 150_000, [149_999, 149_998, 149_999, 149_998]
    rows = Rows(np.array(ids, np.int32), np.array([4]), np.ones(4, bool))
    counted = count_rows(rows, vocab)
    assert counted["pairs"].tolist() == [149_998 * vocab + 149_999, 149_999 * vocab + 149_998]
    assert counted["counts"].tolist() == [1, 2]


def test_among_equally_frequent_tokens_the_lowest_id_wins(tmp_path):
    ids = [[0, 4], [0, 2], [0, 3], [0, 2], [0, 3], [1, 5], [1, 2]]
    corpus = CachedTokens(token_cache(ids, [[True] * 2 for _ in ids], tmp_path), shard_tokens=3)
    table = count(corpus, tmp_path, 6).table(None, {})
    assert table.next_id[:2].tolist() == [2, 2]


class Shards:
    """A corpus that notes which shards are read; reading shard `fatal` kills the process."""

    def __init__(self, seeds: range, fatal: int | None = None):
        self.rows, self.fatal, self.tokens = [random_rows(seed) for seed in seeds], fatal, None
        self.settings, self.read = {"rows": self.rows}, []

    def shards(self):
        for number in range(len(self.rows)):
            yield number, lambda number=number: self._read(number)

    def _read(self, number: int) -> Rows:
        if number == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.read.append(number)
        ids, mask = self.rows[number]
        lengths = np.array([len(row) for row in ids])
        return Rows(np.array([*chain(*ids)], np.int32), lengths, np.array([*chain(*mask)]))

    def by_hand(self) -> tuple[Counter, Counter]:
        return by_hand(*(list(chain(*parts)) for parts in zip(*self.rows, strict=True)))


def processes(target, arguments: list[tuple]) -> list[int]:
    """Run a function in several real processes at once; return their exit codes."""
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=target, args=args) for args in arguments]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    return [process.exitcode for process in running]


def test_three_processes_together_count_what_one_counts(tmp_path):
    wait = multiprocessing.get_context("fork").Barrier(3, timeout=30)
    jobs = [(Shards(range(8)), tmp_path, 7, Ranks(rank, 3, wait.wait)) for rank in range(3)]
    assert processes(count, jobs) == [0, 0, 0]
    corpus = Shards(range(8))
    table = count(corpus, tmp_path, 7).table(None, {})
    assert corpus.read == []
    check_table(table, *corpus.by_hand(), 7)


def test_a_killed_count_resumes_at_its_unfinished_shard(tmp_path):
    assert processes(count, [(Shards(range(6), fatal=3), tmp_path, 7)]) == [-signal.SIGKILL]
    (folder,) = tmp_path.glob("bigrams-*")
    (folder / ".000003.safetensors.partial").write_bytes(b"half")
    corpus = Shards(range(6))
    table = count(corpus, tmp_path, 7).table(None, {})
    assert corpus.read == [3, 4, 5]
    check_table(table, *corpus.by_hand(), 7)


def test_a_truncated_count_file_is_named_and_counted_again_once_deleted(tmp_path):
    count(Shards(range(3)), tmp_path, 7)
    (path,) = tmp_path.glob("*/000001.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CacheError, match=r"000001\.safetensors cannot be read"):
        count(Shards(range(3)), tmp_path, 7)
    path.unlink()
    corpus = Shards(range(3))
    check_table(count(corpus, tmp_path, 7).table(None, {}), *corpus.by_hand(), 7)
    assert corpus.read == [1]


def test_an_id_beyond_the_vocabulary_leaves_no_counts(tmp_path):
    corpus = CachedTokens(token_cache([[1, 9, 2, 3]], [[True] * 4], tmp_path / "cache"))
    with pytest.raises(DataError, match=r"1\.\.9, outside the vocabulary 0\.\.8"):
        count(corpus, tmp_path, 9)
    assert not list(tmp_path.glob("bigrams-*/*"))


@pytest.mark.parametrize(
    ("ids", "mask"),
    [([[3], [4]], [[True], [True]]), ([[3, 4]], [[True, False]])],
    ids=["single tokens", "nothing marked behind another"],
)
def test_a_corpus_without_a_bigram_is_an_error(tmp_path, ids, mask):
    counts = count(CachedTokens(token_cache(ids, mask, tmp_path)), tmp_path, 9)
    for pairs, remedy in (("answers", r"sources, or set maxgram\.pairs=all$"), ("all", "sources$")):
        with pytest.raises(DataError, match=f"no bigram in .*{remedy}"):
            counts.table(None, {"pairs": pairs})


# -- streams -------------------------------------------------------------------------------------


def recipe_of(tmp_path: Path, source: str, **data):
    data = {"sources": [source], "cache_dir": str(tmp_path / "cache"), **data}
    return from_dict({"name": "test", "data": data, "train": {"epochs": 1}})


def chats(number: int) -> list[dict]:
    roles = ("user", "assistant", "user", "assistant")
    return [
        {"messages": [{"role": r, "content": f"Hello {r} {n % 7}, {n}!"} for r in roles]}
        for n in range(number)
    ]


def texts(number: int) -> list[dict]:
    return [{"text": f"The answer is {n}. I am fine, how are you {n % 5}?"} for n in range(number)]


@pytest.mark.parametrize("make", [chats, texts])
@pytest.mark.parametrize("characters", [1, 300, 10**6])
def test_a_stream_counts_what_the_token_cache_counts(tmp_path, make, characters):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in make(30)))
    tokenizer = small_tokenizer(CHATML_MARKED)
    recipe = recipe_of(tmp_path, str(source), prompt_tokens=3 if make is texts else None)
    cached = CachedTokens(build_tokens(recipe, tokenizer))
    stream = StreamedTexts(recipe, tokenizer, shard_characters=characters)
    shards = len(list(stream.shards()))
    assert shards == {1: 30, 10**6: 1}.get(characters, shards)
    size = len(tokenizer)
    tables = [count(corpus, tmp_path, size).table(None, {}) for corpus in (cached, stream)]
    for name in ("next_id", "seen", "agreed"):
        assert torch.equal(*(getattr(table, name) for table in tables))
    assert tables[0].config.corpus == tables[1].config.corpus


def test_a_hub_dataset_is_streamed_and_named_by_its_commit(tmp_path, monkeypatch):
    asked = {}

    def load_dataset(name, **options):
        asked.update(options, name=name)
        return datasets.Dataset.from_list(texts(20)).to_iterable_dataset()

    class Hub:
        def dataset_info(self, name):
            return type("Info", (), {"sha": f"commit of {name}"})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    tokenizer = small_tokenizer()
    stream = StreamedTexts(recipe_of(tmp_path, "owner/texts:test", limit=12), tokenizer)
    counts = count(stream, tmp_path, len(tokenizer))
    assert asked == {"name": "owner/texts", "split": "test", "streaming": True}
    assert counts.rows == 12


def test_an_empty_stream_and_one_with_unreadable_rows_are_errors(tmp_path):
    source = tmp_path / "rows.jsonl"
    for content, message in (("\n", "no rows|cannot tell"), ("{\n" * 9, "cannot tell its format")):
        source.write_text(content)
        stream = StreamedTexts(recipe_of(tmp_path, str(source)), small_tokenizer())
        with pytest.raises(DataError, match=message):
            count(stream, tmp_path, 300)
    source.write_text(json.dumps(texts(1)[0]) + "\n{\n")
    with pytest.raises(DataError, match="1 of 2 rows cannot be read"):
        count(StreamedTexts(recipe_of(tmp_path, str(source)), small_tokenizer()), tmp_path, 400)


def test_few_conversations_that_do_not_render_are_skipped_and_many_are_an_error(tmp_path):
    source, each = tmp_path / "rows.jsonl", "{% for m in messages %}"
    refuses = "{% if 'odd' in m['content'] %}{{ raise_exception('odd') }}{% endif %}"
    tokenizer = small_tokenizer(CHATML_MARKED.replace(each, each + refuses))
    places = {"few": (150,), "many": (3, 4, 150), "all": range(151)}
    for name, some in places.items():
        rows = chats(151)
        for place in some:
            rows[place]["messages"][0]["content"] += " Is that odd?"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # Size 1 makes shards of one conversation, the last of only a broken one.
        for size in (1, 10**6):
            stream = StreamedTexts(recipe_of(tmp_path, str(source)), tokenizer, False, size)
            if name == "few":
                counts = count(stream, tmp_path, len(tokenizer))
                assert (counts.rows, counts.broken) == (150, 1)
                continue
            with pytest.raises(DataError, match=f"{len(some)} of 151 conversations cannot be"):
                count(stream, tmp_path, len(tokenizer))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.holdout=3", "cannot know the last rows"),
        ("data.shuffle_seed=3", "takes rows as they come"),
        ("data.answers=target", "counts texts as they are"),
        ("maxgram.min_match=17", "<= 16"),
        ("maxgram.continuation=last", "first, recent, frequent"),
    ],
)
def test_invalid_counting_and_drafting_settings_are_recipe_errors(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(ROOT / "recipes/tiny_maxgram.yaml", ["maxgram.corpus=stream", override])


# -- the table -----------------------------------------------------------------------------------


def random_table(vocab: int = VOCAB, seed: int = 0, **config) -> MaxGramTable:
    generator = torch.Generator().manual_seed(seed)
    next_id = torch.randint(vocab, (vocab,), generator=generator)
    seen = torch.randint(3, (vocab,), generator=generator)
    return MaxGramTable.of_counts(MaxGramConfig(vocab, **config), next_id, seen, seen)


def test_a_saved_table_loads_unchanged_and_replaces_the_previous_one(tmp_path):
    folder = tmp_path / "run" / "table"
    for seed in (0, 1):
        table = random_table(seed=seed, tokenizer="abc", fallback=4, corpus={"rows": seed})
        save_table(table, folder)
        loaded = load_table(folder, "mine", VOCAB, "abc")
        assert loaded.config == table.config
        for name, tensor in table.state_dict().items():
            assert torch.equal(getattr(loaded, name), tensor)
        assert loaded.next_id.dtype == torch.int32
        assert [path.name for path in folder.parent.iterdir()] == ["table"]
    names = {"SHA256SUMS", "config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names


def test_a_table_for_other_tokens_is_refused_naming_both_sides(tmp_path):
    save_table(random_table(tokenizer="a" * 64), tmp_path / "table")
    with pytest.raises(TargetError, match=f"vocabulary of {VOCAB}, other has 99"):
        load_table(tmp_path / "table", "other", 99, "a" * 64)
    with pytest.raises(TargetError, match="tokenizer aaaaaaaaaaaa, other has bbbbbbbbbbbb"):
        load_table(tmp_path / "table", "other", VOCAB, "b" * 64)


def test_a_missing_a_damaged_and_a_newer_table_are_errors(tmp_path):
    folder = tmp_path / "table"
    with pytest.raises(HeadError, match=r"no Max-Gram table at .* python train/maxgram\.py"):
        load_table(folder, "mine", VOCAB)
    save_table(random_table(), folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, written = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[:-4])
    with pytest.raises(HeadError, match="no whole Max-Gram table"):
        load_table(folder, "mine", VOCAB)
    weights.write_bytes(whole.replace(b'"next_id"', b'"nexd_ip"'))
    with pytest.raises(HeadError, match="no whole Max-Gram table"):
        load_table(folder, "mine", VOCAB)
    weights.write_bytes(whole)
    config.write_text(json.dumps(written | {"version": 99}))
    with pytest.raises(HeadError, match="version 99"):
        load_table(folder, "mine", VOCAB)


# -- drafts --------------------------------------------------------------------------------------


def drafted(drafter: MaxGramDrafter, known: list[int]) -> list[list[int]]:
    """Draft after known tokens; return the paths from root to leaf."""
    drafter.start(0, Request(known[:2], 9))
    drafter.observe(0, known[2:], None)
    (tree,) = drafter.draft([0])
    tokens, parents = [None, *tree.tokens.tolist()], tree.topology.parents
    assert len(tokens) - 1 <= drafter.max_nodes
    for children in tree.topology.children:
        assert len({tokens[child] for child in children}) == len(children)
    paths = []
    for leaf in (n for n, children in enumerate(tree.topology.children) if not children and n):
        path = []
        while leaf:
            path.append(tokens[leaf])
            leaf = parents[leaf]
        paths.append(path[::-1])
    return paths


def test_a_draft_is_a_copy_completed_by_bigrams(tmp_path):
    next_id = [1, 2, 3, 4, 5, 6, 7, 0]
    make = partial(MaxGramDrafter, FirstSuffixes, 5, next_id=next_id)
    # 5 6 was followed by 7 3 5 6: a copy of four tokens, then the bigram of 6.
    assert drafted(make(), [5, 6, 7, 3, 5, 6]) == [[7, 3, 5, 6, 7]]
    assert drafted(make(), [0, 5, 3]) == [[4, 5, 6, 7, 0]]  # nothing recurs
    assert drafted(make(shortest=3), [5, 6, 7, 3, 5, 6]) == [[7, 0, 1, 2, 3]]
    assert drafted(MaxGramDrafter(FirstSuffixes, 5), [5, 6, 7, 3, 5, 6]) == [[7, 3, 5, 6]]
    assert drafted(MaxGramDrafter(FirstSuffixes, 5), [0, 5, 3]) == []


@pytest.mark.parametrize("name", CONTINUATIONS)
@pytest.mark.parametrize("branches", [2, 3])
def test_branches_are_the_first_continuations_that_differ(name, branches):
    next_id = random_table(5).next_id.tolist()
    for seed in range(40):
        rng = random.Random(seed)
        known = [rng.randrange(4) for _ in range(25)]
        suffixes = CONTINUATIONS[name]()
        suffixes.extend(known)
        expected: list[list[int]] = []
        for copied in suffixes.continuations(6):
            new = all(path[: len(copied)] != copied for path in expected)
            if new and len(expected) < branches:
                while len(copied) < 6:
                    copied.append(next_id[copied[-1]])
                expected.append(copied)
        drafter = MaxGramDrafter(CONTINUATIONS[name], 6, 1, branches, next_id)
        # A copy completed by bigrams may equal a path that exists already.
        assert sorted(drafted(drafter, known)) == sorted({tuple(p): p for p in expected}.values())


@pytest.mark.parametrize("match", [1, 2, 3])
def test_prompt_lookup_copies_what_followed_the_latest_match_of_its_length(match):
    for seed in range(60):
        rng = random.Random(seed)
        known = [rng.randrange(4) for _ in range(rng.randrange(2, 30))]
        starts = range(len(known) - match - 1, -1, -1)
        found = [n for n in starts if known[n : n + match] == known[-match:]]
        expected = known[found[0] + match :][:5] if found and len(known) >= match else []
        assert drafted(PromptLookup(match, 5, 1), known) == ([expected] if expected else [])


def test_a_drafter_refuses_settings_below_1():
    for settings in ({"count": 0}, {"shortest": 0}, {"branches": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            MaxGramDrafter(RecentSuffixes, **({"count": 4} | settings))


# -- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_max_gram_drafts_change_no_output(rows, temperature):
    target, rng = random_target(), random.Random(2)
    table = random_table().next_id.tolist()
    prompts = [[rng.randrange(VOCAB) for _ in range(3 + 7 * n)] for n in range(4)]
    prompts.append([3, 4, 5] * 9)
    requests = [Request(p, 25, temperature, seed=n) for n, p in enumerate(prompts)]

    def tokens(drafter) -> list[list[int]]:
        return decode(Decoder(target, drafter, rows, 160), requests)

    expected = tokens(None)
    for name, suffixes in CONTINUATIONS.items():
        for branches in (1, 3):
            for next_id in (table, None):
                drafter = MaxGramDrafter(suffixes, 7, 1, branches, next_id, rows)
                assert tokens(drafter) == expected, (name, branches)


def test_a_recipe_counts_a_table_and_benchmarks_it_then_and_later(tmp_path):
    places = [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    small = ["eval.limit=2", "eval.max_new_tokens=12", "data.limit=60"]
    done = run_here("train/maxgram.py", "recipes/tiny_maxgram.yaml", *places, *small)
    assert done.returncode == 0, done.stderr
    assert "of the vocabulary has been seen" in done.stdout
    names = {path.name for path in (tmp_path / "run").iterdir() if path.suffix != ".png"}
    assert names == {"recipe.yaml", "report.json", "report.html", "costs.json", "table"}
    methods = ["--methods", "plain,prompt_lookup,maxgram,ngram_dynamic"]
    bench = run_here("eval/bench.py", "recipes/tiny_maxgram.yaml", *places, *small, *methods)
    assert bench.returncode == 0, bench.stderr
    report = tmp_path / "run" / "bench" / "tiny_chat-b1-t0" / "report.json"
    report = json.loads(report.read_text())
    rows = {row["method"]: row for row in report["runs"]}
    assert set(rows) == {"plain", "prompt_lookup", "maxgram", "ngram_dynamic"}
    for row in rows.values():
        assert row["identical"] + row["near_ties"] == 2
    for name in ("maxgram", "ngram_dynamic"):
        assert rows[name]["drafter_forwards_per_step"] == 0
        assert rows[name]["tokens_per_step"] > 1
