"""Where the end of a growing sequence has occurred before, and what followed: a suffix automaton.

A state stands for the suffixes that end at the same positions; its `link` leads to the next shorter
ones. When a token has been added, the link of the newest state holds the longest suffix that also
ended earlier: the longest match is known at no cost, and adding a token is amortised O(1) (Blumer
et al. 1985). An earlier occurrence may overlap the suffix. A position is the index of the last
token of an occurrence.

    >>> suffixes = FirstSuffixes()
    >>> suffixes.extend([5, 6, 7, 5, 6])
    >>> next(suffixes.continuations(2))  # what followed 5 6 the first time
    [7, 5]

`continuations` goes on with the next shorter suffixes that occur elsewhere, too, the longest first.
Tokens that are drafted and not committed can be put `ahead` of the sequence: suffixes then end with
them, and occur in what is committed. Copying guesses from guesses would say nothing about the text.
"""

from collections.abc import Iterable, Iterator, Sequence

LONGEST = 16  # tokens of the suffixes that RecentSuffixes and FrequentSuffixes tell apart
LOOKED = 16  # continuations that are looked at


class Suffixes:
    """A growing sequence that knows how its end went on before."""

    def __init__(self):
        self.tokens: list[int] = []
        # Per state: transitions, link, length of its longest suffix, its first position.
        self.follow: list[dict[int, int]] = [{}]
        self.link, self.length, self.first = [-1], [0], [-1]
        self.newest = 0  # the state of the whole sequence

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._add(token)

    def continuations(
        self, count: int, shortest: int = 1, ahead: Sequence[int] = ()
    ) -> Iterator[list[int]]:
        """Yield up to `count` tokens that followed an earlier occurrence of the longest suffix of
        the sequence and of what is `ahead` of it, then of shorter ones down to `shortest`."""
        (state, length), looked = self._end(ahead), 0
        while state > 0 and looked < LOOKED and min(length, self.length[state]) >= shortest:
            if copied := self._behind(state, count, ahead):
                looked += 1
                yield copied
            state = self.link[state]

    def _end(self, ahead: Sequence[int]) -> tuple[int, int]:
        """The state of the longest suffix to copy behind, `ahead` included, and its length."""
        raise NotImplementedError

    def _behind(self, state: int, count: int, ahead: Sequence[int]) -> list[int]:
        """Up to `count` tokens behind the suffixes of a state; none where they are new."""
        raise NotImplementedError

    def _copy(self, start: int, count: int, ahead: Sequence[int]) -> list[int]:
        """`count` tokens from a place on, as far as they are known; the copy runs on `ahead`."""
        copied = self.tokens[start : start + count]
        return copied + list(ahead[: count - len(copied)])

    def _follow(self, state: int, ahead: Sequence[int]) -> tuple[int, int]:
        """The state and the length of the longest suffix that occurs in the sequence once `ahead`
        is put behind the longest suffix of `state`."""
        length = self.length[state]
        for token in ahead:
            while state and token not in self.follow[state]:
                state = self.link[state]
                length = self.length[state]
            known = self.follow[state].get(token)
            state, length = (0, 0) if known is None else (known, length + 1)
        return state, length

    def _add(self, token: int) -> None:
        follow, link = self.follow, self.link
        added, state = len(follow), self.newest
        follow.append({})
        self.length.append(self.length[state] + 1)
        self.first.append(len(self.tokens))
        self.tokens.append(token)
        while state >= 0 and token not in follow[state]:
            follow[state][token] = added
            state = link[state]
        self.newest = added
        if state < 0:
            link.append(0)
            return
        seen = follow[state][token]
        whole = self.length[seen] == self.length[state] + 1
        link.append(seen if whole else added + 1)
        if not whole:
            self._split(seen, self.length[state] + 1)
            while state >= 0 and follow[state].get(token) == seen:
                follow[state][token] = added + 1
                state = link[state]

    def _split(self, state: int, length: int) -> None:
        """Part the suffixes of up to `length` tokens, which now end here, too, from a state."""
        self.follow.append(dict(self.follow[state]))
        self.link.append(self.link[state])
        self.length.append(length)
        self.first.append(self.first[state])
        self.link[state] = len(self.link) - 1


class FirstSuffixes(Suffixes):
    """`Suffixes` by first occurrence: what Max-Gram copies."""

    def _end(self, ahead: Sequence[int]) -> tuple[int, int]:
        if ahead:
            return self._follow(self.newest, ahead)
        return self.link[self.newest], len(self.tokens)

    def _behind(self, state: int, count: int, ahead: Sequence[int]) -> list[int]:
        return self._copy(self.first[state] + 1, count, ahead)


class _BoundedSuffixes(Suffixes):
    """`Suffixes` of up to `longest` tokens, with a mark per state for all of up to `bound`.

    All suffixes of a sequence that repeats itself are as many states as it has tokens, so marks of
    unbounded suffixes would cost O(n) a token. `held` is the state of the longest bounded one.
    """

    beyond = 0  # tokens by which `bound` is longer

    def __init__(self, longest: int = LONGEST):
        super().__init__()
        self.longest, self.bound, self.held = longest, longest + self.beyond, 0
        self.marks = [0]  # per state

    def _add(self, token: int) -> None:
        self.marks.append(0)
        super()._add(token)
        self.held = self._trim(self.follow[self.held][token], self.bound)

    def _split(self, state: int, length: int) -> None:
        super()._split(state, length)
        self.marks.append(self.marks[state])

    def _end(self, ahead: Sequence[int]) -> tuple[int, int]:
        state, length = self._follow(self.held, ahead)
        return self._trim(state, self.longest), min(length, self.longest)

    def _trim(self, state: int, length: int) -> int:
        """Return the state, `state` or one down its links, of its suffixes of up to `length`."""
        link, lengths = self.link, self.length
        while lengths[link[state]] >= length:
            state = link[state]
        return state


class RecentSuffixes(_BoundedSuffixes):
    """`Suffixes` of up to `longest` tokens by most recent occurrence: what prompt lookup copies."""

    def _add(self, token: int) -> None:
        # A position becomes one to copy from when a token follows it. A mark is where that token
        # is: 0 for suffixes that have not occurred before.
        state, here = self.held, len(self.tokens)
        while state > 0:
            self.marks[state] = here
            state = self.link[state]
        super()._add(token)

    def _behind(self, state: int, count: int, ahead: Sequence[int]) -> list[int]:
        start = self.marks[state]
        return self._copy(start, count, ahead) if start else []


class FrequentSuffixes(_BoundedSuffixes):
    """`Suffixes` by frequency: the token that most often followed, then again with that token.

    Every token is the one that has followed the last `longest` tokens of suffix and continuation
    most often; of equals, the one that did first.
    """

    beyond = 1  # marks are counts of a suffix and the token behind it

    def _add(self, token: int) -> None:
        super()._add(token)
        state = self.held
        while state > 0:
            self.marks[state] += 1
            state = self.link[state]

    def _behind(self, state: int, count: int, ahead: Sequence[int]) -> list[int]:
        walked = []
        while len(walked) < count and self.follow[state]:
            token, state = self._favourite(state)
            walked.append(token)
            state = self._trim(state, self.longest)
        return walked

    def _favourite(self, state: int) -> tuple[int, int]:
        followers, marks, first = self.follow[state].items(), self.marks, self.first
        if len(followers) == 1:  # most of the time
            return next(iter(followers))
        return max(followers, key=lambda item: (marks[item[1]], -first[item[1]]))
