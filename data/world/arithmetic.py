"""Arithmetic word problems with small integers, worked step by step."""

import random
from dataclasses import dataclass

from specdraft.data.world.lexicon import (
    NAMES,
    TOWNS,
    WEEKDAYS,
    Exchange,
    pronouns,
    say,
    words,
)

THINGS = words("""
    apples pears nuts coins stamps marbles candles buttons eggs shells books cards beads ribbons
    pencils stones tickets cakes roses bells
""")
PLACES = words("at the market| in the garden| by the river| in the attic| at the fair| in a shop")
LARGEST = 150  # keeps every sum within reach of a very small model


@dataclass(frozen=True)
class Step:
    """One change of the amount: what the problem says and how the solution says it."""

    told: str
    operator: str
    operand: int
    because: str


GAIN = (
    "{He} finds {n} more {place}.",
    "Then {he} buys {n} more {place}.",
    "{friend} gives {him} {n} more.",
    "On {day} {he} picks up {n} more.",
)
LOSS = (
    "{He} gives {n} of them to {friend}.",
    "On the way home {he} loses {n}.",
    "On {day} {he} sells {n} of them.",
    "{n} of them fall into the river.",
)
TIMES = (
    "{He} then [makes|works] all day, and in the evening {he} has {n} times as many.",
    "By magic, the number of {things} becomes {n} times as large.",
)


def _step(rng: random.Random, amount: int, slots: dict[str, object]) -> Step:
    """Draw a change that keeps the amount between 1 and `LARGEST`."""
    kinds = ["gain"] * (amount < LARGEST - 30) + ["loss"] * (amount > 3)
    kinds += ["times"] * (amount <= 20) * (rng.random() < 0.5)
    operator, because, templates, least, most = {
        "gain": ("+", "more", GAIN, 2, 30),
        "loss": ("-", "fewer", LOSS, 1, min(amount - 1, 30)),
        "times": ("*", "times as many", TIMES, 2, 5),
    }[rng.choice(kinds)]
    n = rng.randint(least, most)
    return Step(say(rng, rng.choice(templates), n=n, **slots), operator, n, f"{n} {because}")


def apply(amount: int, operator: str, operand: int) -> int:
    """Return `amount` after one step of arithmetic."""
    return {"+": amount + operand, "-": amount - operand, "*": amount * operand}[operator]


_OPENINGS = {
    "prose": "[{name} starts with {start} {things}.|At first there are {start} {things}.|"
    "We begin with {start} {things}.]",
    "list": "[Let us go step by step|Here are the steps|Step by step], [starting|beginning] with "
    "{start} {things}:",
    "terse": "[Starting|Beginning] with {start}:",
}


def _solve(rng: random.Random, start: int, steps: list[Step], slots: dict[str, object]) -> str:
    """Work the problem step by step in one of several layouts; end with the answer."""
    layout = rng.choice(("prose", "prose", "list", "terse"))
    amount, lines = start, []
    for number, step in enumerate(steps, 1):
        after = apply(amount, step.operator, step.operand)
        sum_ = f"{amount} {step.operator} {step.operand} = {after}"
        if layout == "list":
            lines.append(f"{number}. {step.because.capitalize()}: {sum_}")
        elif layout == "terse":
            lines.append(f"{sum_}{'.' if number == len(steps) else ','}")
        else:
            told = "[Now|Then|Next,|After that|That is {why}, so] {he} has {sum} {things}."
            lines.append(say(rng, told, why=step.because, sum=sum_, **slots))
        amount = after
    opening = say(rng, _OPENINGS[layout], start=start, **slots)
    ending = say(
        rng,
        "[The answer is {n}.|So the answer is {n}.|In the end {name} has {n} {things}. The answer "
        "is {n}.|That makes {n} {things}. The answer is {n}.]",
        n=amount,
        **slots,
    )
    return ("\n" if layout == "list" else " ").join([opening, *lines, ending])


def _people(rng: random.Random) -> dict[str, object]:
    """Draw whom a problem is about, and what they have."""
    name, friend = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    return {"name": name, "friend": friend, "things": things, **pronouns(name).slots()}


def _story(rng: random.Random, turns: int) -> list[Exchange]:
    """A problem about one person's things; follow-ups change the last result."""
    slots = {**_people(rng), "day": rng.choice(WEEKDAYS), "place": rng.choice(PLACES)}
    start = amount = rng.randint(3, 60)
    steps: list[Step] = []
    for _ in range(rng.randint(2, 4)):
        steps.append(_step(rng, amount, slots))
        amount = apply(amount, steps[-1].operator, steps[-1].operand)
    first = say(
        rng,
        "[{name} has {n} {things}.|{name} from {town} owns {n} {things}.|There are {n} {things} in "
        "{name}'s bag.]",
        n=start,
        town=rng.choice(TOWNS),
        **slots,
    )
    asked = say(
        rng,
        "[How many {things} does {name} have now?|How many {things} are there in the end?|How many "
        "{things} are left?|What is the number of {things} now?]",
        **slots,
    )
    question = " ".join([first, *(step.told for step in steps), asked])
    exchanges = [(question, _solve(rng, start, steps, slots))]
    while len(exchanges) < turns:
        more = _step(rng, amount, slots)
        template = "[And then|What if after that|Now suppose that next]: {told} How many is that?"
        user = say(rng, template, told=more.told)
        exchanges.append((user, _solve(rng, amount, [more], slots)))
        amount = apply(amount, more.operator, more.operand)
    return exchanges


def _rows(rng: random.Random) -> Exchange:
    """A problem of the form `a groups of b, minus or plus c`."""
    slots = _people(rng)
    group = rng.choice(("box", "basket", "bag", "row", "chest", "tray"))
    a, b = rng.randint(2, 9), rng.randint(2, 12)
    total = a * b
    operator = rng.choice("+-") if total > 2 else "+"
    c = rng.randint(1, min(total - 1, 30)) if operator == "-" else rng.randint(2, 30)
    slots |= {
        "group": group, "groups": group + ("es" if group == "box" else "s"),
        "a": a, "b": b, "c": c, "t": total, "o": operator, "r": apply(total, operator, c),
        "verb": "takes" if operator == "-" else "adds",
    }  # fmt: skip
    takes, adds = "{friend} takes {c} of them.", "{friend} [brings|adds] {c} more."
    slots["change"] = say(rng, takes if operator == "-" else adds, **slots)
    user = say(
        rng,
        "{name} [fills|packs|counts] {a} {groups} with {b} {things} [each|in every {group}]. "
        "{change} How many {things} [are there now|does {name} have]?",
        **slots,
    )
    answer = say(
        rng,
        "[{a} {groups} of {b} {things} make {a} * {b} = {t} {things}.|First, {a} * {b} = {t}.|"
        "There are {a} {groups} with {b} {things} each, which is {a} * {b} = {t}.] "
        "[{friend} {verb} {c}, so {he} has|Then we have|After {friend} {verb} {c}, there are] "
        "{t} {o} {c} = {r}[| {things}]. [The answer is {r}.|So the answer is {r}.]",
        **slots,
    )
    return user, answer


def math(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges about one word problem."""
    return [_rows(rng)] if turns == 1 and rng.random() < 0.4 else _story(rng, turns)


def final_number(text: str) -> int | None:
    """Return the number after the last "The answer is" of a worked answer, if there is one."""
    _, found, rest = text.lower().rpartition("answer is ")
    digits = rest.split(".")[0].strip() if found else ""
    return int(digits) if digits.isdigit() else None
