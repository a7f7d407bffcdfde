"""Requests for small Python functions, composed from filters, maps and folds."""

import random
import re

from specdraft.data.world.lexicon import Exchange, say, texts

Phrase = tuple[str, str, str]  # in words, in Python about `x`, short for a function's name


def _phrase(rng: random.Random, part: str, strings: bool, **slots: object) -> Phrase:
    """Draw one of the `conditions` or `maps` over numbers or words."""
    row = rng.choice(texts("functions")[part]["words" if strings else "numbers"])
    in_words, python, short = row.format(**slots).split(" | ")
    return in_words, python, short


def _condition(rng: random.Random, strings: bool) -> Phrase:
    n, letter = rng.randint(2, 20), rng.choice("abcdefghiklmnoprstuw")
    return _phrase(rng, "conditions", strings, n=n, letter=letter)


class Function:
    """One small function: its parts, and the ways to say it in words and in Python."""

    def __init__(self, rng: random.Random) -> None:
        """Draw a condition, a map and a fold over numbers or words, then the names to use."""
        self.strings = rng.random() < 0.4
        self.fold = rng.choice(
            ("list", "list", "count") if self.strings else list(texts("functions")["folds"])
        )
        self.condition = _condition(rng, self.strings)
        mapped = self.fold != "count" and rng.random() < 0.6
        self.map = _phrase(rng, "maps", self.strings, n=rng.randint(2, 9)) if mapped else None
        self.noun = "words" if self.strings else "numbers"
        self.item = rng.choice(("word", "w", "text") if self.strings else ("x", "n", "number"))
        lists = ("words", "items", "texts") if self.strings else ("numbers", "values", "items")
        self.items = rng.choice(lists)
        self.total = rng.choice(texts("functions")["folds"][self.fold]["totals"])
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
        what, kind = texts("functions")["folds"][self.fold]["task"], self.condition[0]
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
        fold = texts("functions")["folds"][self.fold]
        head = f"def {self.name}({self.items}):\n"
        if self.style == "loop":
            update = fold["update"].format(x=value).replace("total", self.total)
            return (
                f"{head}    {self.total} = {fold['start']}\n    for {self.item} in {self.items}:\n"
                f"        if {test}:\n            {update}\n    return {self.total}"
            )
        each = f"{value} for {self.item} in {self.items} if {test}"
        slots = {"each": each, "item": self.item, "items": self.items, "test": test}
        return f"{head}    return {fold['expression'].format(**slots)}"


def _rename(expression: str, item: str) -> str:
    return re.sub(r"\bx\b", item, expression)


def code(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges: a function, then its renaming, rewriting or use."""
    made = Function(rng)
    made.style = rng.choice(("loop", "expression"))
    request = texts("functions")["request"]
    user = say(rng, request, noun=made.noun, task=made.task)
    first = (user, _answer(rng, made))
    follow_ups = rng.sample((_renamed, _restyled, _used), turns - 1)
    return [first, *(follow_up(rng, made) for follow_up in follow_ups)]


def _renamed(rng: random.Random, made: Function) -> Exchange:
    data = texts("functions")
    made.name = f"{rng.choice(data['verbs'])}_{rng.choice(data['nouns'])}"
    return say(rng, data["renaming"], n=made.name), _answer(rng, made)


def _restyled(rng: random.Random, made: Function) -> Exchange:
    """Ask for a loop in place of an expression, or the other way round."""
    made.style = "expression" if made.style == "loop" else "loop"
    return say(rng, texts("functions")["restyling"][made.style]), _answer(rng, made)


def _used(rng: random.Random, made: Function) -> Exchange:
    data = texts("functions")
    user = say(rng, data["usage"])
    if made.strings:
        values = str(rng.sample(data["examples"], 4))
    else:
        values = str([rng.randint(-9, 30) for _ in range(rng.randint(3, 5))])
    if rng.random() < 0.5:
        opening = data["example"]["variable"]
        lines = f"{made.items} = {values}\nprint({made.name}({made.items}))"
    else:
        opening = data["example"]["literal"]
        lines = f"print({made.name}({values}))"
    return user, f"{say(rng, opening)}\n```python\n{lines}\n```"


def _answer(rng: random.Random, made: Function) -> str:
    """The code block, with a sentence after it and sometimes one before it."""
    data = texts("functions")
    before = say(rng, data["before"])
    slots = {"name": made.name, "task": made.task, "items": made.items, "noun": made.noun}
    after = say(rng, data["after"][made.style], **slots)
    block = f"```python\n{made.python}\n```"
    return f"{block}\n{after}" if rng.random() < 0.4 else f"{before}\n{block}\n{after}"
