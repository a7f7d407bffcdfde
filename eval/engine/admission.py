"""Which requests the decoder takes; of the others, what is wrong with them."""

from collections.abc import Iterable

from specdraft.eval.engine.request import GUMBEL, Request
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError


def check_request(
    name: str, request: Request, target: Target, capacity: int, draft: int, rules: Iterable[str]
) -> None:
    """Raise DataError, naming the request, for one that cannot be decoded.

    capacity: slots of a row's cache, of which a draft may need `draft`. rules: acceptance rules,
    besides those that take any draft.
    """
    prompt, length, vocab_size = request.prompt, request.max_new_tokens, target.vocab_size
    if not prompt:
        raise DataError(f"{name}: the prompt is empty; give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise DataError(
            f"{name}: token ids {min(prompt)}..{max(prompt)} are outside the vocabulary "
            f"0..{vocab_size - 1}"
        )
    if length < 1:
        raise DataError(f"{name}: max_new_tokens is {length}; give at least 1")
    if len(prompt) + length + draft > capacity:
        raise DataError(
            f"{name}: {len(prompt)} prompt + {length} new tokens + {draft} for drafts exceed the "
            f"capacity of {capacity}; raise it or shorten"
        )
    if request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
        raise DataError(
            f"{name}: temperature {request.temperature}, top_k {request.top_k}, top_p "
            f"{request.top_p}; allowed: temperature >= 0, top_k >= 0, 0 < top_p <= 1"
        )
    known = {GUMBEL, "walk", *rules}
    if request.rule not in known:
        raise DataError(
            f"{name}: rule {request.rule!r} is not for these drafts; "
            f"allowed: {', '.join(sorted(known))}"
        )
    if request.stop and (target.tokenizer is None or not all(request.stop)):
        raise DataError(f"{name}: stop strings need a tokenizer and must not be empty")
