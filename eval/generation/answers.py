"""The target answers many prompts at once: what data/regenerate.py is handed by an entry."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from accelerate import Accelerator

from specdraft.data.answers import Answer, Ask, Generate
from specdraft.data.ranks import Ranks
from specdraft.data.server import Server
from specdraft.data.store.feature_builder import Announce, build_features
from specdraft.data.store.feature_cache import Features
from specdraft.data.store.features import OnlineFeatures
from specdraft.data.store.token_builder import build_tokens
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.request import Request
from specdraft.eval.families.support import position_limit
from specdraft.eval.methods.registry import Setup, load_trained, make_drafter
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import say

MakeDrafter = Callable[[int], Drafter | None]  # for rows of so many prompt and new tokens


def answer(
    target: Target, rows: int, asks: Sequence[Ask], make: MakeDrafter = lambda capacity: None
) -> Iterator[tuple[int, Answer]]:
    """Decode all asks, `rows` at a time; yield (index, answer) as each is finished."""
    requests = [
        Request(
            ask.prompt_ids, ask.max_new_tokens, ask.temperature, seed=ask.seed, source=ask.source
        )
        for ask in asks
    ]
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    drafter = make(capacity)
    room, limit = capacity + (drafter.max_nodes if drafter else 0), position_limit(target)
    if limit is not None and room > limit:  # no positions are left for drafts
        drafter, room = None, capacity
    for completion in Decoder(target, drafter, rows, room).run(requests):
        if completion.error:
            raise completion.error
        yield completion.index, Answer(completion.tokens, ended=completion.reason == "eos")


class Answers:
    """Has the target answer, `data.batch_rows` at a time, drafting as `data.drafter` says.

    Decoding is lossless, so a drafter changes how soon answers are there, and nothing else. Called
    with asks, it raises HeadError or TargetError for a drafter that is missing or another target's.
    """

    def __init__(self, recipe: Recipe, target: Target):
        self.recipe, self.target = recipe, target

    def __call__(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        return answer(self.target, self.recipe.data.batch_rows, asks, self._drafter)

    @cached_property
    def trained(self) -> Trained:
        """What the drafter drafts with; only loaded when there is something to answer."""
        data = self.recipe.data
        folder = Path(data.drafter_run or self.recipe.output.dir)
        return load_trained(self.recipe, self.target, [data.drafter], folder)

    def _drafter(self, capacity: int) -> Drafter | None:
        data = self.recipe.data
        setup = Setup(self.recipe, self.target, self.trained, data.batch_rows, capacity)
        return make_drafter(data.drafter, setup)


def build_caches(
    recipe: Recipe, target: Target, accelerator: Accelerator, announce: Announce | None = None
) -> tuple[TokenCache, Features]:
    """Build, or open, a recipe's token and feature caches; every rank writes its own share.

    With data.features=online there is no feature cache: the target goes on computing them.
    announce: see `build_features`.
    """
    target.check_layers(recipe.data.feature_layers)
    tokens = build_token_cache(recipe, target, accelerator)
    if recipe.data.features == "online":
        return tokens, OnlineFeatures(recipe, tokens, target)
    return tokens, build_features(recipe, tokens, target, Ranks.of(accelerator), announce)


def build_token_cache(recipe: Recipe, target: Target, accelerator: Accelerator) -> TokenCache:
    """Build, or open, a recipe's token cache; every rank has the target write its own share."""
    generate = Server if recipe.data.server else Answers
    answers, ranks = within_context(generate(recipe, target), target), Ranks.of(accelerator)
    cache = build_tokens(recipe, target.tokenizer, answers, target.identity(), ranks)
    cache.check_vocabulary(target.vocab_size, target.name)
    if ranks.is_first:
        say(cache.summary())
    return cache


def within_context(generate: Generate, target: Target) -> Generate:
    """Have answers end where the target's positions do, and prompts beyond them fail, and say so.

    Whoever generates might go on, at positions that the target was never trained at.
    """

    def limited(asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        fitting = {}
        for index, ask in enumerate(asks):
            if reason := _too_long(ask, target):
                yield index, Answer([], ended=False, failure=reason)
                continue
            room = target.context - len(ask.prompt_ids)
            fitting[index] = replace(ask, max_new_tokens=min(ask.max_new_tokens, room))
        able = [*fitting]
        for index, answer in generate([*fitting.values()]) if fitting else ():
            yield able[index], answer

    return generate if target.context is None else limited


def _too_long(ask: Ask, target: Target) -> str | None:
    """Why a target has no room for an answer; None where it has."""
    for what, ids, more in (("prompt", ask.prompt_ids, 1), ("source", ask.source, 0)):
        if len(ids) + more > target.context:
            long = f"a {what} of {len(ids)} tokens leaves no room for one"
            return f"{long} in the {target.context} positions of {target.name}"
    return None
