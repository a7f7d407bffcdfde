"""Conversations of a small made-up world: what the bundled tiny target is trained on.

    conversation(random.Random(0)) -> [{"role": "user", "content": ..}, {"role": "assistant", ..}]

Five kinds of talk (chat, math, code, story, summary) are mixed within conversations of one to four
turns. Requests are composed from slots; a sixteenth of all requests, chosen by a checksum of their
text, is held out: training conversations never contain one, evaluation prompts end with one.
"""

import random
import zlib
from collections.abc import Callable, Iterator

from specdraft.data.world.arithmetic import math
from specdraft.data.world.chats import chat
from specdraft.data.world.functions import code
from specdraft.data.world.lexicon import Exchange
from specdraft.data.world.retelling import retell
from specdraft.data.world.stories import story

Message = dict[str, str]

KINDS: dict[str, Callable[[random.Random, int], list[Exchange]]] = {
    "chat": chat,
    "math": math,
    "code": code,
    "story": story,
    "summary": retell,
}
MAX_CHARACTERS = 1600  # of a conversation: about 450 tokens
HELD_OUT_SHARE = 16


def is_held_out(request: str) -> bool:
    """Say whether a user's request belongs to the evaluation prompts."""
    return zlib.crc32(request.encode()) % HELD_OUT_SHARE == 0


def _draw(rng: random.Random) -> list[Exchange]:
    """Draw one or two pieces of talk, one to four exchanges in all."""
    exchanges: list[Exchange] = []
    for _ in range(rng.choice((1, 1, 2))):
        turns = rng.choices((1, 2, 3), weights=(5, 3, 1))[0]
        # Chat answers are short, so chat comes more often.
        kind = rng.choices(list(KINDS), weights=(8, 6, 5, 4, 5))[0]
        exchanges += KINDS[kind](rng, turns)
    return exchanges[:4]


def _too_long(exchanges: list[Exchange]) -> bool:
    return sum(len(user) + len(answer) for user, answer in exchanges) > MAX_CHARACTERS


def to_messages(exchanges: list[Exchange]) -> list[Message]:
    """Write exchanges as chat messages."""
    return [
        {"role": role, "content": text}
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]


def conversation(rng: random.Random) -> list[Message]:
    """Draw one training conversation: it contains no held-out request."""
    while True:
        exchanges = _draw(rng)
        if not _too_long(exchanges) and not any(is_held_out(user) for user, _ in exchanges):
            return to_messages(exchanges)


def held_out_conversation(rng: random.Random, kind: str) -> list[Message]:
    """Draw one evaluation conversation of `kind`: its last request is held out.

    It ends with a reference answer; without that last message it is an evaluation prompt.
    """
    while True:
        exchanges = KINDS[kind](rng, rng.choice((1, 1, 2)))
        if is_held_out(exchanges[-1][0]) and not _too_long(exchanges):
            return to_messages(exchanges)


def held_out_prompts(seed: int, per_kind: int) -> Iterator[tuple[str, list[Message]]]:
    """Yield (kind, conversation) for `per_kind` distinct held-out requests of every kind."""
    rng = random.Random(seed)
    for kind in KINDS:
        seen: set[str] = set()
        while len(seen) < per_kind:
            messages = held_out_conversation(rng, kind)
            if messages[-2]["content"] not in seen:
                seen.add(messages[-2]["content"])
                yield kind, messages


def conversations(seed: int) -> Iterator[list[Message]]:
    """Yield training conversations without end."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng)
