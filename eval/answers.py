"""The target answers many prompts at once: what data/regenerate.py is handed by an entry."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from accelerate import Accelerator

from specdraft.data.features import Announce, build_features, unannounced
from specdraft.data.online_features import Features, OnlineFeatures
from specdraft.data.regenerate import Answer, Ask
from specdraft.data.server import Server
from specdraft.data.tokens import TokenCache, build_tokens
from specdraft.eval.decoder import Decoder, Request
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe


def answer(target: Target, rows: int, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
    """Decode all asks, `rows` at a time; yield (index, answer) as each is finished."""
    requests = [
        Request(ask.prompt_ids, ask.max_new_tokens, ask.temperature, seed=ask.seed) for ask in asks
    ]
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    for completion in Decoder(target, rows=rows, capacity=capacity).run(requests):
        if completion.error:
            raise completion.error
        yield completion.index, Answer(completion.tokens, ended=completion.reason == "eos")


def build_caches(
    recipe: Recipe, target: Target, accelerator: Accelerator, announce: Announce = unannounced
) -> tuple[TokenCache, Features]:
    """Build, or open, a recipe's token and feature caches; every rank writes its own share.

    With data.features=online there is no feature cache: the target goes on computing them.
    announce: see `build_features`.
    """
    tokens = build_token_cache(recipe, target, accelerator)
    if recipe.data.features == "online":
        return tokens, OnlineFeatures(recipe, tokens, target)
    every = ranks(accelerator)
    return tokens, build_features(recipe, tokens, target, announce=announce, **every)


def build_token_cache(recipe: Recipe, target: Target, accelerator: Accelerator) -> TokenCache:
    """Build, or open, a recipe's token cache; every rank has the target write its own share."""
    if recipe.data.server is None:
        generate = partial(answer, target, recipe.data.batch_rows)
    else:
        generate = Server(recipe, target)
    return build_tokens(recipe, target.tokenizer, generate, target.identity(), **ranks(accelerator))


def ranks(accelerator: Accelerator) -> dict[str, Any]:
    """What the data floor needs to know of the processes: rank, world, barrier."""
    return {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "barrier": accelerator.wait_for_everyone,
    }
