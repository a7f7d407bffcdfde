"""Requests for small Python functions, composed from filters, maps and folds."""

import random
import re

from specdraft.data.world.lexicon import Exchange, say

# Each entry: (in words, in Python about `x`, short name for a function's name)
Phrase = tuple[str, str, str]


def _conditions(rng: random.Random, strings: bool) -> Phrase:
    n = rng.randint(2, 20)
    letter = rng.choice("abcdefghiklmnoprstuw")
    numbers = (
        ("even", "x % 2 == 0", "even"),
        ("odd", "x % 2 == 1", "odd"),
        ("positive", "x > 0", "positive"),
        ("negative", "x < 0", "negative"),
        (f"greater than {n}", f"x > {n}", "large"),
        (f"smaller than {n}", f"x < {n}", "small"),
        (f"divisible by {n}", f"x % {n} == 0", f"div_{n}"),
        (f"not equal to {n}", f"x != {n}", f"not_{n}"),
        (f"at most {n}", f"x <= {n}", f"up_to_{n}"),
    )
    words = (
        (f"longer than {n} letters", f"len(x) > {n}", "long"),
        (f"shorter than {n} letters", f"len(x) < {n}", "short"),
        (f"starting with '{letter}'", f'x.startswith("{letter}")', f"{letter}"),
        (f"ending in '{letter}'", f'x.endswith("{letter}")', f"ending_{letter}"),
        (f"containing '{letter}'", f'"{letter}" in x', f"with_{letter}"),
        ("in upper case", "x.isupper()", "upper"),
        ("that are not empty", "x", "filled"),
    )
    return rng.choice(words if strings else numbers)


def _maps(rng: random.Random, strings: bool) -> Phrase:
    n = rng.randint(2, 9)
    numbers = (
        ("the square of", "x * x", "squares"),
        ("the double of", "2 * x", "doubles"),
        (f"{n} times", f"{n} * x", f"times_{n}"),
        (f"{n} more than", f"x + {n}", f"plus_{n}"),
        (f"{n} less than", f"x - {n}", f"minus_{n}"),
        ("the absolute value of", "abs(x)", "absolute"),
        ("the negative of", "-x", "negated"),
    )
    words = (
        ("the length of", "len(x)", "lengths"),
        ("the first letter of", "x[0]", "initials"),
        ("the upper case form of", "x.upper()", "upper"),
        ("the reverse of", "x[::-1]", "reversed"),
        ("the lower case form of", "x.lower()", "lower"),
        (f"the first {n} letters of", f"x[:{n}]", f"first_{n}"),
    )
    return rng.choice(words if strings else numbers)


# name -> (in words, start value, update of `total` by {x}, expression over "{x} for .. {where}")
FOLDS = {
    "sum": ("the sum", "0", "total += {x}", "sum({each})"),
    "count": ("the number", "0", "total += 1", "sum(1 for {item} in {items} if {test})"),
    "list": ("a list", "[]", "total.append({x})", "[{each}]"),
    "largest": ("the largest", "0", "total = max(total, {x})", "max(({each}), default=0)"),
}
TOTALS = {
    "sum": ("total", "result"),
    "count": ("count", "total"),
    "list": ("result", "found", "kept"),
    "largest": ("best", "largest"),
}
VERBS = ("solve", "pick", "compute", "select", "answer", "helper", "run")
NOUNS = ("items", "data", "list", "all", "these")
EXAMPLES = ("apple", "Tom", "river", "SUN", "a", "lantern", "tea", "moss")


