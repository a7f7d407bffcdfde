"""Conversations from any of the common formats, with every row that cannot be used accounted for.

    sharegpt   {"conversations": [{"from": "human", "value": ".."}, {"from": "gpt", ..}]}
    messages   {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", ..}]}
    alpaca     {"instruction": "..", "input": "..", "output": ".."}
    text       {"text": ".."}      for base models: no chat, the target just goes on
    seq2seq    {"source": "..", "target": ".."}, or as XSum, CNN/DailyMail and WMT are published:
               for encoder-decoders, and never found out

A rejected row is one that is broken (no JSON, no known shape or role) or useless (no answer, an
empty or an endless turn, calls of tools, turns that do not alternate). Broken rows mean a wrong
file or a wrong format: more than 1% of them is an error. Useless rows are common in scraped chats:
more than 10% is an error.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import Any

from specdraft.data.sources import Row, Source, each_source
from specdraft.recipes.errors import DataError
from specdraft.recipes.fields import shortened
from specdraft.recipes.schema import DataSection

BROKEN_SHARE, USELESS_SHARE = 0.01, 0.10
LONGEST_TURN = 1_000_000  # characters; what is longer is a file somebody pasted
_KEYS = {  # the keys that tell a format
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
FORMATS = tuple(_KEYS)
_ROLES = {
    "user": ("human", "user", "prompter"),
    "assistant": ("gpt", "assistant", "chatgpt", "bard", "bing", "claude", "model", "bot"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "ipython", "function_response"),
}
_CALLS = ("tool_calls", "function_call")  # of a message: said beside its content
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_FOLLOWS = {  # which roles may follow a role
    "start": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# Of seq2seq: the keys of source and target, and what is put before the source.
_PAIRS = (
    ("source", "target", ""),
    ("document", "summary", "Summarize: "),
    ("article", "highlights", "Summarize: "),
    ("en", "de", "Translate English to German: "),
)
_FIRST_ROWS = 16  # of a source, looked at to tell its format


class BrokenRowError(ValueError):
    """A row of a shape that is not understood."""


class UselessRowError(ValueError):
    """A row that is understood and cannot be learnt from."""


@dataclass(frozen=True)
class Conversation:
    """Messages {"role", "content"} (none for plain text), or `text` (None for a chat)."""

    messages: list[dict[str, str]]
    origin: str  # source:line
    text: str | None = None


@dataclass(frozen=True)
class Reject:
    """A row that was skipped, and why."""

    file: str
    line: int
    reason: str
    broken: bool


@dataclass
class Corpus:
    """Conversations in the order of the sources, and the rows that are not among them."""

    conversations: list[Conversation]
    rejects: list[Reject]


def read_conversations(
    sources: Sequence[str], format: str = "auto", limit: int | None = None
) -> Corpus:
    """Read the sources until `limit` conversations are found.

    Raises: DataError for a missing source or too many rejected rows.
    """
    rejects: list[Reject] = []
    return Corpus(list(iterate(sources, format, limit, rejects)), rejects)


def iterate(
    sources: Sequence[str],
    format: str,
    limit: int | None,
    rejects: list[Reject],
    streaming: bool = False,
) -> Iterator[Conversation]:
    """Yield what `read_conversations` returns one by one, keeping only the rejects."""
    found = 0
    for item in _rows(sources, format, streaming):
        if isinstance(item, Reject):
            rejects.append(item)
            continue
        found += 1
        yield item
        if found == limit:
            break
    _check_rejects(found, rejects, sources)


def _rows(sources: Sequence[str], format: str, streaming: bool) -> Iterator[Conversation | Reject]:
    for name in each_source(sources):
        kind, rows = format, Source(name, streaming).rows()
        if format == "auto":
            kind, rows = _detect(name, rows)
        for row in rows:
            yield _read(row, kind)


def split_holdout(data: DataSection) -> tuple[Corpus, list[Conversation]]:
    """Return what may be trained on (`data.limit` at most, in an order that `data.shuffle_seed` may
    draw) and the last `data.holdout` rows."""
    drawn = data.shuffle_seed is not None
    limit = None if data.holdout or drawn else data.limit
    corpus = read_conversations(data.sources, data.format, limit)
    kept = len(corpus.conversations) - data.holdout
    if kept <= 0:
        raise DataError(
            f"data.holdout = {data.holdout} leaves none of the {len(corpus.conversations)} "
            "conversations to train on; lower it"
        )
    held_out = corpus.conversations[kept:] if data.holdout else []
    trained = corpus.conversations[:kept]
    if drawn:
        Random(data.shuffle_seed).shuffle(trained)
    corpus.conversations = trained[: data.limit]
    return corpus, held_out


def parse(value: Any, format: str) -> tuple[list[dict[str, str]], str | None]:
    """Turn one row into (messages, text). Raises BrokenRowError, UselessRowError."""
    if not isinstance(value, dict):
        raise BrokenRowError(f"is {type(value).__name__}, not an object")
    if format == "seq2seq":
        return _usable(_pair(value)), None
    for key in _KEYS[format]:
        if value.get(key) is None:
            keys = shortened(", ".join(value), 300) or "none"
            raise BrokenRowError(f"has no {key!r} (format {format}; keys: {keys})")
    if format == "text":
        if not _string(value["text"], "text").strip():
            raise UselessRowError("empty text")
        return [], value["text"]
    if format == "alpaca":
        question = _string(value["instruction"], "instruction")
        if extra := _string(value.get("input") or "", "input").strip():
            question = f"{question}\n\n{extra}"
        turns = [("user", question), ("assistant", _string(value["output"], "output"))]
    else:
        turns = read_turns(items := value[_KEYS[format][0]])
        if any(item.get(call) for item in items for call in _CALLS):
            raise UselessRowError(f"a turn with {' or '.join(_CALLS)}, which are not rendered")
    return _usable(turns), None


def _pair(value: dict) -> list[tuple[str, str]]:
    """Source and target of a row, as a question and its answer. Raises BrokenRowError."""
    value = value["translation"] if isinstance(value.get("translation"), dict) else value
    for source, target, before in _PAIRS:
        if value.get(source) is not None and value.get(target) is not None:
            asked = before + _string(value[source], source)
            return [("user", asked), ("assistant", _string(value[target], target))]
    known = ", ".join(f"{source} and {target}" for source, target, _ in _PAIRS)
    keys = shortened(", ".join(value), 300) or "none"
    raise BrokenRowError(f"has neither of {known} (format seq2seq; keys: {keys})")


def detect_format(value: Any) -> str | None:
    """Return the format whose keys a row has, or None."""
    if not isinstance(value, dict):
        return None
    return next((f for f in FORMATS if all(value.get(k) is not None for k in _KEYS[f])), None)


def _detect(name: str, rows: Iterable[Row]) -> tuple[str, Iterable[Row]]:
    rows, first = iter(rows), []
    for row in islice(rows, _FIRST_ROWS):
        first.append(row)
        if kind := detect_format(row.value):
            return kind, chain(first, rows)
    problems = [f"line {r.line}: {r.problem or _keys(r.value)}" for r in first[:3]] or ["no rows"]
    raise DataError(
        f"{name}: cannot tell its format ({'; '.join(problems)}); "
        f"set data.format to one of {', '.join(FORMATS)}"
    )


def _keys(value: Any) -> str:
    return f"keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__


def _read(row: Row, kind: str) -> Conversation | Reject:
    try:
        if row.problem:
            raise BrokenRowError(row.problem)
        messages, text = parse(row.value, kind)
    except (BrokenRowError, UselessRowError) as error:
        return Reject(row.source, row.line, str(error), isinstance(error, BrokenRowError))
    return Conversation(messages, f"{row.source}:{row.line}", text)


def _check_rejects(conversations: int, rejects: Sequence[Reject], sources: Sequence[str]) -> None:
    """Refuse sources without a conversation or with too many rejected rows. Raises DataError."""
    rows = conversations + len(rejects)
    if not rows:
        raise DataError(f"no rows in {', '.join(sources)}")
    for broken, share in ((True, BROKEN_SHARE), (False, USELESS_SHARE)):
        such = [reject for reject in rejects if reject.broken == broken]
        if len(such) > share * rows or (not conversations and such):
            first = "; ".join(f"{r.file}:{r.line}: {r.reason}" for r in such[:3])
            what = "cannot be read" if broken else "have nothing to learn from"
            raise DataError(
                f"{len(such)} of {rows} rows {what}, more than {share:.0%}; first: {first}"
            )


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BrokenRowError(f"{name} is {type(value).__name__}, not text")
    try:
        value.encode()  # JSON can escape half a character, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise BrokenRowError(f"{name} is no Unicode text ({error.reason})") from None
    return value


def _text(part: Any, name: str) -> str:
    """Return the text of a message's part. Raises BrokenRowError for other parts, e.g. pictures."""
    if not isinstance(part, dict) or part.get("type") != "text":
        raise BrokenRowError(f"{name} has a part that is not text: {shortened(repr(part), 80)}")
    return _string(part.get("text"), name)


