"""Suffix matching equals its definition, spelled out on every prefix of random strings."""

import random

import pytest

from specdraft.eval.lookup.suffix import (
    LONGEST,
    LOOKED,
    FirstSuffixes,
    FrequentSuffixes,
    RecentSuffixes,
)


def ends(tokens: list[int], pattern: list[int]) -> list[int]:
    """Every position at which a pattern ends."""
    size = len(pattern)
    return [e for e in range(size - 1, len(tokens)) if tokens[e + 1 - size : e + 1] == pattern]


def repeated_suffixes(tokens: list[int], longest: int, shortest: int) -> list[list[int]]:
    """The suffixes that occurred before, longest first; among those at the same places only the
    longest."""
    found: dict[tuple, list[int]] = {}
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = tokens[-length:]
        where = tuple(ends(tokens, suffix))
        if len(where) > 1:
            found.setdefault(where, suffix)
    return [suffix for suffix in found.values() if len(suffix) >= shortest][:LOOKED]


def copied(tokens: list[int], end: int, count: int) -> list[int]:
    return tokens[end + 1 : end + 1 + count]


def by_first(tokens, count, shortest, longest=10**9):
    return [
        copied(tokens, ends(tokens, suffix)[0], count)
        for suffix in repeated_suffixes(tokens, longest, shortest)
    ]


def by_recent(tokens, count, shortest, longest=LONGEST):
    return [
        copied(tokens, ends(tokens, suffix)[-2], count)
        for suffix in repeated_suffixes(tokens, longest, shortest)
    ]


def by_frequency(tokens, count, shortest, longest=LONGEST):
    def walk(context):
        walked = []
        while len(walked) < count:
            behind = [tokens[e + 1] for e in ends(tokens, context) if e + 1 < len(tokens)]
            if not behind:
                break
            # max keeps the first of equals, and `behind` is in order of occurrence.
            walked.append(max(behind, key=behind.count))
            context = [*context, walked[-1]][-longest:]
        return walked

    return [walk(suffix) for suffix in repeated_suffixes(tokens, longest, shortest)]


def strings(seed: int):
    """Random strings over small alphabets, and repetitive ones with and without errors."""
    rng = random.Random(seed)
    for alphabet in (1, 2, 3, 6):
        yield [rng.randrange(alphabet) for _ in range(36)]
    period = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    yield (period * 40)[:40]
    yield [9 if rng.random() < 0.1 else token for token in (period * 40)[:40]]
    fibonacci = [0], [0, 1]
    while len(fibonacci[1]) < 45:
        fibonacci = fibonacci[1], fibonacci[1] + fibonacci[0]
    yield fibonacci[1]


VARIANTS = [
    (FirstSuffixes, by_first),
    (RecentSuffixes, by_recent),
    (FrequentSuffixes, by_frequency),
    *(
        (lambda kind=kind, longest=longest: kind(longest),
         lambda *a, definition=definition, longest=longest: definition(*a, longest))
        for kind, definition in ((RecentSuffixes, by_recent), (FrequentSuffixes, by_frequency))
        for longest in (1, 2, 3)
    ),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_continuations_equal_those_of_the_definition(variant, seed):
    make, definition = VARIANTS[variant]
    for string in strings(seed):
        suffixes = make()
        for length, token in enumerate(string, start=1):
            suffixes.extend([token])
            if length % 3 == seed % 3 or length > 30:
                known = string[:length]
                assert list(suffixes.continuations(5)) == definition(known, 5, 1), known
        assert suffixes.tokens == string


@pytest.mark.parametrize("shortest", [1, 2, 3, 7])
@pytest.mark.parametrize("variant", [0, 1, 2])
def test_matches_shorter_than_the_minimum_are_not_copied_from(variant, shortest):
    make, definition = VARIANTS[variant]
    for seed in range(20):
        rng = random.Random(seed)
        string = [rng.randrange(3) for _ in range(30)]
        suffixes = make()
        suffixes.extend(string)
        assert list(suffixes.continuations(4, shortest)) == definition(string, 4, shortest)


@pytest.mark.parametrize("kind", [FirstSuffixes, RecentSuffixes, FrequentSuffixes])
def test_continuations_are_the_same_for_tokens_added_singly_or_together(kind):
    for string in strings(1):
        single, together = kind(), kind()
        for token in string:
            single.extend([token])
        together.extend(string[:7])
        together.extend(string[7:])
        assert list(single.continuations(9)) == list(together.continuations(9))


@pytest.mark.parametrize("kind", [FirstSuffixes, RecentSuffixes, FrequentSuffixes])
def test_a_sequence_in_which_nothing_recurs_has_no_continuation(kind):
    suffixes = kind()
    assert list(suffixes.continuations(3)) == []
    suffixes.extend(range(50))
    assert list(suffixes.continuations(3)) == []


@pytest.mark.parametrize("kind", [FirstSuffixes, RecentSuffixes, FrequentSuffixes])
@pytest.mark.parametrize("period", [1, 7, 1000])
def test_a_match_in_a_long_repetition_visits_a_bounded_number_of_states(kind, period):
    # A token's work is the states it visits, counted where they are read.
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    suffixes = kind()
    suffixes.extend((list(range(period)) * 20_000)[:20_000])
    suffixes.link = Counting(suffixes.link)
    for token in (n % period for n in range(20_000, 20_100)):
        suffixes.extend([token])
        next(suffixes.continuations(10))
    assert suffixes.link.reads <= 100 * 10 * (LONGEST + 3)


def once_ahead(known: list[int], ahead: list[int], longest: int) -> list[int]:
    """The longest suffix of `known + ahead` that occurs in `known`."""
    whole = known + ahead
    for length in range(min(longest, len(whole) - 1), 0, -1):
        if ends(known, whole[-length:]):
            return whole[-length:]
    return []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3, 7])
def test_continuations_after_drafted_tokens_are_copied_from_known_matches(seed, count):
    rng = random.Random(seed)
    for string in strings(seed):
        known, guess = string[:30], rng.randrange(3)
        for ahead in (string[30 : 30 + count], [guess] * count, [99, *string[3:count]]):
            whole = known + ahead
            first, recent = FirstSuffixes(), RecentSuffixes(3)
            first.extend(known)
            recent.extend(known)
            suffix = once_ahead(known, ahead, 10**9)
            expected = copied(whole, ends(known, suffix)[0], 5) if suffix else None
            assert next(first.continuations(5, 1, ahead), None) == expected
            longer = len(suffix) >= 4
            assert next(first.continuations(5, 4, ahead), None) == (expected if longer else None)
            # RecentSuffixes(3): among the last three tokens, a match that a known token followed.
            suffix = once_ahead(known[:-1], ahead, 3)
            if suffix == once_ahead(known, ahead, 3):
                where = ends(known[:-1], suffix)[-1] if suffix else None
                expected = copied(whole, where, 5) if suffix else None
                assert next(recent.continuations(5, 1, ahead), None) == expected
            assert first.tokens == recent.tokens == known


def test_the_most_frequent_continuation_takes_drafted_tokens_into_account():
    suffixes = FrequentSuffixes()
    suffixes.extend([1, 2, 5, 6, 1, 2, 7, 6, 1, 2, 7, 8])
    assert next(suffixes.continuations(2, 1, [1])) == [2, 7]
    assert next(suffixes.continuations(2, 1, [6, 1, 2])) == [7, 6]
    assert next(suffixes.continuations(2, 3, [9, 1, 2]), None) is None
