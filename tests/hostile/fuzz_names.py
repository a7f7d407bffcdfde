"""Invalid names, folders, overrides and data patterns, as a user may type them.

    PYTHONPATH=tests python tests/hostile/fuzz_names.py 1000 [FIRST]

Nothing uses the network: huggingface_hub runs offline. tests/hostile/test_names.py runs a short
part of it.
"""

import os
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

from mangle import SCALARS, odd_json, spoilt
from verdict import refused_or_fine

from specdraft.data.chat import read_conversations
from specdraft.eval.methods.registry import problems
from specdraft.eval.methods.trained import CARDS
from specdraft.models.publish import contents
from specdraft.models.published import find_drafter
from specdraft.recipes.find import KINDS
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

SECTIONS = Recipe.sections()
NAMES = ["tiny", "own", "tiny_eagle", ".", "..", "/", "", "~", "you/head", "a/b/c", "-", "--help"]
NAMES += ["x" * 300, "tiny.yaml", "recipes", "*", "[", "tiny\0", "\ud800", "you/", "/dev/null"]
TEXTS = ["1", "null", "true", "[]", "{}", "[1,2", "{a: b}", "1e999", "-3", "'", "\0", "&a [*a]"]
TEXTS += ["!!python/name:os.system x", "x" * 5000, "[plain,falcon_tree]", "~", "\ud800", ".nan"]


def a_name(random: Random, folder: Path) -> str | None:
    """A name, or one with a character too many."""
    name = random.choice(NAMES)
    if random.random() < 0.5:
        at = random.randrange(len(name) + 1)
        name = name[:at] + random.choice("/.\0*?[]{}~ é\n:=") + name[at:]
    return _all_of(name)


def an_override(random: Random, folder: Path) -> str | None:
    """Keys of a recipe, or nearly, with values that do not fit."""
    overrides = []
    for _ in range(random.randrange(1, 4)):
        section = random.choice([*SECTIONS, "nothing", ""])
        keys = [item.name for item in fields(SECTIONS[section])] if section in SECTIONS else ["x"]
        key = random.choice([*keys, "", "a.b"])
        value = random.choice([*TEXTS, *map(str, SCALARS)])
        overrides.append(random.choice([f"{section}.{key}={value}", f"{section}={value}", value]))
    recipe = random.choice(["tiny", "own", "tiny_distill", "tiny_medusa", "tiny_cascade"])
    return refused_or_fine(lambda: load_recipe(recipe, overrides, check=problems))


def a_run(random: Random, folder: Path) -> str | None:
    """The folder of a run with parts missing, corrupt or duplicated."""
    run = folder / random.choice(["run", "falcon", "recipe.yaml", "table"])
    recipe = (Path(__file__).parents[2] / "recipes" / "tiny.yaml").read_bytes()
    config = b'{"block_size": 3, "fusion": "linear", "hidden_size": 128, "vocab_size": 2048}'
    for place in (run, *(run / kind for kind in random.sample([*KINDS, "head"], 2))):
        place.mkdir(parents=True, exist_ok=True)
        for name, content in {"recipe.yaml": recipe, "config.json": config}.items():
            how = random.randrange(4)
            if how == 1:
                (place / name).mkdir(exist_ok=True)
            elif how > 1:
                change = odd_json if name == "config.json" else spoilt
                (place / name).write_bytes(content if how == 2 else change(content, random))
    return _all_of(str(random.choice([run, *sorted(run.iterdir())])))


def some_data(random: Random, folder: Path) -> str | None:
    """Patterns, folders and links as data."""
    there = folder / "chats"
    there.mkdir()
    for name in ("a.jsonl", "b.json", "[c].jsonl", ".d.jsonl"):
        (there / name).write_bytes(random.choice([b"", b"[", b'{"text": "some words"}\n', b"\xff"]))
    (there / "loop").symlink_to(there)
    name = random.choice(["", "*", "**", "[", "a.jsonl", "[c].jsonl", "loop", "?.json*", "\0", "{"])
    return refused_or_fine(lambda: read_conversations([f"{there}/{name}"]))


def _all_of(name: str) -> str | None:
    """Everything that takes a name: a recipe, a push, a drafter."""

    def push() -> None:
        recipe = load_recipe(name, ["hub.repo_id=you/x"], check=problems)
        contents(recipe, CARDS[recipe.kind])

    found = (refused_or_fine(call) for call in (push, lambda: find_drafter(name)))
    return next(filter(None, found), None)


WAYS = (a_name, an_override, a_run, some_data)


def fuzz(number: int, folder: Path) -> str | None:
    """Try the input of a number; return what is wrong with how it was handled."""
    return WAYS[number % len(WAYS)](Random(f"names {number}"), folder)


def main() -> None:
    count, first = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    wrong = 0
    with TemporaryDirectory() as top:
        for number in range(first, first + count):
            (folder := Path(top) / str(number)).mkdir()
            if found := fuzz(number, folder):
                wrong += 1
                sys.stdout.write(f"{number} ({WAYS[number % len(WAYS)].__name__}): {found}\n")
            shutil.rmtree(folder)
    sys.stdout.write(f"{count} inputs, {wrong} wrong\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
