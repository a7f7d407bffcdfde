"""Short stories from a plot grammar: two friends, a wish, a trouble, a helper, an ending."""

import random

from specdraft.data.world import lexicon
from specdraft.data.world.lexicon import Exchange, article, pronouns, say, words

TRAITS = words("brave shy clever lazy hungry kind proud curious tired cheerful grumpy patient")

# What they set out to do: (as the user puts it, how the story says it, how it ends well)
QUESTS = (
    ("{find} {a_thing}", "[wanted|wished|hoped] to find {a_thing}", "held the {thing} at last"),
    ("lose {a_thing}", "had lost {a_thing} and missed it", "found the {thing} under a bush"),
    ("build a boat", "[decided|planned] to build a boat", "sailed their boat down the river"),
    ("cook {food}", "[wanted|tried] to cook {food}", "shared the {food} with everyone"),
    ("travel to {town}", "[set out|packed their bags] for {town}", "saw the roofs of {town}"),
    ("repair {a_thing}", "had to repair {a_thing}", "made the {thing} as good as new"),
    ("win a race", "wanted to win the great race", "crossed the line side by side"),
    ("guard {a_thing}", "had promised to guard {a_thing}", "kept the {thing} safe"),
    ("meet the king", "[wanted|hoped] to meet the king", "bowed before the king"),
    ("plant a garden", "[began|decided] to plant a garden", "picked the first flowers"),
)
OPENINGS = (
    "[Once upon a time|Long ago|One {season}|Many years ago], {a} [named|called] {n1} and {b} "
    "[named|called] {n2} lived [near|in|not far from] {home}.",
    "[In|Near] {home} there lived {a} and {b}. [Their names were|Everybody called them] {n1} and "
    "{n2}.",
    "{n1} was {a}, and {n2} was {b}. [They lived together in|Both lived close to] {home}.",
)
BONDS = (
    "{n1} was {t1}, but {n2} was {t2}.",
    "They were [good friends|the best of friends|neighbours], [though|even if] {n1} was "
    "sometimes {t1}.",
    "{n1} was the most {t1} {x1} [in the land|for miles around], and {n2} was {t2}.",
    "People said that {n1} was {t1} and that {n2} was even more {t2}.",
)
WISHES = (
    "One [morning|day|evening|{season} day] they {wish}.",
    "[That year|That {season}|Before long], the two {wish}.",
    "[It happened|So it came] that {n1} and {n2} {wish}.",
)
TROUBLES = (
    "But a [storm|thick fog|cold rain] came up, and they [lost their way|could not see the path|"
    "had to hide in a cave].",
    "On the way they met {c}, who [blocked|guarded] the [bridge|road|gate] and wanted {a_toll}.",
    "Then {n1} fell into [a hole|the river|a ditch], and {n2} [called for help|did not know what "
    "to do].",
    "{n2} [grew|became] {t3} and [wanted to go home|sat down on a stone|would not take another "
    "step].",
    "[Soon|But then] they [quarrelled|argued] about {a_toll}, and [neither|nobody] said a word "
    "until [noon|sunset].",
    "At night {a_thief} stole their {toll} and [ran|slipped] away into the dark.",
)
SPEECH = (
    '"[Do not worry|Be brave|Wait for me|Trust me]," said {s}, "[I have a plan|I know the way|we '
    'will manage|two are stronger than one]."',
    '"[What shall we do|How can we go on|Who can help us]?" asked {s}. "[Let us wait|Let us try '
    'again|Let us sing|Let us ask the {helper}]," said {o}.',
    '{s} [whispered|shouted|laughed]: "[Look|Listen], there is [a light|a voice|smoke] [behind the '
    'trees|over the hill|by the water]!"',
)
HELP = (
    "[Luckily|To their surprise|Just then], an old {helper} came by and [gave|lent] them {a_gift}.",
    "{s} remembered the {gift} in {his} pocket and used it [to light the way|to make a bridge|to "
    "open the door|as a rope].",
    "An old {helper} [heard|saw] them and [showed them the way|told them a secret|shared some "
    "{food}].",
    "{s} [dug|climbed|swam|searched] until [midnight|dawn], and [at last|finally] it [worked|was "
    "done].",
)
ENDINGS = (
    "[In the end|At last|Finally] they {success}.",
    "[When the sun rose|Three days later|Before winter came], {n1} and {n2} {success}.",
    "And so {n1} and {n2} {success}.",
)
MORALS = (
    "[From that day on|Ever after], {n1} was never {t1} again.",
    "They [went home|walked back to {home}] and ate {food} [until they fell asleep|by the fire].",
    "And [whenever|every time] it [rains|snows|thunders] in {home}, people [tell|remember] this "
    "story.",
    "[Since then|Today] {n1} and {n2} share everything[|, even the {gift}].",
    "They learned that [patience|courage|friendship|a kind word] is worth more than {a_gold}.",
)


