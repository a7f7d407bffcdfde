"""The closed world of the bundled target: its words, its facts, and the template language.

Facts (who lives where, what a town bakes) are drawn once with a fixed seed, so that they are the
same in every conversation and a small model can learn them by heart. Everything else is drawn
anew for each conversation. The words and the templates of each kind of talk are in the YAML files
beside this one.
"""

import random
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Exchange = tuple[str, str]  # what the user says, what the assistant answers


@cache
def texts(name: str) -> dict[str, Any]:
    """Return what `name`.yaml beside this file holds, not to be written into.

    A block of text in it is the list of its lines.
    """
    path = Path(__file__).with_name(f"{name}.yaml")
    return _blocks_as_lists(yaml.safe_load(path.read_text(encoding="utf-8")))


def _blocks_as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _blocks_as_lists(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_blocks_as_lists(inner) for inner in value]
    return value.splitlines() if isinstance(value, str) and "\n" in value else value


def words(kind: str) -> list[str]:
    """Return the words of a kind, such as "names" or "towns", in their order."""
    return texts("lexicon")["words"][kind]


class Pronouns(NamedTuple):
    """The pronouns of a person: "she", "her" (object) and "her" (possessive)."""

    he: str
    him: str
    his: str

    def slots(self) -> dict[str, object]:
        """Return them as the slots of a template, with `He` to begin a sentence."""
        return {**self._asdict(), "He": self.he.capitalize()}


def pronouns(name: str) -> Pronouns:
    """Return the pronouns of a person: women's and men's names alternate."""
    female = name in words("names")[::2]
    return Pronouns("she", "her", "her") if female else Pronouns("he", "him", "his")


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


@cache
def facts() -> dict[str, dict[str, dict[str, str]]]:
    """Return the facts of the world: kind -> entity -> attribute -> value. The same every time."""
    rng = random.Random(20)
    return {
        kind: {
            entity: {name: rng.choice(words(of)) for name, of in described["attributes"].items()}
            for entity in words(described["entities"])
        }
        for kind, described in texts("lexicon")["kinds"].items()
    }
