"""Time the suffix automaton: microseconds per token (add it, find what followed) by context.

Strings: random tokens of a vocabulary of 50 000 and of 4, the bundled conversations, one token over
and over, and a loop of 37 tokens in which 2% are wrong. `read` is the time per token of a prompt.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median
from typing import Annotated

from specdraft.data.chat import read_conversations
from specdraft.eval.lookup.maxgram import CONTINUATIONS
from specdraft.eval.lookup.suffix import Suffixes
from specdraft.eval.papers.table import Plan, Row, SeededTable
from specdraft.models.target_files import bundled_target_dir, load_tokenizer
from specdraft.recipes.fields import Interval
from specdraft.recipes.sections.target import BUNDLED

ROUNDS, TOKENS = 9, 100  # the median of rounds: whoever shares the machine does not count
Size = Annotated[int, Interval(1, 10_000_000)]


@dataclass(frozen=True, kw_only=True)
class SuffixTable(SeededTable):
    """Strings and kinds of continuation as rows, contexts as columns."""

    reads_recipe = False

    contexts: tuple[Size, ...] = (1024, 8192, 65536)
    count: Size = 10  # tokens proposed

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every kind on the strings of a seed."""
        found = {}
        longest = max(self.contexts, default=0)
        for name, string in strings(longest + ROUNDS * TOKENS, seed).items():
            for kind, make in CONTINUATIONS.items():
                figures = {}
                for length in self.contexts:
                    proposed, read = time_per_token(make, string, length, self.count)
                    figures |= {f"{length}": proposed, f"{length}, read": read}
                found[f"{name}, {kind}"] = Row(figures)
        return found


def strings(length: int, seed: int) -> dict[str, list[int]]:
    """Make the strings that are timed."""
    rng = random.Random(seed)
    loop = [n % 37 for n in range(length)]
    return {
        "random, 50 000": [rng.randrange(50_000) for _ in range(length)],
        "random, 4": [rng.randrange(4) for _ in range(length)],
        "conversations": conversations(length),
        "one token": [1] * length,
        "loop with faults": [99 if rng.random() < 0.02 else token for token in loop],
    }


def conversations(length: int) -> list[int]:
    """Return the first tokens of the bundled conversations, one behind the other."""
    tokenizer = load_tokenizer(bundled_target_dir())
    read = read_conversations([BUNDLED]).conversations
    texts = (message["content"] for conversation in read for message in conversation.messages)
    ids = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    return [*islice(chain.from_iterable(ids), length)]


def time_per_token(
    make: Callable[[], Suffixes], string: list[int], context: int, count: int
) -> tuple[float, float]:
    """Return microseconds per token behind a context, and per token of reading the context."""
    suffixes, began = make(), time.perf_counter()
    suffixes.extend(string[:context])
    read = (time.perf_counter() - began) / context
    rounds = []
    for start in range(context, context + ROUNDS * TOKENS, TOKENS):
        began = time.perf_counter()
        for token in string[start : start + TOKENS]:
            suffixes.extend([token])
            next(suffixes.continuations(count), None)
        rounds.append((time.perf_counter() - began) / TOKENS)
    return 1e6 * median(rounds), 1e6 * read
