"""Small talk of the made-up world: greetings, facts about it, follow-ups and opinions."""

import random

from specdraft.data.world.lexicon import Exchange, article, facts, pronouns, say, texts, words


def question(
    rng: random.Random, kind: str, x: str, attribute: str, follow_up: bool = False
) -> Exchange:
    """Ask for one attribute of `x` and answer from the facts of the world."""
    long, short, answer = texts("chats")["questions"][kind][attribute]
    value = facts()[kind][x][attribute]
    slots = {
        "x": x,
        "X": x.capitalize() if kind == "food" else x,
        "a": article(x),
        "A": article(x).capitalize(),
        "v": article(value) if attribute in ("job", "pet") else value,
        **pronouns(x).slots(),
        "season": rng.choice(words("seasons")),
        "other": rng.choice(words("towns") if kind == "town" else words("names")),
    }
    asked = say(rng, short if follow_up else long, **slots)
    return asked, say(rng, answer, **slots)


def about_entity(rng: random.Random, turns: int) -> list[Exchange]:
    """Ask about one entity; later turns refer to it only by a pronoun."""
    kind = rng.choices(list(facts()), weights=[5, 5, 3, 2])[0]
    x = rng.choice(list(facts()[kind]))
    attributes = rng.sample(list(facts()[kind][x]), min(turns, len(facts()[kind][x])))
    return [question(rng, kind, x, name, n > 0) for n, name in enumerate(attributes)]


def introduce(rng: random.Random) -> Exchange:
    """Greet, with the user's name, town and reason; the answer takes them up."""
    name, town = rng.choice(words("names")), rng.choice(words("towns"))
    about, slots = facts()["town"][town], {"name": name, "town": town}
    greeting, reply = texts("chats")["introduction"]
    user = say(rng, greeting, **slots)
    hello = "[Hello|Hi|Welcome|Good to see you]" + (f", {name}" if name in user else "")
    answer = say(rng, hello + reply, **slots, **about)
    return user, answer


def opinion(rng: random.Random) -> Exchange:
    """Ask which of two things is better; either answer is fine, with a reason."""
    kind, (topic, reason) = rng.choice(list(texts("chats")["opinions"].items()))
    a, b = rng.sample(words(kind), 2)
    if kind == "animals":
        a, b = article(a), article(b)
    user = say(rng, topic, a=a, b=b)
    chosen = rng.choice((a, b))
    before, after = texts("chats")["opinion"]
    other = b if chosen == a else a
    return user, say(rng, f"{before} {reason}{after}", c=chosen, d=other)


def chat(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges of small talk."""
    exchanges: list[Exchange] = []
    if rng.random() < 0.25:
        exchanges.append(introduce(rng))
    if rng.random() < 0.25:
        exchanges.append(opinion(rng))
    if len(exchanges) < turns:
        exchanges += about_entity(rng, turns - len(exchanges))
    return exchanges[:turns]
