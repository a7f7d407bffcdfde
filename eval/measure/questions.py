"""From prompts to requests: turns played out, so that all methods see the same, lengths and seeds.

The history of a later turn (MT-bench, Spec-Bench) is what plain decoding of the target answers,
with the settings and the seed of the measured run: the very answer that `plain` and every lossless
method give to the turn before, unless lengths are spread.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from specdraft.data.prompts import Prompt, next_turn
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import EvalSection, Recipe


def expand_turns(recipe: Recipe, target: Target, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt per turn, those of a question one after the other.

    Raises: DataError for a prompt that the target has no positions for.
    """
    for prompt in prompts:
        _check_context(prompt, recipe.eval.max_new_tokens, target)
    played = [[prompt] for prompt in prompts]
    first = [0, *accumulate(1 + len(prompt.later) for prompt in prompts)]  # place among all turns
    while waiting := [n for n, turns in enumerate(played) if turns[-1].later]:
        numbered = ((played[n][-1], first[n] + len(played[n]) - 1) for n in waiting)
        length = recipe.eval.max_new_tokens
        requests = [make_request(recipe.eval, *prompt, length) for prompt in numbered]
        for n, answer in zip(waiting, _answers(recipe, target, requests), strict=True):
            turn = next_turn(recipe, target.tokenizer, played[n][-1], answer)
            _check_context(turn, length, target)
            played[n].append(turn)
    return [prompt for turns in played for prompt in turns]


def _check_context(prompt: Prompt, answer: int, target: Target) -> None:
    length, turn = len(prompt.input_ids), f" (turn {prompt.turn})" if prompt.turn > 1 else ""
    if target.context is not None and length + answer > target.context:
        raise DataError(
            f"prompt {prompt.id}{turn} has {length} tokens and eval.max_new_tokens = {answer}: "
            f"{target.name} has a context of {target.context}; leave it out, or lower "
            "eval.max_new_tokens"
        )


def _answers(recipe: Recipe, target: Target, requests: list[Request]) -> list[str]:
    capacity = max(len(request.prompt) for request in requests) + recipe.eval.max_new_tokens
    decoder = Decoder(target, rows=recipe.eval.batch_size, capacity=capacity)
    done = sorted(decoder.run(requests), key=lambda completion: completion.index)
    texts = target.tokenizer.batch_decode([d.tokens for d in done], skip_special_tokens=True)
    return [text.strip() for text in texts]


def make_requests(settings: EvalSection, prompts: Sequence[Prompt]) -> list[Request]:
    """One request per prompt, each with its own seed; spread lengths are log-uniform, shuffled."""
    lengths = [settings.max_new_tokens] * len(prompts)
    if settings.spread > 1:
        steps = max(len(prompts) - 1, 1)
        lengths = [round(n * settings.spread ** (-i / steps)) for i, n in enumerate(lengths)]
        random.Random(settings.seed).shuffle(lengths)
    return [
        make_request(settings, prompt, number, max(length, 1))
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def make_request(settings: EvalSection, prompt: Prompt, number: int, length: int) -> Request:
    """Return the request of a prompt with the settings of a recipe and a seed of its own."""
    return Request(
        prompt.input_ids,
        length,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.seed + number,
        settings.acceptance,
        eos_ids=frozenset() if settings.spread > 1 else None,
        source=prompt.source,
    )
