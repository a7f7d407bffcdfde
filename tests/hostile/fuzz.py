"""Corrupt inputs: recipes, trees, targets, heads, caches, rows, answers of a server."""

import json
import shutil
from pathlib import Path
from random import Random

import yaml
from commands import ROOT
from local_server import LocalServer
from mangle import odd, odd_json, spoilt
from place import Place
from verdict import refused_or_fine

from specdraft.data.answers import Ask
from specdraft.data.server import Server
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.token_builder import build_tokens
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.generation.chat import Chat
from specdraft.eval.methods.registry import load_trained, problems
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.models.weights.checksums import SUMS
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.recipes.static_trees import load_tree_paths, tree_block_size

CHATS = [
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I am."}]},
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I am fine."}]},
    {"instruction": "Say it.", "input": "", "output": "It, and nothing else, is what I say."},
    {"text": "A text of some words that goes on for a while, and then ends."},
]


def a_recipe(random: Random, folder: Path, place: Place) -> str | None:
    text = random.choice(sorted((ROOT / "recipes").glob("*.yaml"))).read_bytes()
    if random.random() < 0.5:
        text = yaml.safe_dump(odd(yaml.safe_load(text), random)).encode("utf-8", "replace")
    else:
        text = spoilt(text, random)
    (path := folder / "mine.yaml").write_bytes(text)
    return refused_or_fine(lambda: load_recipe(path, check=problems))


def a_tree(random: Random, folder: Path, place: Place) -> str | None:
    text = random.choice(sorted((ROOT / "recipes" / "trees").glob("*.yaml"))).read_bytes()
    if random.random() < 0.5:
        text = yaml.safe_dump(odd(yaml.safe_load(text), random)).encode("utf-8", "replace")
    else:
        text = spoilt(text, random)
    (path := folder / "mine.yaml").write_bytes(text)
    found = refused_or_fine(lambda: load_tree_paths(str(path)))
    return found or refused_or_fine(lambda: tree_block_size(str(path)))


def a_target(random: Random, folder: Path, place: Place) -> str | None:
    """A small target that is asked a question."""
    here = shutil.copytree(bundled_target_dir(), folder / "target")
    path = random.choice([path for path in sorted(here.iterdir()) if path.suffix != ".md"])
    path.write_bytes((odd_json if path.suffix == ".json" else spoilt)(path.read_bytes(), random))
    data, train = {"sources": ["tiny"]}, {"steps": 1}
    sections = {"target": {"model": str(here)}, "data": data, "train": train}
    recipe = from_dict({"name": "a", **sections})

    def ask() -> None:
        talk = Chat(recipe, Target.of_recipe(recipe.target), "plain")
        steps, _ = talk.ask("Who are you?")
        next(iter(steps))

    return refused_or_fine(ask)


def a_head(random: Random, folder: Path, place: Place) -> str | None:
    """The checksums match the corrupt files, as an attacker would make them."""
    run = shutil.copytree(place.run / "falcon", folder / "run" / "falcon").parent
    (run / "falcon" / SUMS).unlink()
    path = run / "falcon" / random.choice(["config.json", "config.json", "model.safetensors"])
    change = odd_json if path.suffix == ".json" else spoilt
    path.write_bytes(change(path.read_bytes(), random))
    return refused_or_fine(lambda: load_trained(place.recipe, place.target, ["falcon_chain"], run))


def a_cache(random: Random, folder: Path, place: Place) -> str | None:
    kind, opened = random.choice([("tokens", TokenCache), ("features", FeatureCache)])
    (there,) = place.cache.glob(f"{kind}-*")
    here = shutil.copytree(there, folder / there.name)
    path = random.choice(sorted(path for path in here.iterdir() if path.is_file()))
    path.write_bytes((odd_json if path.suffix == ".json" else spoilt)(path.read_bytes(), random))

    def read() -> None:
        cache = opened.open(here)
        for number in range(len(cache)):
            cache[number]

    return refused_or_fine(read)


def rows(random: Random, folder: Path, place: Place) -> str | None:
    lines = []
    for _ in range(random.randrange(1, 12)):
        line = json.dumps(odd(random.choice(CHATS), random) if random.random() < 0.6 else CHATS[0])
        lines.append(spoilt(line.encode(), random) if random.random() < 0.2 else line.encode())
    name = random.choice(["a.jsonl", "a.jsonl", "a.json", "a.txt"])
    (folder / name).write_bytes(b"\n".join(lines))
    data = {"sources": [str(folder / name)], "cache_dir": str(folder / "cache")}
    recipe = from_dict({"name": "rows", "data": data, "train": {"steps": 1}})
    return refused_or_fine(lambda: build_tokens(recipe, place.target.tokenizer))


def answers(random: Random, folder: Path, place: Place) -> str | None:
    choice = {"index": 0, "text": "I am.", "finish_reason": "stop", "token_ids": [9, 8, 7, 0]}
    body = {"choices": [choice], "usage": {"prompt_tokens": 3}}
    with LocalServer(place.target.tokenizer) as server:
        server.raw["Who"] = odd_json(json.dumps(body).encode(), random)
        data = {"sources": ["tiny"], "answers": "target", "retries": 0}
        data |= {"server": server.url, "server_model": "parrot"}
        recipe = from_dict({"name": "answers", "data": data, "train": {"steps": 1}})
        ids = place.target.tokenizer.encode("Who are you?", add_special_tokens=False)

        def ask() -> None:
            ((_, answer),) = Server(recipe, place.target)([Ask(ids, 8, 0.0, 0)])
            assert len(answer.tokens) <= 8
            assert all(type(n) is int and 0 <= n < 1024 for n in answer.tokens)

        return refused_or_fine(ask)


KINDS = (a_recipe, a_tree, a_head, a_cache, rows, answers, a_target)


def fuzz(number: int, folder: Path, place: Place) -> tuple[int, str | None]:
    """Try the input of a number; return what is wrong with how it was handled."""
    return 1, KINDS[number % len(KINDS)](Random(f"fuzz {number}"), folder, place)
