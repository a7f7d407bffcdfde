"""The closed world of the bundled target: its words, its facts, and the template language.

Facts (who lives where, what a town bakes) are drawn once with a fixed seed, so that they are the
same in every conversation and a small model can learn them by heart. Everything else is drawn
anew for each conversation.
"""

import random
import re
from functools import cache
from typing import NamedTuple

Exchange = tuple[str, str]  # what the user says, what the assistant answers


def words(text: str) -> list[str]:
    """Split a list written as text: at `|` if there is any, else at white space."""
    return [word.strip() for word in text.split("|" if "|" in text else None)]


NAMES = words("""
    Mara Oskar Lina Tobin Freya Hugo Nadia Piet Selma Arlo Greta Milo Ines Rufus Dora Emil Vera
    Jonas Petra Felix Maud Anton Cleo Bruno Tilda Otto Hanne Leo Rosa Viktor Elsa Kasper
""")
TOWNS = words("""
    Brindle Harrowby Oldmere Pinegate Saltwick Fernholt Larkham Coldbrook Ashdale Tarnby
    Willowford Stonegrave Merrow Duskhill Quillport Redfen Elmstead Northam Galewick Hazelby
    Rookmoor Lowmarsh Sunbury Thornley Wexcombe Ambleton Crowhaven Mistley Barley Foxdale
    Kingsreach Velmont
""")
REGIONS = words("""
    on the north coast| in the green valley| at the foot of the hills| by the long lake|
    on the eastern plain| deep in the forest| near the old border| on a small island
""")
SIZES = words("200 300 400 500 600 700 800 900")  # people of a town
RIVERS = words("Ilm Tarn Wend Osk Lune Brae Sil Marn")
CRAFTS = words("""
    glass lamps| wooden boats| wool blankets| clay pots| copper bells| paper kites|
    leather boots| iron gates| silver spoons| woven baskets| wax candles| stone bridges
""")
FOODS = words("""
    plum cake| barley soup| smoked trout| onion pie| honey bread| pear jam| bean stew|
    goat cheese| apple dumplings| mushroom rice| pepper sausage| walnut biscuits| pumpkin curry|
    lemon pudding| potato pancakes| herb omelette
""")
TASTES = words("sweet salty spicy smoky sour mild rich fresh")
MEALS = words("breakfast| lunch| supper| feast days| long journeys| cold evenings")
MAIN_PARTS = words("flour milk butter herbs eggs garlic cream nuts spices oats")
ANIMALS = words("""
    fox owl hare otter badger goat heron mouse bear wolf crow hedgehog beaver deer frog cat dog
    goose squirrel turtle lynx swan mole pony
""")
DIETS = words("berries fish seeds roots insects grass mice leaves snails acorns")
HOMES = words("""
    in a hollow tree| under the ground| near the water| in the tall grass| among the rocks|
    in old barns| at the edge of the forest| on high cliffs
""")
HABITS = words("""
    sleeps all winter| hunts at night| sings before dawn| swims very well|
    stores food in autumn| runs faster than the wind| hides when it rains| builds clever nests|
    digs long tunnels| watches the moon
""")
JOBS = words("""
    baker teacher carpenter doctor fisher gardener painter miller sailor tailor clockmaker
    shepherd librarian blacksmith postman beekeeper
""")
HOBBIES = words("""
    playing chess| singing in a choir| collecting stamps| climbing hills| growing roses|
    reading old maps| skating on the lake| writing letters| carving spoons| watching birds|
    flying kites| playing the flute
""")
COLOURS = words("red blue green yellow white black grey brown golden silver")
OBJECTS = words("""
    lantern key map bell kite basket mirror drum ladder coin letter hat book rope boat clock
    ring flute cup umbrella box stone feather scarf
""")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SEASONS = words("spring summer autumn winter")

FEMALE = frozenset(NAMES[0::2])  # the list alternates, so a pronoun follows from the name


class Pronouns(NamedTuple):
    """The pronouns of a person: "she", "her" (object) and "her" (possessive)."""

    he: str
    him: str
    his: str

    def slots(self) -> dict[str, object]:
        """Return them as the slots of a template, with `He` to begin a sentence."""
        return {**self._asdict(), "He": self.he.capitalize()}


def pronouns(name: str) -> Pronouns:
    """Return the pronouns of a person of `NAMES`."""
    return Pronouns("she", "her", "her") if name in FEMALE else Pronouns("he", "him", "his")


def article(noun: str) -> str:
    """Return `noun` behind its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def say(rng: random.Random, template: str, **slots: object) -> str:
    """Expand every `[a|b|c]` of `template` (innermost first) to one option, then fill `{slots}`.

    >>> say(random.Random(0), "[Hello|Hello], {name}.", name="Mara")
    'Hello, Mara.'
    """
    while (match := _CHOICE.search(template)) is not None:
        chosen = rng.choice(match[1].split("|"))
        template = template[: match.start()] + chosen + template[match.end() :]
    text = template.format(**slots)
    return text[:1].upper() + text[1:]


# kind -> (its entities, attribute -> the values that one is drawn from)
_ATTRIBUTES = {
    "town": (
        TOWNS,
        {"region": REGIONS, "river": RIVERS, "craft": CRAFTS, "food": FOODS, "people": SIZES},
    ),
    "person": (
        NAMES,
        {"job": JOBS, "town": TOWNS, "hobby": HOBBIES, "pet": ANIMALS, "food": FOODS},
    ),
    "animal": (ANIMALS, {"diet": DIETS, "home": HOMES, "habit": HABITS}),
    "food": (FOODS, {"taste": TASTES, "meal": MEALS, "part": MAIN_PARTS}),
}


@cache
def facts() -> dict[str, dict[str, dict[str, str]]]:
    """Return the facts of the world: kind -> entity -> attribute -> value. The same every time."""
    rng = random.Random(20)
    return {
        kind: {
            entity: {name: rng.choice(values) for name, values in attributes.items()}
            for entity in entities
        }
        for kind, (entities, attributes) in _ATTRIBUTES.items()
    }
