"""The target answers many prompts at once: what data/regenerate.py is handed by an entry."""

from collections.abc import Iterator, Sequence
from functools import partial

from accelerate import Accelerator

from specdraft.data.feature_cache import FeatureCache
from specdraft.data.features import build_features
from specdraft.data.regenerate import Ask
from specdraft.data.tokens import TokenCache, build_tokens
from specdraft.eval.decoder import Decoder, Request
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe


def answer(target: Target, rows: int, asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
    """Decode all asks, `rows` at a time; yield (index, new tokens) as each is finished."""
    requests = [
        Request(ask.prompt_ids, ask.max_new_tokens, ask.temperature, seed=ask.seed) for ask in asks
    ]
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    for completion in Decoder(target, rows=rows, capacity=capacity).run(requests):
        if completion.error:
            raise completion.error
        yield completion.index, completion.tokens


def build_token_cache(recipe: Recipe, target: Target, accelerator: Accelerator) -> TokenCache:
    """Build, or open, a recipe's token cache; every rank writes its own share of the answers."""
    generate = partial(answer, target, recipe.data.batch_rows)
    return build_tokens(
        recipe, target.tokenizer, generate, target.identity(), **_ranks(accelerator)
    )


def build_caches(
    recipe: Recipe, target: Target, accelerator: Accelerator
) -> tuple[TokenCache, FeatureCache]:
    """Build, or open, a recipe's token and feature caches; every rank writes its own share."""
    tokens = build_token_cache(recipe, target, accelerator)
    return tokens, build_features(recipe, tokens, target, **_ranks(accelerator))


def _ranks(accelerator: Accelerator) -> dict:
    return {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "barrier": accelerator.wait_for_everyone,
    }
