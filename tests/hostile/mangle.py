"""Seeded ways to corrupt bytes and JSON values, as by attackers, bad disks or torn writes."""

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

SCALARS = [None, True, False, 0, -1, 1, 10**30, -(10**30), 1e308, float("nan"), float("inf"), 0.5]
SCALARS += ["", "x" * 10_000, "\0", "\ud800", "\x1b]52;c;aGk=\x07\x1b[2J", "../../etc/passwd"]
SCALARS += ["owner/name", "null", "1e999", "{{ 7 * 7 }}", [], {}, [[]], {"a": {"a": []}}]
WORDS = [
    b"\0",
    b"\xff\xfe",
    b"null",
    b"[" * 3000,
    b"9" * 400,
    b"&a [*a]",
    b"!!python/name:os.system ",
]
WORDS += [
    b"NaN",
    b"-1",
    b"\n---\n",
    b"\x1b[2J",
    b'"',
    b"{",
    b"}",
    b"\\ud800",
    b"1e999",
    b" " * 1000,
]


def spoilt(content: bytes, random: Random) -> bytes:
    """Bytes with a part cut off, flipped, replaced, repeated or added."""
    return random.choice(WAYS)(content, random)


def flipped(content: bytes, random: Random) -> bytes:
    changed = bytearray(content or b"\0")
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(max(len(content), 1))]


def emptied(content: bytes, random: Random) -> bytes:
    return b""


def zeroed(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content) + 1)
    return content[:start] + b"\0" * (len(content) - start)


def inserted(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + random.choice(WORDS) + content[at + random.randrange(2) * 8 :]


def repeated(content: bytes, random: Random) -> bytes:
    start, stop = sorted(random.randrange(len(content) + 1) for _ in range(2))
    return content[:stop] + content[start:]


def drawn(content: bytes, random: Random) -> bytes:
    return random.randbytes(random.randrange(2000))


WAYS: list[Callable[[bytes, Random], bytes]]
WAYS = [flipped, cut, emptied, zeroed, inserted, repeated, drawn]


def odd(value: Any, random: Random) -> Any:
    """A JSON value with one part, at any depth, replaced, removed or added."""
    value = copy.deepcopy(value)
    places = [*_places(value)]
    if not places or random.random() < 0.05:
        return random.choice(SCALARS)
    holder, key = random.choice(places)
    way = random.random()
    if way < 0.7:
        holder[key] = random.choice(SCALARS)
    elif way < 0.85:
        del holder[key]
    elif isinstance(holder, dict):
        holder[random.choice(["nonsense", "\0", "__class__", ""])] = random.choice(SCALARS)
    else:
        holder.extend([*holder[: random.randrange(3)], random.choice(SCALARS)])
    return value


def odd_json(content: bytes, random: Random) -> bytes:
    """A JSON text with an odd value, or invalid JSON."""
    if random.random() < 0.3:
        return spoilt(content, random)
    return json.dumps(odd(json.loads(content), random)).encode()


def _places(value: Any):
    """Every (holder, key) in a value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])
