"""Long contexts of the made-up world: a target that reads them, and prompts of given lengths.

The target has the bundled one's weights and a sliding window of as many tokens as rows of its
training mostly had: it is as sure of its answers behind 4,096 tokens as behind none (a perplexity
of 1.44 both), and its features are what they were. (With a window of its longest rows they are not,
for none of its layers has often seen so much at once.) So what changes with the length, when it is
drafted for, is the drafter's doing.

A prompt is one chat, of conversations one behind the other. What is asked last is the same at every
length, and a shorter prompt is the end of a longer one.
"""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, MistralConfig, PreTrainedTokenizerFast

from specdraft.data.world.training import encode
from specdraft.data.world.world import Message, conversation, held_out_prompts
from specdraft.models.target_files import bundled_target_dir

WINDOW = 192  # three rows in four of the bundled conversations are no longer
NEW_TOKENS = 64  # of an answer, which is part of the context
KEPT = ("*.safetensors", "*token*", "*.jinja", "generation_config.json")


def write_windowed(context: int, out: Path) -> None:
    """Write the bundled target with a window, for so many positions, to `out`.

    Llama with a window is Mistral: the weights, by their names, stay as they are.
    """
    source = bundled_target_dir()
    out.mkdir(parents=True, exist_ok=True)
    for file in (file for pattern in KEPT for file in source.glob(pattern)):
        shutil.copyfile(file, out / file.name)
    own = AutoConfig.from_pretrained(source).to_dict()
    shape = {key: value for key, value in own.items() if key not in ("model_type", "architectures")}
    shape |= {"sliding_window": WINDOW, "max_position_embeddings": context}
    MistralConfig(**shape, architectures=["MistralForCausalLM"]).save_pretrained(out)


def context_prompts(
    tokenizer: PreTrainedTokenizerFast, seed: int, per_kind: int, lengths: Sequence[int]
) -> dict[int, list[tuple[str, list[Message]]]]:
    """Return, for every length, (kind, conversation) of the same held-out requests behind as much
    talk as leaves room for an answer of NEW_TOKENS; it ends with a reference answer.

    Of every kind at most `per_kind`: those whose requests fit the shortest length.
    """
    prompts, rng = {length: [] for length in lengths}, random.Random(seed)
    taken: dict[str, int] = {}
    for kind, messages in held_out_prompts(seed, 4 * per_kind):
        asked = len(encode(tokenizer, messages[:-1])[0]) + 1  # with the mark of an answer
        room = {length: length - NEW_TOKENS - asked for length in lengths}
        if min(room.values()) < 0 or taken.get(kind, 0) == per_kind:
            continue
        taken[kind] = taken.get(kind, 0) + 1
        earlier = _earlier(rng, tokenizer, max(room.values()))
        for length in lengths:
            fitting = [one for one, behind in earlier if behind <= room[length]]
            talk = [message for one in reversed(fitting) for message in one]
            prompts[length].append((kind, talk + messages))
    return prompts


def _earlier(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, room: int
) -> list[tuple[list[Message], int]]:
    """Exchanges before a request, the newest first, each with the tokens up to and with it."""
    found, behind = [], 0
    while behind <= room:
        talk = conversation(rng)
        for start in range(len(talk) - 2, -1, -2):
            exchange = talk[start : start + 2]
            behind += len(encode(tokenizer, exchange)[0])
            found.append((exchange, behind))
    return found
