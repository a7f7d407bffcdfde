"""Arithmetic word problems with small integers, worked step by step."""

import random
from dataclasses import dataclass

from specdraft.data.world.lexicon import Exchange, pronouns, say, texts, words

LARGEST = 150  # keeps every sum within reach of a very small model


@dataclass(frozen=True)
class Step:
    """One change of the amount: how the problem tells it and how the solution works it."""

    change: str
    operator: str
    operand: int
    because: str


def _step(rng: random.Random, amount: int, slots: dict[str, object]) -> Step:
    """Draw a change that keeps the amount between 1 and `LARGEST`."""
    kinds = ["gain"] * (amount < LARGEST - 30) + ["loss"] * (amount > 3)
    kinds += ["times"] * (amount <= 20) * (rng.random() < 0.5)
    kind = rng.choice(kinds)
    operator, because, least, most = {
        "gain": ("+", "more", 2, 30),
        "loss": ("-", "fewer", 1, min(amount - 1, 30)),
        "times": ("*", "times as many", 2, 5),
    }[kind]
    n = rng.randint(least, most)
    change = say(rng, rng.choice(texts("arithmetic")[kind]), n=n, **slots)
    return Step(change, operator, n, f"{n} {because}")


def apply(amount: int, operator: str, operand: int) -> int:
    """Return `amount` after one step of arithmetic."""
    return {"+": amount + operand, "-": amount - operand, "*": amount * operand}[operator]


def _solve(rng: random.Random, start: int, steps: list[Step], slots: dict[str, object]) -> str:
    """Work the problem step by step in one of several layouts; end with the answer."""
    data = texts("arithmetic")
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
            lines.append(say(rng, data["prose"], why=step.because, sum=sum_, **slots))
        amount = after
    opening = say(rng, data["openings"][layout], start=start, **slots)
    ending = say(rng, data["ending"], n=amount, **slots)
    return ("\n" if layout == "list" else " ").join([opening, *lines, ending])


def _people(rng: random.Random) -> dict[str, object]:
    """Draw whom a problem is about, and what they have."""
    name, friend = rng.sample(words("names"), 2)
    things = rng.choice(texts("arithmetic")["things"])
    return {"name": name, "friend": friend, "things": things, **pronouns(name).slots()}


def _story(rng: random.Random, turns: int) -> list[Exchange]:
    """A problem about one person's things; follow-ups change the last result."""
    data, slots = texts("arithmetic"), _people(rng)
    slots |= {"day": rng.choice(words("weekdays")), "place": rng.choice(data["places"])}
    start = amount = rng.randint(3, 60)
    steps: list[Step] = []
    for _ in range(rng.randint(2, 4)):
        steps.append(_step(rng, amount, slots))
        amount = apply(amount, steps[-1].operator, steps[-1].operand)
    first = say(rng, data["start"], n=start, town=rng.choice(words("towns")), **slots)
    asked = say(rng, data["question"], **slots)
    question = " ".join([first, *(step.change for step in steps), asked])
    exchanges = [(question, _solve(rng, start, steps, slots))]
    while len(exchanges) < turns:
        more = _step(rng, amount, slots)
        user = say(rng, data["follow_up"], change=more.change)
        exchanges.append((user, _solve(rng, amount, [more], slots)))
        amount = apply(amount, more.operator, more.operand)
    return exchanges


def _rows(rng: random.Random) -> Exchange:
    """A problem of the form `a groups of b, minus or plus c`."""
    data, slots = texts("arithmetic")["rows"], _people(rng)
    group = rng.choice(texts("arithmetic")["groups"])
    a, b = rng.randint(2, 9), rng.randint(2, 12)
    total = a * b
    operator = rng.choice("+-") if total > 2 else "+"
    c = rng.randint(1, min(total - 1, 30)) if operator == "-" else rng.randint(2, 30)
    slots |= {
        "group": group, "groups": group + ("es" if group == "box" else "s"),
        "a": a, "b": b, "c": c, "t": total, "o": operator, "r": apply(total, operator, c),
        "verb": "takes" if operator == "-" else "adds",
    }  # fmt: skip
    slots["change"] = say(rng, data["minus" if operator == "-" else "plus"], **slots)
    return say(rng, data["problem"], **slots), say(rng, data["solution"], **slots)


def math(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges about one word problem."""
    return [_rows(rng)] if turns == 1 and rng.random() < 0.4 else _story(rng, turns)


def final_number(text: str) -> int | None:
    """Return the number after the last "The answer is" of a worked answer, if there is one."""
    _, found, rest = text.lower().rpartition("answer is ")
    digits = rest.split(".")[0].strip() if found else ""
    return int(digits) if digits.isdigit() else None
