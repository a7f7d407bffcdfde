"""What one recipe value may be: strict types, ranges, and errors in the user's words.

A section's annotations are the whole specification (`Count`, `Fraction | None`, `Literal[..]`,
`tuple[str, ...]`), so the checks here are generic and no section repeats them.
"""

import difflib
import math
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from specdraft.recipes.credentials import PLACES, holds_credentials, redacted
from specdraft.recipes.errors import RecipeError

LARGEST_TREE = 4096  # nodes of a draft, which a target reads at once
LONGEST_CONTEXT = 8  # tokens that a Max-Gram table looks back
# Shown of what is wrong, in characters and lines.
LONGEST_VALUE, LONGEST_LINE, LONGEST_MESSAGE, MOST_LINES = 120, 800, 3600, 16


@dataclass(frozen=True)
class Interval:
    """A closed range of allowed numbers; `above` excludes the lower end, `or_zero` allows 0."""

    low: float
    high: float
    above: bool = False
    or_zero: bool = False

    def __contains__(self, value: float) -> bool:
        inside = self.low <= value <= self.high and not (self.above and value == self.low)
        return inside or (self.or_zero and value == 0)

    def __str__(self) -> str:
        zero = "0, or " if self.or_zero else ""
        return f"{zero}{'>' if self.above else '>='} {self.low} and <= {self.high}"


# Every number has an upper end, one that nobody will miss.
Count = Annotated[int, Interval(1, 10**9)]  # rows, steps
Natural = Annotated[int, Interval(0, 10**9)]
Tokens = Annotated[int, Interval(1, 10**7)]  # of a context or an answer
Rows = Annotated[int, Interval(1, 2**13)]  # of a step of training
Width = Annotated[int, Interval(1, 10**6)]  # of a layer
Few = Annotated[int, Interval(1, 1000)]  # layers, rows decoded at once, threads
Draft = Annotated[int, Interval(1, 256)]  # tokens drafted one after the other, or side by side
Seed = Annotated[int, Interval(0, 2**31 - 1)]  # every generator takes these
Fraction = Annotated[float, Interval(0, 1)]
Share = Annotated[float, Interval(0, 1, above=True)]
Positive = Annotated[float, Interval(0, 10**6, above=True)]
NonNegative = Annotated[float, Interval(0, 10**6)]
Factor = Annotated[float, Interval(1, 10**6)]
Temperature = Annotated[float, Interval(0.01, 100)]
Sampling = Annotated[float, Interval(0.01, 100, or_zero=True)]  # temperature; 0: greedy


class InvalidRecipeError(RecipeError):
    """All that is wrong with a recipe, at once; `problems` has one line for each."""

    def __init__(self, problems: Iterable[str], source: str = "recipe") -> None:
        near = (redacted(shortened(line, 16 * LONGEST_LINE)) for line in problems)
        self.problems = tuple(shortened(line, LONGEST_LINE) for line in near)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
            return
        lengths = accumulate(map(len, self.problems))
        count = sum(length <= LONGEST_MESSAGE for length in islice(lengths, MOST_LINES))
        lines = [*self.problems[:count]]
        if more := len(self.problems) - count:
            lines.append(f"and {more} more")
        super().__init__("\n  ".join([f"{source}: {len(self.problems)} errors", *lines]))


class MismatchError(ValueError):
    """A value that its annotation does not allow; the text says what is allowed."""


def coerce(value: Any, annotation: Any) -> Any:
    """Return `value` as its annotation wants it (int to float, list to tuple).

    Strict otherwise: a bool is no int, a float no int, a text no number.
    Raises: MismatchError, which says what is allowed.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, interval = arguments
        if (number := coerce(value, inner)) not in interval:
            raise MismatchError(f"must be {interval}")
        return number
    if origin in (Union, types.UnionType):
        return _union(value, arguments)
    if origin is Literal:
        return _choice(value, arguments)
    if origin is tuple:
        return _sequence(value, arguments)
    if origin is dict:
        return _mapping(value, arguments)
    if annotation is float:
        return _number(value)
    if isinstance(value, bool) is (annotation is bool) and isinstance(value, annotation):
        return _printable(value) if annotation is str else value
    raise MismatchError(
        f"must be {_noun(annotation)}, not {_kind(value)}{_hint(value, annotation)}"
    )


def coerce_fields(instance: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a dataclass's values as annotated, and what is wrong with the others; by field."""
    values, mismatches = {}, {}
    for key, annotation in get_type_hints(type(instance), include_extras=True).items():
        try:
            values[key] = coerce(getattr(instance, key), annotation)
        except MismatchError as mismatch:
            mismatches[key] = str(mismatch)
    return values, mismatches


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a recipe: checks every field against its annotation, then all together."""

    def __post_init__(self) -> None:
        values, mismatches = coerce_fields(self)
        vars(self).update(values)  # a frozen dataclass takes no assignments
        problems = [self.complaint(key, mismatch) for key, mismatch in mismatches.items()]
        # Conflicts compare fields, so they mean something only when each field is sound.
        problems = problems or list(self.conflicts())
        if problems:
            raise InvalidRecipeError(problems)

    def conflicts(self) -> Iterator[str]:
        """Yield what is wrong with values that are each allowed, but not together."""
        yield from ()

    @property
    def prefix(self) -> str:
        """What a user writes before a key: `optim.`."""
        return f"{type(self).__name__.removesuffix('Section').lower()}."

    def complaint(self, keys: str | Iterable[str], what: str) -> str:
        """Return what is wrong with the values of keys, named as a user writes them:
        `optim.betas = [0.9, 0.95]: ..`."""
        keys = [keys] if isinstance(keys, str) else keys
        settings = [f"{self.prefix}{key} = {shown(getattr(self, key))}" for key in keys]
        return f"{' and '.join(settings)}: {what}"


def plain(value: Any) -> Any:
    """Return a value with lists for tuples, at any depth, as YAML and JSON have it."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def shown(value: Any) -> str:
    """Return a value as a message shows it: a long one is cut, and a credential left out."""
    # Of a huge one, what is not far from what can be seen is searched for credentials.
    return shortened(redacted(shortened(repr(plain(value)), 64 * LONGEST_VALUE)), LONGEST_VALUE)