def _slots(rng: random.Random, one: str, two: str) -> dict[str, object]:
    n1, n2 = rng.sample(lexicon.NAMES, 2)
    third, thief, helper = rng.sample([a for a in lexicon.ANIMALS if a not in (one, two)], 3)
    traits = rng.sample(TRAITS, 3)
    thing, toll, gift, gold = rng.sample(lexicon.OBJECTS, 4)
    hero = rng.random() < 0.5
    speaker, other = (n1, n2) if hero else (n2, n1)
    thing, toll = (f"{rng.choice(lexicon.COLOURS)} {noun}" for noun in (thing, toll))
    return {
        "a": article(rng.choice(("", f"{traits[0]} ")) + one), "b": article(two),
        "c": article(third), "x1": one, "n1": n1, "n2": n2, "s": speaker, "o": other,
        "his": pronouns(speaker).his, "t1": traits[0], "t2": traits[1], "t3": traits[2],
        "thing": thing, "a_thing": article(thing), "toll": toll, "a_toll": article(toll),
        "gift": gift, "a_gift": article(gift), "a_gold": article(f"golden {gold}"),
        "a_thief": article(thief), "helper": helper, "food": rng.choice(lexicon.FOODS),
        "town": rng.choice(lexicon.TOWNS), "home": rng.choice(lexicon.TOWNS),
        "season": rng.choice(lexicon.SEASONS),
        "find": rng.choice(("find", "look for", "search for")),
    }  # fmt: skip


def _beats(rng: random.Random, troubles: int) -> list[str]:
    """Draw the templates of a plot, in order, without those of the opening and the ending."""
    beats: list[str] = []
    for trouble in rng.sample(TROUBLES, troubles):
        beats.append(trouble)
        if rng.random() < 0.6:
            beats.append(rng.choice(SPEECH))
    return [*beats, rng.choice(HELP)]


def story(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges: a story, a question about it, its continuation."""
    one, two = rng.sample(lexicon.ANIMALS, 2)
    slots = _slots(rng, one, two)
    asked, wish, success = rng.choice(QUESTS)
    user = say(
        rng,
        "[Tell me a story|Tell a story|Write a short story|Can you tell me a story] about {u1} and "
        "{u2} who " + asked + "[.|, please.]",
        u1=article(one), u2=article(two), **slots,
    )  # fmt: skip
    slots["wish"] = say(rng, wish, **slots)
    slots["wish"] = slots["wish"][:1].lower() + slots["wish"][1:]
    slots["success"] = success.format(**slots)
    plot = [rng.choice(OPENINGS)]
    plot += [rng.choice(BONDS)] * (rng.random() < 0.6)
    plot += [rng.choice(WISHES), *_beats(rng, rng.choice((1, 1, 2))), rng.choice(ENDINGS)]
    plot += [rng.choice(MORALS)] * (rng.random() < 0.7)
    told = " ".join(say(rng, beat, **slots) for beat in plot)
    follow_ups = rng.sample((_continue, _who, _names), turns - 1)
    return [(user, told), *(follow_up(rng, slots, one, two) for follow_up in follow_ups)]


def _continue(rng: random.Random, old: dict[str, object], one: str, two: str) -> Exchange:
    """Ask for what happened next: the same heroes, another trouble."""
    slots = {**_slots(rng, one, two), **{key: old[key] for key in ("n1", "n2", "home", "t1")}}
    slots["s"], slots["o"] = rng.sample((old["n1"], old["n2"]), 2)
    slots["his"] = pronouns(str(slots["s"])).his
    asked = "[What happened next|And then|How does it go on|Please continue the story][?|.]"
    user = say(rng, asked)
    plot = ["[The next day|A week later|In the {season}], {n1} and {n2} met again in {home}."]
    plot += [*_beats(rng, 1), rng.choice(MORALS)]
    return user, " ".join(say(rng, beat, **slots) for beat in plot)


def _who(rng: random.Random, slots: dict[str, object], one: str, two: str) -> Exchange:
    name, animal = rng.choice(((slots["n1"], one), (slots["n2"], two)))
    user = say(rng, "[Who was|Tell me again, who was|And who is] {name}?", name=name)
    answer = (
        "{name} [was|is] the {x} [in|of] the story[|, who lived in {home}|, the friend of {o}]."
    )
    other = slots["n2"] if name == slots["n1"] else slots["n1"]
    return user, say(rng, answer, name=name, x=animal, home=slots["home"], o=other)


def _names(rng: random.Random, slots: dict[str, object], one: str, two: str) -> Exchange:
    asked = "[What were their names|What were the two called|Remind me of the names][?|, please.]"
    answer = (
        "[The {one} was [named|called] {n1} and the {two} was [named|called] {n2}.|They were "
        "{n1} the {one} and {n2} the {two}.]"
    )
    return say(rng, asked), say(rng, answer, one=one, two=two, n1=slots["n1"], n2=slots["n2"])
