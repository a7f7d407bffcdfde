"""What one recipe value may be: strict types, ranges, and errors in the user's words.

A section's annotations are the whole specification (`Count`, `Fraction | None`, `Literal[..]`,
`tuple[str, ...]`), so the checks here are generic and no section repeats them.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from specdraft.recipes.errors import RecipeError


@dataclass(frozen=True)
class Interval:
    """A closed range of allowed numbers; `above` excludes the lower end."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        low_holds = self.low is None or (value > self.low if self.above else value >= self.low)
        return low_holds and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.above else '>='} {self.low:g}")
        if self.high is not None:
            bounds.append(f"<= {self.high:g}")
        return " and ".join(bounds)


Count = Annotated[int, Interval(1)]
Natural = Annotated[int, Interval(0)]
Fraction = Annotated[float, Interval(0, 1)]
Positive = Annotated[float, Interval(0, above=True)]
NonNegative = Annotated[float, Interval(0)]


class InvalidRecipeError(RecipeError):
    """All that is wrong with a recipe, at once; `problems` has one line for each."""

    def __init__(self, problems: Iterable[str], source: str = "recipe") -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            super().__init__(f"{source}: {len(self.problems)} errors{lines}")


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
        return _within(coerce(value, inner), interval)
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
        return value
    raise MismatchError(
        f"must be {_noun(annotation)}, not {_kind(value)}{_hint(value, annotation)}"
    )


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a recipe: checks every field against its annotation, then all together."""

    def __post_init__(self) -> None:
        problems = []
        hints = get_type_hints(type(self), include_extras=True)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, coerce(value, hints[item.name]))
            except MismatchError as mismatch:
                problems.append(self.complaint(item.name, str(mismatch)))
        # Conflicts compare fields, so they mean something only when each field is sound.
        problems = problems or list(self.conflicts())
        if problems:
            raise InvalidRecipeError(problems)

    @classmethod
    def label(cls, key: str) -> str:
        """Return the dotted key a user writes, e.g. `optim.lr` for `OptimSection`."""
        return f"{cls.__name__.removesuffix('Section').lower()}.{key}"

    def conflicts(self) -> Iterator[str]:
        """Yield what is wrong with values that are each allowed, but not together."""
        yield from ()

    def setting(self, key: str) -> str:
        """Return a key with its value, as a user writes them: `optim.betas = [0.9, 0.95]`."""
        return f"{self.label(key)} = {plain(getattr(self, key))!r}"

    def complaint(self, key: str, what: str) -> str:
        """Return what is wrong with the value of a key."""
        return f"{self.setting(key)}: {what}"


def plain(value: Any) -> Any:
    """Return a value with lists for tuples, at any depth, as YAML and JSON have it."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


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
    names = [name for name in allowed if ":" not in name]
    ways = dict.fromkeys(name.partition(":")[2] for name in allowed if ":" in name)
    told = f" (most with :{', :'.join(ways)}, too)" if ways else ""
    raise MismatchError(f"must be one of {', '.join(names)}{told}{guess}")


def _sequence(value: Any, arguments: tuple) -> tuple:
    if not isinstance(value, list | tuple):
        raise MismatchError(f"must be a list, not {_kind(value)}: write [{value}]")
    if arguments[-1] is Ellipsis:
        annotations = (arguments[0],) * len(value)
    elif len(value) == len(arguments):
        annotations = arguments
    else:
        raise MismatchError(f"must have {len(arguments)} entries, not {len(value)}")
    items = []
    for place, (item, annotation) in enumerate(zip(value, annotations, strict=True)):
        try:
            items.append(coerce(item, annotation))
        except MismatchError as mismatch:
            raise MismatchError(f"entry {place} ({item!r}) {mismatch}") from None
    return tuple(items)


def _mapping(value: Any, arguments: tuple) -> dict:
    if not isinstance(value, dict):
        raise MismatchError(f"must be a mapping, not {_kind(value)}")
    entries = {}
    for key, item in value.items():
        # JSON has no other keys than text, and a recipe must come back from it as it was.
        name = str(key) if type(key) is int else key
        try:
            entries[coerce(name, arguments[0])] = coerce(item, arguments[1])
        except MismatchError as mismatch:
            raise MismatchError(f"entry {key!r} ({item!r}) {mismatch}") from None
    return entries


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MismatchError(f"must be a number, not {_kind(value)}{_hint(value, float)}")
    if not math.isfinite(value):
        raise MismatchError("must be a finite number")
    return float(value)


def _within(value: float, interval: Interval) -> float:
    if not interval.holds(value):
        raise MismatchError(f"must be {interval}")
    return value


def _hint(value: Any, annotation: Any) -> str:
    """What to write instead, where that is clear."""
    if annotation is str and value is not None:
        return "; put it in quotes to make it text"
    if annotation is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if annotation is int and number.is_integer():
        return f"; write {int(number)} without quotes"
    if annotation is float and math.isfinite(number):
        return f"; YAML reads {value} as text: write {_yaml_float(value)}"
    return ""


def _yaml_float(text: str) -> str:
    """Spell a number so that YAML 1.1 sees one: a point in the mantissa, a sign in the exponent."""
    mantissa, mark, exponent = text.strip().lower().partition("e")
    if "." not in mantissa:
        mantissa += ".0"
    if mark and exponent[0] not in "+-":
        exponent = f"+{exponent}"
    return f"{mantissa}{mark}{exponent}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _noun(type(value))


def _noun(kind: type) -> str:
    nouns = {
        bool: "true or false",
        int: "a whole number",
        float: "a number with a fraction",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
    }
    return nouns.get(kind, kind.__name__)
