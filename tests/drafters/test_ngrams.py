"""What follows longer contexts: counted exactly, kept with the table, drafted as far as it pays."""

import multiprocessing
import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from decoding import decode
from random_models import VOCAB, random_target
from test_dynamic import DEAR, FREE
from test_maxgram import Shards, processes, random_rows, token_cache

from specdraft.data.ranks import Ranks
from specdraft.data.store.corpus import CachedTokens
from specdraft.eval.drafters.ngrams import LEAST, NGramDrafter
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.enlarged.heads import enlarged_table
from specdraft.models.maxgram import POWERS, MaxGramConfig, MaxGramTable, load_table
from specdraft.recipes.errors import HeadError
from specdraft.train.counting.bigrams import count, save_table

LENGTHS = (2, 3, 4)


def hashed(context: tuple[int, ...]) -> int:
    newest_first = reversed(context)
    return sum((t + 1) * power for t, power in zip(newest_first, POWERS, strict=False)) % 2**64


def by_hand(ids: list[list[int]], mask: list[list[bool]], length: int) -> dict[tuple, Counter]:
    """What follows every context of so many tokens, where it is marked."""
    found: dict[tuple, Counter] = {}
    for row, marks in zip(ids, mask, strict=True):
        for place in range(length, len(row)):
            if marks[place]:
                found.setdefault(tuple(row[place - length : place]), Counter())[row[place]] += 1
    return found


def best_of(behind: Counter) -> tuple[int, float]:
    token, agreed = min(behind.items(), key=lambda item: (-item[1], item[0]))
    return token, agreed / (sum(behind.values()) + 1)


def followers_of(texts: list[list[int]], longest: int) -> list[dict[int, tuple[int, float]]]:
    """What follows contexts of 1, 2, .. tokens, in whole texts."""
    mask = [[True] * len(text) for text in texts]
    lengths = range(1, longest + 1)
    counts = (by_hand(texts, mask, length) for length in lengths)
    return [{hashed(known): best_of(some) for known, some in own.items()} for own in counts]


def said(known: list[dict], text: list[int]) -> tuple[int, float]:
    """What a table says comes next: its token behind the longest context that it knows."""
    contexts = [tuple(text[-n:]) for n in range(len(known), 0, -1) if n <= len(text)]
    found = (known[len(context) - 1].get(hashed(context)) for context in contexts)
    return next(filter(None, found), (-1, 0.0))


def check_followers(table: MaxGramTable, ids: list, mask: list) -> None:
    first, *longer = table.followers()
    bigrams = by_hand(ids, mask, 1)
    assert first == {hashed(known): best_of(behind) for known, behind in bigrams.items()}
    assert len(longer) == len(LENGTHS)
    for length, followers in zip(LENGTHS, longer, strict=True):
        counts = by_hand(ids, mask, length)
        often = {known: some for known, some in counts.items() if sum(some.values()) > 1}
        assert followers == {hashed(known): best_of(behind) for known, behind in often.items()}


# -- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("shard_tokens", [1, 13, 50, 10_000])
def test_counts_equal_a_count_by_hand(tmp_path, everything, shard_tokens):
    for seed in range(3):
        ids, mask = random_rows(seed)
        corpus = CachedTokens(token_cache(ids, mask, tmp_path), everything, shard_tokens)
        if everything:
            mask = [[True] * len(row) for row in ids]
        counts = count(corpus, tmp_path, 7, context=4)
        check_followers(counts.table(None, {}), ids, mask)
        for length in LENGTHS:
            whole = counts.followers(length)
            assert whole.seen.min() > 1
            assert (np.diff(whole.contexts.astype(object)) > 0).all()
            for at_once in (1, 7):
                for part, other in zip(whole, counts.followers(length, at_once), strict=True):
                    assert part.tolist() == other.tolist()


def test_three_processes_together_count_what_one_counts(tmp_path):
    wait = multiprocessing.get_context("fork").Barrier(3, timeout=30)
    jobs = [(Shards(range(8)), tmp_path, 7, Ranks(r, 3, wait.wait), 4) for r in range(3)]
    assert processes(count, jobs) == [0, 0, 0]
    corpus = Shards(range(8))
    table = count(corpus, tmp_path, 7, context=4).table(None, {})
    assert corpus.read == []
    ids, mask = ([*chain(*parts)] for parts in zip(*corpus.rows, strict=True))
    check_followers(table, ids, mask)


def test_counts_with_and_without_longer_contexts_do_not_mix(tmp_path):
    tables = [count(Shards(range(2)), tmp_path, 7, context=n).table(None, {}) for n in (1, 4, 2)]
    assert [len(table.config.longer) for table in tables] == [0, 3, 1]
    for table in tables:
        assert torch.equal(table.next_id, tables[0].next_id)


