"""Passages to summarise, list, change or ask about: answers copy from the prompt."""

import random

from specdraft.data.world import lexicon
from specdraft.data.world.lexicon import Exchange, article, pronouns, say

LEADS = (
    "[Last|On] {day}, {name} the {job} opened a new [shop|school|museum|bridge|market] in {town}.",
    "A [big|small|strange] fair took place in {town} on {day}.",
    "The people of {town} found {a_thing} in the river {river} on {day}.",
    "{name}, {a_job} from {town}, lost {a_thing} on {day}.",
    "A storm hit the town of {town} on {day} and broke {n1} windows.",
    "The {job} {name} from {town} won a prize of {n1} coins on {day}.",
)
DETAILS = (
    "About {n2} people came to [see it|watch|help].",
    "{friend} [brought|sold|gave away] {n3} baskets of {food}.",
    "The work took {n3} days and cost {n2} coins.",
    "{a_animal} [ran through the crowd|slept through everything|stole some {food}].",
    "{friend} from {other} said that {n3} of the {craft} were [gone|broken|new].",
    "The mayor gave {friend} {a_gift} as a [present|reward|souvenir].",
    "In the evening there was {food} for everyone.",
    "A boat with {n2} {craft} arrived from {other}.",
    "{friend} played the flute for {n3} hours.",
    "[The oldest guest|The first visitor] was {n1} years old.",
    "The {animal} of {friend} wore {a_gift}.",
    "Nobody [was hurt|knew why|had expected it], but {friend} [wept|laughed|was silent] for "
    "{n3} minutes.",
)
CLOSINGS = (
    "The next meeting will be in {other} in {season}.",
    "{name} hopes to do it again in {season}.",
    "Now everyone in {town} is [happy|tired|waiting for news].",
    "The town will pay {n1} coins for it.",
)


class Passage:
    """A passage of 4 to 8 sentences; what can be exchanged in it is kept in `slots`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        name, friend = rng.sample(lexicon.NAMES, 2)
        town, other = rng.sample(lexicon.TOWNS, 2)
        thing, gift = rng.sample(lexicon.OBJECTS, 2)
        job, animal = rng.choice(lexicon.JOBS), rng.choice(lexicon.ANIMALS)
        thing, gift = (f"{rng.choice(lexicon.COLOURS)} {noun}" for noun in (thing, gift))
        self.slots = {
            "name": name, "friend": friend, "town": town, "other": other, "job": job,
            "a_job": article(job), "thing": thing, "a_thing": article(thing),
            "a_gift": article(gift), "animal": animal, "a_animal": article(animal),
            "food": rng.choice(lexicon.FOODS), "craft": rng.choice(lexicon.CRAFTS),
            "river": rng.choice(lexicon.RIVERS),
            "day": rng.choice(lexicon.WEEKDAYS), "season": rng.choice(lexicon.SEASONS),
            "n1": str(rng.randint(11, 99)), "n2": str(rng.randint(100, 999)),
            "n3": str(rng.randint(2, 10)), "he": pronouns(name).he,
        }  # fmt: skip
        details = rng.sample(DETAILS, rng.randint(2, 5))
        templates = [rng.choice(LEADS), *details, rng.choice(CLOSINGS)]
        self.sentences = [say(rng, template, **self.slots) for template in templates]

    @property
    def text(self) -> str:
        """The whole passage."""
        return " ".join(self.sentences)

    def change(self) -> tuple[str, str]:
        """Draw one thing the text mentions and something else of its kind to put in its place."""
        kinds = {
            "name": lexicon.NAMES, "friend": lexicon.NAMES, "town": lexicon.TOWNS,
            "other": lexicon.TOWNS, "food": lexicon.FOODS, "day": lexicon.WEEKDAYS,
            "craft": lexicon.CRAFTS,
        }  # fmt: skip
        present = [kind for kind in kinds if self.slots[kind] in self.text]
        kind = self.rng.choice(present)
        taken = set(self.slots.values())
        return self.slots[kind], self.rng.choice([w for w in kinds[kind] if w not in taken])


def _repeat(rng: random.Random, passage: Passage) -> Exchange:
    """Repeat the passage with one word exchanged."""
    old, new = passage.change()
    user = say(
        rng,
        "[Repeat|Copy|Write down] the [text|passage], but [change {old} to {new}|write {new} "
        "instead of {old}|replace {old} with {new}].",
        old=old,
        new=new,
    )
    opening = say(rng, "[|Here is the new text: |With {new}: |Of course: ]", new=new)
    return user, opening + passage.text.replace(old, new)


def _list(rng: random.Random, passage: Passage) -> Exchange:
    """List some of the facts, in the words of the passage, in their order."""
    count = rng.randint(2, min(4, len(passage.sentences)))
    chosen = sorted(rng.sample(range(len(passage.sentences)), count))
    number = ("", "", "two", "three", "four")[count]
    bullet = rng.choice(("- ", "* ", "1"))
    lines = [
        f"{f'{n + 1}. ' if bullet == '1' else bullet}{passage.sentences[i]}"
        for n, i in enumerate(chosen)
    ]
    user = say(rng, "[List|Write down|Name|Give me] {n} facts from the [text|passage].", n=number)
    opening = say(
        rng, "[Here are {n} facts|{n} facts from the text|These are {n} facts]:", n=number
    )
    return user, "\n".join([opening, *lines])


def _summarise(rng: random.Random, passage: Passage) -> Exchange:
    """Summarise in two sentences: the lead and one detail, under a short frame."""
    lead, detail = passage.sentences[0], rng.choice(passage.sentences[1:-1])
    slots = passage.slots
    user = say(
        rng,
        "[Summarise the [text|passage|news] in two sentences.|Give me a short summary.|What is the "
        "[text|passage] about, in short?]",
    )
    frame = "[|In short: |The text says: |It is about {town}. ]"
    rest = "[|| Also, the end says that this is not all.| The rest tells of {friend}.]"
    if slots["town"] not in passage.text:
        frame = "[|In short: |The text says: ]"
    if slots["friend"] not in passage.text:
        rest = "[||| The rest is about smaller things.]"
    return user, f"{say(rng, frame, **slots)}{lead} {detail}{say(rng, rest, **slots)}"


def _ask(rng: random.Random, passage: Passage) -> Exchange:
    """Ask which sentence mentions something; answer by quoting it."""
    keys = ("friend", "n1", "n2", "n3", "other", "food", "day", "town")
    pairs = [
        (passage.slots[key], sentence)
        for key in keys
        for sentence in passage.sentences
        if passage.slots[key] in sentence.replace(".", " ").split()
    ]
    if not pairs:
        return _summarise(rng, passage)
    word, _ = rng.choice(pairs)
    first = next(sentence for found, sentence in pairs if found == word)
    user = say(
        rng,
        "[What does the text say about {w}|Which sentence mentions {w}|Where does the text mention "
        "{w}]?",
        w=word,
    )
    frame = "[It says: |The text says: |The first sentence with {w} is: |Here it is: ]"
    return user, f'{say(rng, frame, w=word)}"{first}"'


def retell(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges about one passage; the first holds the passage."""
    passage = Passage(rng)
    tasks = rng.sample((_repeat, _list, _summarise, _ask), turns)
    (user, answer), *rest = [task(rng, passage) for task in tasks]
    if rng.random() < 0.5:
        user = f"{user}\n\n{passage.text}"
    else:
        opening = say(rng, "[Here is a text|Read this|Text|A piece of news]: ")
        user = f"{opening}{passage.text}\n\n{user}"
    return [(user, answer), *rest]
