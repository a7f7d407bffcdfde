"""Passages to summarise, list, change or ask about: answers copy from the prompt."""

import random

from specdraft.data.world.lexicon import Exchange, article, pronouns, say, texts, words


class Passage:
    """A passage of 4 to 7 sentences; what can be exchanged in it is kept in `slots`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        name, friend = rng.sample(words("names"), 2)
        town, other = rng.sample(words("towns"), 2)
        thing, gift = rng.sample(words("objects"), 2)
        job, animal = rng.choice(words("jobs")), rng.choice(words("animals"))
        thing, gift = (f"{rng.choice(words('colours'))} {noun}" for noun in (thing, gift))
        self.slots = {
            "name": name, "friend": friend, "town": town, "other": other, "job": job,
            "a_job": article(job), "thing": thing, "a_thing": article(thing),
            "a_gift": article(gift), "animal": animal, "a_animal": article(animal),
            "food": rng.choice(words("foods")), "craft": rng.choice(words("crafts")),
            "river": rng.choice(words("rivers")),
            "day": rng.choice(words("weekdays")), "season": rng.choice(words("seasons")),
            "n1": str(rng.randint(11, 99)), "n2": str(rng.randint(100, 999)),
            "n3": str(rng.randint(2, 10)), "he": pronouns(name).he,
        }  # fmt: skip
        data = texts("retelling")
        details = rng.sample(data["details"], rng.randint(2, 5))
        templates = [rng.choice(data["leads"]), *details, rng.choice(data["closings"])]
        self.sentences = [say(rng, template, **self.slots) for template in templates]

    @property
    def text(self) -> str:
        """The whole passage."""
        return " ".join(self.sentences)

    def change(self) -> tuple[str, str]:
        """Draw one thing the text mentions and something else of its kind to put in its place."""
        kinds = {
            "name": words("names"), "friend": words("names"), "town": words("towns"),
            "other": words("towns"), "food": words("foods"), "day": words("weekdays"),
            "craft": words("crafts"),
        }  # fmt: skip
        present = [kind for kind in kinds if self.slots[kind] in self.text]
        kind = self.rng.choice(present)
        taken = set(self.slots.values())
        return self.slots[kind], self.rng.choice([w for w in kinds[kind] if w not in taken])


def _repeat(rng: random.Random, passage: Passage) -> Exchange:
    """Repeat the passage with one word exchanged."""
    old, new = passage.change()
    request, opening = texts("retelling")["repeat"]
    user = say(rng, request, old=old, new=new)
    return user, say(rng, opening, new=new) + passage.text.replace(old, new)


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
    request, opening = texts("retelling")["list"]
    user = say(rng, request, n=number)
    return user, "\n".join([say(rng, opening, n=number), *lines])


def _summarise(rng: random.Random, passage: Passage) -> Exchange:
    """Summarise in two sentences: the lead and one detail, under a short frame."""
    lead, detail = passage.sentences[0], rng.choice(passage.sentences[1:-1])
    slots, data = passage.slots, texts("retelling")["summary"]
    user = say(rng, data["request"])
    frame = data["before_town" if slots["town"] in passage.text else "before"]
    rest = data["after_friend" if slots["friend"] in passage.text else "after"]
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
    request, frame = texts("retelling")["ask"]
    user = say(rng, request, w=word)
    return user, f'{say(rng, frame, w=word)}"{first}"'


TASKS = {"repeat": _repeat, "list": _list, "summary": _summarise, "ask": _ask}


def retell(rng: random.Random, turns: int) -> list[Exchange]:
    """Return up to `turns` exchanges about one passage; the first holds the passage."""
    passage = Passage(rng)
    tasks = rng.sample([*TASKS.values()], turns)
    (user, answer), *rest = [task(rng, passage) for task in tasks]
    return [(_with(rng, passage, user), answer), *rest]


def retell_once(rng: random.Random, task: str) -> Exchange:
    """Return one exchange, of one of the `TASKS`, that holds its passage."""
    passage = Passage(rng)
    user, answer = TASKS[task](rng, passage)
    return _with(rng, passage, user), answer


def _with(rng: random.Random, passage: Passage, user: str) -> str:
    """A request with its passage before or after it."""
    if rng.random() < 0.5:
        return f"{user}\n\n{passage.text}"
    opening = say(rng, texts("retelling")["introduction"])
    return f"{opening} {passage.text}\n\n{user}"
