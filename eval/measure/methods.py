"""The ways of decoding that are measured side by side: prompts in, tokens out.

Ours run in the one decoder, transformers' own in `model.generate` (eval/measure/hf_generate.py).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from specdraft.eval.drafters.cascade import CascadeDrafter
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.padded import PADDINGS, PaddedDecoder
from specdraft.eval.engine.request import GUMBEL, Request, Update, accepting
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.hf_generate import Generate
from specdraft.eval.measure.outcome import DecodingMethod, Outcome
from specdraft.eval.methods.registry import Setup, find, make_drafter, rule_of, way_of
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import Recipe


class Engine:
    """Our decoder, with or without a drafter, or the vanilla padded form of it.

    `rule` is how requests that sample are accepted, whatever they say themselves.
    """

    def __init__(self, decoder: Decoder, rule: str = GUMBEL):
        self.decoder, self.rule = decoder, rule

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        decoder, drafter = self.decoder, self.decoder.drafter
        decoder.timing = Timing()
        before = _spent(drafter)
        began = time.perf_counter()
        with torch.inference_mode():
            ended = [update.completion for update in self.stream(requests) if update.completion]
        seconds = time.perf_counter() - began
        completions = sorted(ended, key=lambda done: done.index)
        for done in completions:
            if done.error:
                raise done.error
        *passes, spent = (b - a for a, b in zip(before, _spent(drafter), strict=True))
        return Outcome(completions, seconds, decoder.timing, tuple(passes), spent)

    def stream(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Decode a batch step by step."""
        if isinstance(self.decoder, PaddedDecoder):
            self.decoder.packed.begin(len(requests))
        return self.decoder.stream(replace(request, rule=self.rule) for request in requests)


def _spent(drafter: Drafter | None) -> tuple[float, ...]:
    """Passes of each model of a drafter so far, and the seconds that they took together."""
    if drafter is None:
        return (0.0,)
    passes = drafter.passes if isinstance(drafter, CascadeDrafter) else [drafter.forwards]
    return (*passes, drafter.seconds)


def make_method(
    name: str, recipe: Recipe, target: Target, trained: Trained, capacity: int
) -> DecodingMethod:
    """Build a method for `eval.batch_size` rows; `capacity` holds a prompt and its answer.

    METHOD:dynamic is the same engine; whoever calls it hands over all requests at once.
    Raises RecipeError for an unknown method, or one without what it drafts with.
    """
    method, way = find(name), way_of(name)
    rows = recipe.eval.batch_size
    setup = Setup(recipe, target, trained, rows, capacity)
    if not method.is_ours:
        method.check(trained)
        return Generate(target, **method.generate(setup))
    drafter, rule = make_drafter(name, setup), rule_of(name, recipe)
    known = accepting(drafter.rules if drafter else RULES)
    if recipe.eval.temperature > 0 and rule not in known:
        raise RecipeError(
            f"eval.acceptance = {rule}: cannot verify the drafts of {name}; allowed: "
            f"{', '.join(known)}; change it, or leave {name} out"
        )
    room = capacity + (drafter.max_nodes if drafter else 0)
    if way not in PADDINGS:
        return Engine(Decoder(target, drafter, rows, room), rule)
    # Aligned caches grow by what the luckiest row accepts: at worst by the sum over rows.
    room += (rows - 1) * recipe.eval.max_new_tokens
    return Engine(PaddedDecoder(target, drafter, rows, room, *PADDINGS[way]), rule)
