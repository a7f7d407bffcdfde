"""How far a table's word is taken: as far as it has come true in the texts at hand.

A table says how often a token followed a context in its corpus. A text that is like the corpus
keeps to it more often than such counts say, all the more behind long contexts; another text, and
behind short contexts, less often. So what the table says is counted together with what came, apart
for contexts of each length and for words of about the same odds.
"""

from math import log2

# Rounded, in powers of two: the odds of what is said, from a quarter up to 32.
LOWEST, HIGHEST = -2, 5
ODDS = HIGHEST - LOWEST + 1
PRIOR = 8.0  # tokens that what a table says counts for
KEEP = 0.998  # what a token counts for, of the next one of its kind


class Trust:
    """What has come of a table's words. longest: tokens of a context."""

    def __init__(self, longest: int):
        self.came, self.said = [0.0] * (longest * ODDS), [0.0] * (longest * ODDS)

    def kind(self, length: int, chance: float) -> int:
        """The kind of a word about what follows a context of so many tokens."""
        odds = round(log2(chance / (1.0 - chance))) if chance < 1.0 else HIGHEST
        return length * ODDS - ODDS + min(max(odds, LOWEST), HIGHEST) - LOWEST

    def chance(self, kind: int, chance: float) -> float:
        """How likely a token is that the table says is so likely."""
        return (PRIOR * chance + self.came[kind]) / (PRIOR + self.said[kind])

    def note(self, kind: int, came: bool) -> None:
        """A token that was said came, or another one."""
        self.came[kind] = KEEP * self.came[kind] + came
        self.said[kind] = KEEP * self.said[kind] + 1.0
