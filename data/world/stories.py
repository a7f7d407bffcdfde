"""Short stories from a plot grammar: two friends, a wish, a trouble, a helper, an ending."""

import random

from specdraft.data.world.lexicon import Exchange, article, pronouns, say, texts, words


def _slots(rng: random.Random, one: str, two: str) -> dict[str, object]:
    n1, n2 = rng.sample(words("names"), 2)
    third, thief, helper = rng.sample([a for a in words("animals") if a not in (one, two)], 3)
    traits = rng.sample(texts("stories")["traits"], 3)
    thing, toll, gift, gold = rng.sample(words("objects"), 4)
    hero = rng.random() < 0.5
    speaker, other = (n1, n2) if hero else (n2, n1)
    thing, toll = (f"{rng.choice(words('colours'))} {noun}" for noun in (thing, toll))
    return {
        "a": article(rng.choice(("", f"{traits[0]} ")) + one), "b": article(two),
        "c": article(third), "x1": one, "n1": n1, "n2": n2, "s": speaker, "o": other,
        "his": pronouns(speaker).his, "t1": traits[0], "t2": traits[1], "t3": traits[2],
        "thing": thing, "a_thing": article(thing), "toll": toll, "a_toll": article(toll),
        "gift": gift, "a_gift": article(gift), "a_gold": article(f"golden {gold}"),
        "a_thief": article(thief), "helper": helper, "food": rng.choice(words("foods")),
        "town": rng.choice(words("towns")), "home": rng.choice(words("towns")),
        "season": rng.choice(words("seasons")),
        "find": rng.choice(("find", "look for", "search for")),
    }  # fmt: skip


def _beats(rng: random.Random, troubles: int) -> list[str]:
    """Draw the templates of a plot, in order, without those of the opening and the ending."""
    data = texts("stories")
    beats: list[str] = []
    for trouble in rng.sample(data["troubles"], troubles):
        beats.append(trouble)
        if rng.random() < 0.6:
            beats.append(rng.choice(data["speech"]))
    return [*beats, rng.choice(data["help"])]


def story(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges: a story, a question about it, its continuation."""
    data = texts("stories")
    one, two = rng.sample(words("animals"), 2)
    slots = _slots(rng, one, two)
    asked, wish, success = rng.choice(data["quests"])
    request = f"{data['request']} {asked}[.|, please.]"
    user = say(rng, request, u1=article(one), u2=article(two), **slots)
    slots["wish"] = say(rng, wish, **slots)
    slots["wish"] = slots["wish"][:1].lower() + slots["wish"][1:]
    slots["success"] = success.format(**slots)
    plot = [rng.choice(data["openings"])]
    plot += [rng.choice(data["bonds"])] * (rng.random() < 0.6)
    plot += [
        rng.choice(data["wishes"]),
        *_beats(rng, rng.choice((1, 1, 2))),
        rng.choice(data["endings"]),
    ]
    plot += [rng.choice(data["morals"])] * (rng.random() < 0.7)
    text = " ".join(say(rng, beat, **slots) for beat in plot)
    follow_ups = rng.sample((_continue, _who, _names), turns - 1)
    return [(user, text), *(follow_up(rng, slots, one, two) for follow_up in follow_ups)]


def _continue(rng: random.Random, old: dict[str, object], one: str, two: str) -> Exchange:
    """Ask for what happened next: the same heroes, another trouble."""
    slots = {**_slots(rng, one, two), **{key: old[key] for key in ("n1", "n2", "home", "t1")}}
    slots["s"], slots["o"] = rng.sample((old["n1"], old["n2"]), 2)
    slots["his"] = pronouns(str(slots["s"])).his
    request, opening = texts("stories")["continuation"]
    user = say(rng, request)
    plot = [opening, *_beats(rng, 1), rng.choice(texts("stories")["morals"])]
    return user, " ".join(say(rng, beat, **slots) for beat in plot)


def _who(rng: random.Random, slots: dict[str, object], one: str, two: str) -> Exchange:
    name, animal = rng.choice(((slots["n1"], one), (slots["n2"], two)))
    request, answer = texts("stories")["who"]
    user = say(rng, request, name=name)
    other = slots["n2"] if name == slots["n1"] else slots["n1"]
    return user, say(rng, answer, name=name, x=animal, home=slots["home"], o=other)


def _names(rng: random.Random, slots: dict[str, object], one: str, two: str) -> Exchange:
    request, answer = texts("stories")["names"]
    return say(rng, request), say(rng, answer, one=one, two=two, n1=slots["n1"], n2=slots["n2"])
