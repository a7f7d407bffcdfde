"""Time the suffix automaton: microseconds per token (add it, find what followed) by context.

    python eval/bench_suffix.py [--contexts 1024,8192,65536] [--count 10]

Strings: random tokens of a vocabulary of 50 000 and of 4, the bundled conversations, one token over
and over, and a loop of 37 tokens in which 2% are wrong. `read` is the time per token of a prompt.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.table import Table

from specdraft.data.chat import read_conversations
from specdraft.eval.drafters.maxgram import CONTINUATIONS
from specdraft.eval.drafters.suffix import Suffixes
from specdraft.models.target_files import bundled_target_dir
from specdraft.models.tokenizer import load_tokenizer
from specdraft.recipes.errors import entry
from specdraft.recipes.sections.target import BUNDLED

ROUNDS, TOKENS = 9, 100  # the median of rounds: whoever shares the machine does not count


@entry
def main() -> None:
    """Parse, make the strings, time every kind of continuation on each, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="1024,8192,65536", help="comma-separated lengths")
    parser.add_argument("--count", type=int, default=10, help="tokens proposed")
    options = parser.parse_args()
    contexts = [int(length) for length in options.contexts.split(",")]
    table = Table("string", "continuation", title="microseconds per token")
    for length in contexts:
        table.add_column(f"{length}", justify="right")
        table.add_column("read", justify="right")
    for name, string in strings(max(contexts) + ROUNDS * TOKENS).items():
        for kind, make in CONTINUATIONS.items():
            timed = [measure(make, string, length, options.count) for length in contexts]
            table.add_row(name, kind, *(f"{value:.2f}" for pair in timed for value in pair))
    Console().print(table)


def strings(length: int) -> dict[str, list[int]]:
    """Make the strings that are timed."""
    rng = random.Random(0)
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
    tokenizer, ids = load_tokenizer(bundled_target_dir()), []
    for conversation in read_conversations([BUNDLED]).conversations:
        for message in conversation.messages:
            ids += tokenizer(message["content"], verbose=False)["input_ids"]
        if len(ids) >= length:
            break
    return ids[:length]


def measure(
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


if __name__ == "__main__":
    main()
