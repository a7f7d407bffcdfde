"""Sources and targets of the made-up world: a passage with a request, and what is made of it.

    pair(random.Random(0), "summary") -> ("Summarise the text ..", "In short: ..")

What the small encoder-decoder learns (data/tiny_t5.py) and its drafters are measured on. Held out
are the requests that `world` holds out.
"""

import random
from collections.abc import Iterator

from specdraft.data.world.lexicon import Exchange, texts
from specdraft.data.world.retelling import TASKS, retell_once
from specdraft.data.world.world import is_held_out

MAX_CHARACTERS = 900  # of a source: about 250 tokens


def pair(rng: random.Random, task: str, held_out: bool = False) -> Exchange:
    """Draw a source and its target, held out or not."""
    while True:
        source, target = retell_once(rng, task)
        if len(source) <= MAX_CHARACTERS and is_held_out(source) == held_out:
            return source, target


def word_salad(rng: random.Random) -> Exchange:
    """Draw a text without sense and its copy: what is said can only be read.

    Sentences can be guessed from their templates, and a model that is good at that learns late, or
    never, to look its names and numbers up.
    """
    kinds = texts("lexicon")["words"].values()
    every = [word for kind in kinds for word in kind]
    salad = " ".join(rng.choice(every) for _ in range(rng.randint(4, 24)))
    return f"{salad}\n\nRepeat the text.", salad


def pairs(seed: int) -> Iterator[Exchange]:
    """Yield training pairs of all tasks without end."""
    rng = random.Random(seed)
    while True:
        yield pair(rng, rng.choice([*TASKS]))


def held_out_pairs(seed: int, per_task: int) -> Iterator[tuple[str, Exchange]]:
    """Yield (task, pair) for `per_task` held-out requests of every task."""
    rng = random.Random(seed)
    for task in TASKS:
        for _ in range(per_task):
            yield task, pair(rng, task, held_out=True)
