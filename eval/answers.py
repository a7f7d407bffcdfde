"""The target answers many prompts at once: what data/regenerate.py is handed by an entry."""

from collections.abc import Iterator, Sequence

from specdraft.data.regenerate import Ask
from specdraft.eval.decoder import Decoder, Request
from specdraft.models.target import Target


def answer(target: Target, rows: int, asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
    """Decode all asks, `rows` at a time; yield (index, new tokens) as each is finished."""
    requests = [
        Request(ask.prompt_ids, ask.max_new_tokens, ask.temperature, seed=ask.seed) for ask in asks
    ]
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    for completion in Decoder(target, rows=rows, capacity=capacity).run(requests):
        yield completion.index, completion.tokens