# -- the table -----------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path) -> MaxGramTable:
    return count(Shards(range(4)), tmp_path / "counts", 7, context=4).table(None, {})


def test_a_saved_table_has_its_longer_contexts(tmp_path, table):
    save_table(table, tmp_path / "table")
    loaded = load_table(tmp_path / "table", "mine", 7)
    assert loaded.config == table.config
    assert loaded.followers() == table.followers()


@pytest.mark.parametrize(
    ("part", "value"), [("next_id_2", 7), ("seen_3", -1), ("agreed_2", -5), ("agreed_4", 9999)]
)
def test_contexts_of_other_tokens_or_counts_are_refused(tmp_path, table, part, value):
    getattr(table, part)[0] = value
    save_table(table, tmp_path / "table")
    with pytest.raises(HeadError, match="no whole Max-Gram table"):
        load_table(tmp_path / "table", "mine", 7)


@pytest.mark.parametrize("longer", [(1,) * 8, (10**10,), (-1,)])
def test_impossible_numbers_of_contexts_are_refused(longer):
    with pytest.raises(ValueError, match="longer = "):
        MaxGramConfig(7, longer=longer)


def test_a_table_of_more_tokens_knows_the_same_contexts(table):
    first, *longer = enlarged_table(table, 12).followers()
    assert [first, *longer] == table.followers()


# -- drafts --------------------------------------------------------------------------------------


def draft_of(drafter: NGramDrafter, text: list[int]) -> list[int]:
    drafter.start(0, Request(text, 9))
    [tree] = drafter.draft([0])
    assert tree.topology.parents == tuple(range(-1, len(tree.tokens)))
    return tree.tokens.tolist()


def test_a_draft_follows_the_longest_known_contexts_while_it_is_likely(table):
    known, lengths = table.followers(), set()
    for seed in range(60):
        rng = random.Random(seed)
        text = [rng.randrange(6) for _ in range(rng.randrange(1, 6))]  # of 5 and 6 none is known
        expected, reach = [], 1.0
        while len(expected) < 5:
            token, chance = said(known, [*text, *expected])
            reach *= chance
            if reach < LEAST:
                break
            expected.append(token)
        lengths.add(len(expected))
        assert draft_of(NGramDrafter(known, FREE, 5), text) == expected
    assert len(lengths) > 2


def test_what_came_makes_the_next_drafts_longer_or_shorter(table):
    """As sure as a table is of its corpus, a text may follow it always, or never."""
    known = [{hashed((token,)): ((token + 1) % 6, 0.6) for token in range(6)}]
    lengths = []
    for step in (1, 2):  # what it says, or something else
        drafter, text = NGramDrafter(known, FREE), [0]
        before = len(draft_of(drafter, text))
        for _ in range(100):
            text = [(text[-1] + step) % 6]
            drafter.draft([0])
            drafter.observe(0, text, torch.empty(0))
        lengths.append((before, len(draft_of(drafter, text))))
    (first, more), (other, fewer) = lengths
    assert first == other
    assert more == 24 > first > 1 == fewer


def test_what_costs_more_than_it_brings_is_not_drafted(table):
    known = table.followers()
    assert draft_of(NGramDrafter(known, DEAR), [0, 1, 2]) == []
    assert draft_of(NGramDrafter(known, FREE), [0, 1, 2]) != []


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_drafts_change_no_output(tmp_path, rows, temperature):
    target, rng = random_target(), random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(3 + 7 * n)] for n in range(5)]
    requests = [Request(p, 25, temperature, seed=n) for n, p in enumerate(prompts)]

    def tokens(drafter, **expected) -> list[list[int]]:
        return decode(Decoder(target, drafter, rows, 160), requests, **expected)

    plain = tokens(None)
    ids = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)] * 2
    corpus = CachedTokens(token_cache(ids, [[True] * len(row) for row in ids], tmp_path))
    table = count(corpus, tmp_path, VOCAB, context=4).table(None, {})
    for costs in (FREE, None):
        drafter = NGramDrafter(table.followers(), costs, 6, rows)
        assert tokens(drafter, accepts=costs is FREE) == plain


def test_rejection_rules_refuse_its_drafts(table):
    target = random_target()
    drafter = NGramDrafter(table.followers(), FREE)
    [done] = Decoder(target, drafter, 1, 64).run([Request([1, 2], 5, 1.0, rule="recursive")])
    assert "allowed: gumbel, walk" in str(done.error)
