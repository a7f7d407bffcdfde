"""Ways of decoding that are compared take turns, prompt by prompt, on one machine.

So a machine that slows down slows all of them down. Every round begins with another one, so that
none always follows the same one: what one leaves in the caches of the machine slows its successor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tqdm import tqdm

from specdraft.eval.decoder import Request
from specdraft.eval.outcome import DecodingMethod, Outcome
from specdraft.recipes.schema import EvalSection

WARM_UP_TOKENS = 8

Outcomes = dict[str, list[Outcome]]  # of every runner, batch by batch


def capacity_for(settings: EvalSection, requests: Sequence[Request]) -> int:
    """Return how many tokens the longest prompt and an answer to it have at most."""
    return max(len(request.prompt) for request in requests) + settings.max_new_tokens


def take_turns(
    runners: Mapping[str, DecodingMethod],
    requests: Sequence[Request],
    settings: EvalSection,
    progress: bool = True,
) -> Outcomes:
    """Run every runner on every batch of requests, one after the other per batch, all warmed up.

    One whose name ends with `:dynamic` takes all requests as one queue. With repeats, the median by
    wall-clock of each batch stands.
    """
    warm_up = Request(requests[0].prompt, min(WARM_UP_TOKENS, settings.max_new_tokens))
    for runner in runners.values():
        runner([warm_up])
    starts = range(0, len(requests), settings.batch_size)
    batches = [requests[start : start + settings.batch_size] for start in starts]
    queued = [name for name in runners if name.endswith(":dynamic")]
    batched = [name for name in runners if name not in queued]
    work = [(batched, batch) for batch in batches] + [(queued, requests)] * bool(queued)
    outcomes: Outcomes = {name: [] for name in runners}
    work = tqdm(work, desc="evaluating", unit="batch", disable=not progress)
    for number, (names, batch) in enumerate(work):
        rounds = [rotated(names, number + again) for again in range(settings.repeats)]
        tries = [{name: runners[name](batch) for name in order} for order in rounds]
        for name in names:
            ordered = sorted((each[name] for each in tries), key=lambda outcome: outcome.seconds)
            seconds = tuple(each[name].seconds for each in tries) if len(tries) > 1 else ()
            outcomes[name].append(replace(ordered[len(ordered) // 2], tries=seconds))
    return outcomes


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in turn, another one first each time."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]