class Function:
    """One small function: its parts, and the ways to say it in words and in Python."""

    def __init__(self, rng: random.Random) -> None:
        """Draw a condition, a map and a fold over numbers or words, then the names to use."""
        self.strings = rng.random() < 0.4
        self.fold = rng.choice(("list", "list", "count") if self.strings else tuple(FOLDS))
        self.condition = _conditions(rng, self.strings)
        mapped = self.fold != "count" and rng.random() < 0.6
        self.map = _maps(rng, self.strings) if mapped else None
        self.noun = "words" if self.strings else "numbers"
        self.item = rng.choice(("word", "w", "text") if self.strings else ("x", "n", "number"))
        lists = ("words", "items", "texts") if self.strings else ("numbers", "values", "items")
        self.items = rng.choice(lists)
        self.total = rng.choice(TOTALS[self.fold])
        self.style = "loop"
        short = self.condition[2]
        names = (
            f"{self.fold}_{short}",
            f"{self.fold}_{short}_{self.noun}",
            f"get_{short}_{self.fold}",
            f"{self.map[2] if self.map else self.fold}_of_{short}",
        )
        self.name = rng.choice(names)

    @property
    def task(self) -> str:
        """What the function returns, in words."""
        what, kind = FOLDS[self.fold][0], self.condition[0]
        phrase = f"{self.noun} {kind}" if " " in kind else f"{kind} {self.noun}"
        if self.map is None:
            return f"{what} of the {phrase}"
        link = "with" if self.fold == "list" else "of"
        return f"{what} {link} {self.map[0]} each of the {phrase}"

    @property
    def python(self) -> str:
        """The function in Python, in the current style: `loop` or `expression`."""
        test = _rename(self.condition[1], self.item)
        value = _rename(self.map[1], self.item) if self.map else self.item
        _, start, update, expression = FOLDS[self.fold]
        head = f"def {self.name}({self.items}):\n"
        if self.style == "loop":
            update = update.format(x=value).replace("total", self.total)
            return (
                f"{head}    {self.total} = {start}\n    for {self.item} in {self.items}:\n"
                f"        if {test}:\n            {update}\n    return {self.total}"
            )
        each = f"{value} for {self.item} in {self.items} if {test}"
        slots = {"each": each, "item": self.item, "items": self.items, "test": test}
        return f"{head}    return {expression.format(**slots)}"


def _rename(expression: str, item: str) -> str:
    return re.sub(r"\bx\b", item, expression)


def code(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges: a function, then its renaming, rewriting or use."""
    made = Function(rng)
    made.style = rng.choice(("loop", "expression"))
    user = say(
        rng,
        "[Write|Please write|I need|Can you write] a [Python function|function in Python|small "
        "Python function] that [takes|gets] a list of {noun} and returns {task}.",
        noun=made.noun,
        task=made.task,
    )
    first = (user, _answer(rng, made))
    follow_ups = rng.sample((_renamed, _restyled, _used), turns - 1)
    return [first, *(follow_up(rng, made) for follow_up in follow_ups)]


def _renamed(rng: random.Random, made: Function) -> Exchange:
    made.name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    user = say(rng, "[Call it|Please rename it to|Rename the function to] {n}.", n=made.name)
    return user, _answer(rng, made)


def _restyled(rng: random.Random, made: Function) -> Exchange:
    """Ask for a loop in place of an expression, or the other way round."""
    made.style = "expression" if made.style == "loop" else "loop"
    way = "[without a loop|in one line|as one expression]"
    if made.style == "loop":
        way = "with [a loop|a plain loop|a for loop]"
    user = say(rng, f"[Now|Can you] [do|write] it {way}?")
    return user, _answer(rng, made)


def _used(rng: random.Random, made: Function) -> Exchange:
    user = say(rng, "[How do I call it|Show me how to use it|Give me an example]?")
    if made.strings:
        values = str(rng.sample(EXAMPLES, 4))
    else:
        values = str([rng.randint(-9, 30) for _ in range(rng.randint(3, 5))])
    if rng.random() < 0.5:
        opening = "[Call it like this|For example|Here is an example|You can use it this way]:"
        lines = f"{made.items} = {values}\nprint({made.name}({made.items}))"
    else:
        opening = "[Call it like this|For example|Like this]:"
        lines = f"print({made.name}({values}))"
    return user, f"{say(rng, opening)}\n```python\n{lines}\n```"


def _answer(rng: random.Random, made: Function) -> str:
    """The code block, with a sentence after it and sometimes one before it."""
    before = say(
        rng, "[Here is the function|Sure|Of course|This should work|You can do it like this]:"
    )
    walk = {
        "loop": "It [goes|loops|walks] through {items} and keeps only the {noun} that pass the "
        "test.",
        "expression": "The expression [filters|goes through] {items} in one line.",
    }
    after = say(
        rng,
        f"[{{name}} returns {{task}}.|{walk[made.style]}|The function returns {{task}}.]",
        name=made.name,
        task=made.task,
        items=made.items,
        noun=made.noun,
    )
    block = f"```python\n{made.python}\n```"
    return f"{block}\n{after}" if rng.random() < 0.4 else f"{before}\n{block}\n{after}"
