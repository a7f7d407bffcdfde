"""Requests for small Python functions, composed from filters, maps and folds."""

import random

from specdraft.data.world_lexicon import say

Exchange = tuple[str, str]

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


# name -> (in words, start value, update of `total` with {x}, expression over a generator {gen})
FOLDS = {
    "sum": ("the sum", "0", "total += {x}", "sum({gen})"),
    "count": ("the number", "0", "total += 1", "sum(1 for {x} in {items}{where})"),
    "list": ("a list", "[]", "total.append({x})", "[{gen}]"),
    "largest": ("the largest", "0", "total = max(total, {x})", "max(({gen}), default=0)"),
}


class Function:
    """One small function: its parts, and the ways to say it in words and in Python."""

    def __init__(self, rng: random.Random) -> None:
        """Draw the parts: a condition, a map and a fold, over numbers or words."""
        self.rng = rng
        self.strings = rng.random() < 0.4
        self.fold = rng.choice(("list", "list", "count") if self.strings else tuple(FOLDS))
        self.condition = _conditions(rng, self.strings)
        mapped = self.fold != "count" and rng.random() < 0.6
        self.map = _maps(rng, self.strings) if mapped else None
        self.noun = "words" if self.strings else "numbers"
        self.rename()

    def rename(self) -> None:
        """Draw the names used in the code."""
        rng = self.rng
        short = self.condition[2]
        self.item = rng.choice(("word", "w", "text") if self.strings else ("x", "n", "number"))
        self.items = rng.choice(
            ("words", "items", "texts") if self.strings else ("numbers", "values", "items")
        )
        self.total = {"list": ("result", "found", "kept"), "sum": ("total", "result"),
                      "count": ("count", "total"), "largest": ("best", "largest")}[self.fold]
        self.total = rng.choice(self.total)
        self.name = rng.choice(
            (f"{self.fold}_{short}", f"{self.fold}_{short}_{self.noun}", f"get_{short}_{self.fold}",
             f"{self.map[2] if self.map else self.fold}_of_{short}")
        )

    @property
    def task(self) -> str:
        """Say what the function returns."""
        what, kind = FOLDS[self.fold][0], self.condition[0]
        phrase = f"{self.noun} {kind}" if " " in kind else f"{kind} {self.noun}"
        if self.map is None:
            return f"{what} of the {phrase}" if self.fold != "largest" else f"{what} of the {phrase}"
        return f"{what} of {self.map[0]} each of the {phrase}" if self.fold != "list" else (
            f"a list with {self.map[0]} each of the {phrase}"
        )

    def code(self, style: str, name: str | None = None) -> str:
        """Write the function: style `loop` or `expression`."""
        test = self.condition[1].replace("x", self.item) if self.condition[1] == "x" else (
            _rename(self.condition[1], self.item)
        )
        value = _rename(self.map[1], self.item) if self.map else self.item
        _, start, update, expression = FOLDS[self.fold]
        head = f"def {name or self.name}({self.items}):\n"
        if style == "loop":
            update = update.format(x=value).replace("total", self.total)
            return (
                f"{head}    {self.total} = {start}\n    for {self.item} in {self.items}:\n"
                f"        if {test}:\n            {update}\n    return {self.total}"
            )
        where = f" if {test}"
        gen = f"{value} for {self.item} in {self.items}{where}"
        expression = expression.format(gen=gen, x=self.item, items=self.items, where=where)
        return f"{head}    return {expression}"


def _rename(expression: str, item: str) -> str:
    """Put `item` for the variable `x` of an expression (`x` is never part of another word)."""
    import re

    return re.sub(r"\bx\b", item, expression)


def code(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges: a function, then its renaming, rewriting or explanation."""
    made = Function(rng)
    style = rng.choice(("loop", "expression"))
    user = say(
        rng,
        "[Write|Please write|I need|Can you write] a [Python function|function in Python|small "
        "Python function] that [takes|gets] a list of {noun} and returns {task}.",
        noun=made.noun, task=made.task,
    )
    answer = _answer(rng, made, style, made.name)
    exchanges, name = [(user, answer)], made.name
    for follow_up in rng.sample(("rename", "style", "use"), turns - 1):
        if follow_up == "rename":
            name = rng.choice(("solve", "pick", "compute", "select", "answer", "helper", "run")) + (
                f"_{rng.choice(('items', 'data', 'list', 'all', 'these'))}"
            )
            user = say(rng, "[Call it|Please rename it to|Rename the function to] {n}.", n=name)
        elif follow_up == "style":
            style = "expression" if style == "loop" else "loop"
            user = say(
                rng,
                "[Now|Can you] [do|write] it [without a loop|in one line|as one expression]?"
                if style == "expression"
                else "[Now|Can you] [do|write] it with [a loop|a plain loop|a for loop]?",
            )
        else:
            user = say(rng, "[How do I call it|Show me how to use it|Give me an example]?")
            values = _example(rng, made)
            call = f"{name}({values})"
            exchanges.append(
                (user, say(rng, "[Call it like this|For example|Here is an example|You can use it "
                           "this way]:\n```python\n", ) + f"{made.items} = {values}\n"
                 f"print({name}({made.items}))\n```" if rng.random() < 0.5 else
                 say(rng, "[Call it like this|For example|Like this]:\n```python\n")
                 + f"print({call})\n```")
            )
            continue
        exchanges.append((user, _answer(rng, made, style, name)))
    return exchanges


def _example(rng: random.Random, made: Function) -> str:
    """Write a list literal to call the function with."""
    if made.strings:
        return str(rng.sample(("apple", "Tom", "river", "SUN", "a", "lantern", "tea", "moss"), 4))
    return str([rng.randint(-9, 30) for _ in range(rng.randint(3, 5))])


def _answer(rng: random.Random, made: Function, style: str, name: str) -> str:
    """The code block, with one sentence before or after it."""
    block = f"```python\n{made.code(style, name)}\n```"
    slots = {"name": name, "task": made.task, "items": made.items, "kind": made.condition[0],
             "noun": made.noun}
    before = say(rng, "[Here is the function|Sure|Of course|This should work|You can do it like "
                 "this]:", **slots)
    walk = ("It [goes|loops|walks] through {items} and keeps only the {noun} that pass the test."
            if style == "loop" else "The expression [filters|goes through] {items} in one line.")
    after = say(rng, "[{name} returns {task}.|" + walk + "|The function returns {task}.]", **slots)
    return f"{block}\n{after}" if rng.random() < 0.4 else f"{before}\n{block}\n{after}"