def read_turns(items: Any) -> list[tuple[str, str]]:
    """Return (role, content) of every turn, in our names of roles. Raises BrokenRowError."""
    if not isinstance(items, list):
        raise BrokenRowError(f"the turns are {type(items).__name__}, not a list")
    turns = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise BrokenRowError(f"turn {number} is {type(item).__name__}, not an object")
        name = item.get("from", item.get("role"))
        if not isinstance(name, str) or name.lower() not in _ROLE_OF:
            raise BrokenRowError(f"turn {number} has the unknown role {shortened(repr(name), 80)}")
        content = item.get("value", item.get("content"))
        if isinstance(content, list):  # parts, as OpenAI's messages may have them
            content = "".join(_text(part, f"turn {number}") for part in content)
        turns.append((_ROLE_OF[name.lower()], _string(content, f"turn {number}")))
    return turns


def _usable(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Check the order of turns; drop answers that nothing asked for and questions at the end.

    No system prompt is invented.
    """
    system = [turn for turn in turns[:1] if turn[0] == "system"]
    rest = turns[len(system) :]
    while rest and rest[0][0] == "assistant":  # pages of ShareGPT often begin in the middle
        rest = rest[1:]
    while rest and rest[-1][0] != "assistant":
        rest = rest[:-1]
    if not rest:
        raise UselessRowError("no assistant turn that answers a user")
    before = "start"
    for role, content in rest:
        if not content.strip():
            raise UselessRowError(f"an empty {role} turn")
        if len(content) > LONGEST_TURN:
            told = f"a {role} turn of {len(content):,} characters"
            raise UselessRowError(f"{told}, more than {LONGEST_TURN:,}")
        if role not in _FOLLOWS[before]:
            raise UselessRowError(
                f"a {role} turn after {before}, where {_FOLLOWS[before][0]} belongs"
            )
        before = role
    system = [turn for turn in system if turn[1].strip()]
    return [{"role": role, "content": content} for role, content in system + rest]
