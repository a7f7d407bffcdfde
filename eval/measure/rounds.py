"""Ways of decoding that are compared take turns, prompt by prompt, on one machine.

So a machine that slows down slows all of them down. The order changes from round to round, so that
each follows every other equally often: what one leaves in the caches of the machine slows its
successor, or helps it.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

from tqdm import tqdm

from specdraft.eval.engine.request import Request
from specdraft.eval.measure.outcome import DecodingMethod, Outcome
from specdraft.recipes.schema import EvalSection

WARM_UP_TOKENS = 8

T = TypeVar("T")
Outcomes = dict[str, list[Outcome]]  # of every runner, batch by batch
Round = dict[str, Outcome]  # of the runners that took a batch, once each
RoundId = tuple[int, int]  # number of the batch, number of the repeat
# What a round has given: known from before (eval/measure/logbook.py), or made now.
Remember = Callable[[RoundId, Callable[[], Round]], Round]


def forget(number: RoundId, make: Callable[[], Round]) -> Round:
    """Remember nothing: every round is made."""
    return make()


def capacity_for(settings: EvalSection, requests: Sequence[Request]) -> int:
    """Return how many tokens the longest prompt and an answer to it have at most."""
    return max(len(request.prompt) for request in requests) + settings.max_new_tokens


def take_turns(
    runners: Mapping[str, DecodingMethod],
    requests: Sequence[Request],
    settings: EvalSection,
    progress: bool = True,
    remember: Remember = forget,
) -> Outcomes:
    """Run every runner on every batch of requests, one after the other per batch, all warmed up.

    With repeats, the median by wall-clock of each batch stands; a failure among them is one of all.
    """
    few = min(WARM_UP_TOKENS, settings.max_new_tokens)
    warm_up = Request(requests[0].prompt, few, source=requests[0].source)
    for runner in runners.values():
        runner([warm_up])
    queued = [name for name in runners if is_queue(name)]
    batched = [name for name in runners if name not in queued]
    work = [
        (names, batch)
        for names in (batched, queued)
        for batch in (batches(names[0], requests, settings.batch_size) if names else ())
    ]
    # All is done once before anything is repeated: a slow minute of the machine is one try of all.
    ids = [(number, again) for again in range(settings.repeats) for number in range(len(work))]
    tries: list[list[Round]] = [[] for _ in work]
    with _nothing_to_collect():
        for number, again in tqdm(ids, desc="evaluating", unit="turn", disable=not progress):
            names, batch = work[number]
            order = balanced(names, number + again)
            tries[number].append(remember((number, again), partial(_round, runners, order, batch)))
    outcomes: Outcomes = {name: [] for name in runners}
    for (names, _), rounds in zip(work, tries, strict=True):
        for name in names:
            outcomes[name].append(_median([one[name] for one in rounds]))
    return outcomes


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """Keep what has been loaded out of Python's garbage collections: one over all that torch and
    transformers have made takes as long as dozens of steps, of whichever way it falls into."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def batches(name: str, items: Sequence[T], size: int) -> list[Sequence[T]]:
    """What a runner takes at a time: a batch, or all as one queue, as METHOD:dynamic does."""
    size = max(len(items), 1) if is_queue(name) else size
    return [items[start : start + size] for start in range(0, len(items), size)]


def is_queue(name: str) -> bool:
    return name.endswith(":dynamic")


def _round(
    runners: Mapping[str, DecodingMethod], order: Sequence[str], batch: Sequence[Request]
) -> Round:
    return {name: runners[name](batch) for name in order}


def _median(tries: Sequence[Outcome]) -> Outcome:
    if failed := next((each for each in tries if each.failure), None):
        return failed
    ordered = sorted(tries, key=lambda outcome: outcome.seconds)
    seconds = tuple(each.seconds for each in tries) if len(tries) > 1 else ()
    middle = median(each.seconds for each in tries)  # of an even number, between two
    return replace(ordered[(len(ordered) - 1) // 2], seconds=middle, tries=seconds)


def balanced(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: over N rounds (2 N where N is odd), each name comes first equally often
    and follows every other equally often (Williams's Latin squares).

    >>> [balanced("abcd", turn) for turn in range(2)]
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd']]
    """
    count = len(names)
    steps = ((n + 1) // 2 * (-1) ** (n + 1) for n in range(count))  # 0, 1, -1, 2, -2, ..
    order = [names[(turn + step) % count] for step in steps]
    return order[::-1] if count % 2 and turn // count % 2 else order