def shortened(text: str, most: int) -> str:
    """Return a text, cut in its middle to about `most` characters."""
    half = most // 2
    if len(text) <= most:
        return text
    return f"{text[:half]} .. {len(text) - 2 * half} more characters .. {text[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like `name` (difflib's ratio)."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def _union(value: Any, options: tuple) -> Any:
    if value is None and types.NoneType in options:
        return None
    mismatches = []
    for option in (option for option in options if option is not types.NoneType):
        try:
            return coerce(value, option)
        except MismatchError as mismatch:
            mismatches.append(str(mismatch))
    null = " (or null)" if types.NoneType in options else ""
    raise MismatchError(f"{', or '.join(mismatches)}{null}")


def _choice(value: Any, allowed: tuple) -> Any:
    if isinstance(value, str) and value in allowed:
        return value
    guess = f"; nearest is {nearest(value, allowed)}" if isinstance(value, str) else ""
    raise MismatchError(f"must be one of {', '.join(allowed)}{guess}")


def _sequence(value: Any, arguments: tuple) -> tuple:
    if not isinstance(value, list | tuple):
        raise MismatchError(
            f"must be a list, not {_kind(value)}: write [{shortened(str(value), LONGEST_VALUE)}]"
        )
    if arguments[-1] is Ellipsis:
        annotations = (arguments[0],) * len(value)
    elif len(value) == len(arguments):
        annotations = arguments
    else:
        raise MismatchError(f"must have {len(arguments)} entries, not {len(value)}")
    parts = enumerate(zip(value, annotations, strict=True))
    return tuple(_entry(place, item, item, annotation) for place, (item, annotation) in parts)


def _mapping(value: Any, arguments: tuple) -> dict:
    if not isinstance(value, dict):
        raise MismatchError(f"must be a mapping, not {_kind(value)}")
    entries = {}
    for key, item in value.items():
        # JSON has no other keys than text, and a recipe must come back from it as it was.
        text = str(key) if type(key) is int else key
        name = _entry(key, item, text, arguments[0])
        entries[name] = _entry(key, item, item, arguments[1])
    return entries


def _entry(place: Any, item: Any, part: Any, annotation: Any) -> Any:
    """Coerce a part of an entry, its key or its item; a mismatch names the entry."""
    try:
        return coerce(part, annotation)
    except MismatchError as mismatch:
        raise MismatchError(f"entry {shown(place)} ({shown(item)}) {mismatch}") from None


def _printable(text: str) -> str:
    """Refuse what no file name and no UTF-8 holds: a NUL, half of a surrogate pair; and secrets."""
    if re.search("[\0\ud800-\udfff]", text):
        raise MismatchError("must be text without NUL and without lone surrogates")
    if holds_credentials(text):
        raise MismatchError(f"must hold no credentials; these are read elsewhere: {PLACES}")
    return text


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MismatchError(f"must be a number, not {_kind(value)}{_hint(value, float)}")
    try:
        number = float(value)
    except OverflowError:  # of a whole number with hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise MismatchError("must be a finite number")
    return number


def _hint(value: Any, annotation: Any) -> str:
    """What to write instead, where that is clear and short."""
    if annotation is str and value is not None:
        return "; put it in quotes to make it text"
    if not isinstance(value, str | float) or len(str(value)) > 20:
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if annotation is int and number.is_integer():
        return f"; write {number:.0f}" + (" without quotes" if isinstance(value, str) else "")
    if annotation is float and math.isfinite(number):
        return f"; write {value.strip()} without quotes"
    return ""


def _kind(value: Any) -> str:
    return _noun(type(value))


def _noun(kind: type) -> str:
    nouns = {
        types.NoneType: "null",
        bool: "true or false",
        int: "a whole number",
        float: "a number with a fraction",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
    }
    return nouns.get(kind, kind.__name__)
