"""Decoding for tests of losslessness: the target's own tokens, with drafts that took part.

Outputs are correct with any drafter. So one that raises (its rows are finished by plain decoding)
or drafts nothing would pass every comparison of tokens: `decode` fails in both cases.
"""

import torch
from random_models import VOCAB

from specdraft.eval.checkup.foreseeing import Foreseeing
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Completion, Request

__all__ = ["PATHS", "Foreseeing", "check_as_plain", "completions", "decode", "plain_tokens"]
PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0), (0,) * 5]


def prompts(count: int = 6) -> list[list[int]]:
    """Random prompts of 3, 8, 13, .. tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (3 + 5 * n,), generator=generator).tolist() for n in range(count)]


def plain_tokens(target, prompt: list[int], length: int) -> list[int]:
    """Greedy tokens, one at a time by a forward of the whole sequence, without a cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            given = torch.tensor([ids], device=next(target.model.parameters()).device)
            logits = target.model(given, use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def check_as_plain(target, drafter, rows: int) -> None:
    """Assert that greedy and sampled tokens are those of the target alone."""
    requests = [Request(prompt, 17) for prompt in prompts()]
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]
    assert decode(Decoder(target, drafter, rows, 128), requests) == expected
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts())]
    expected = decode(Decoder(target, None, 1, 128), requests)  # one after the other
    assert decode(Decoder(target, drafter, rows, 128), requests) == expected


def completions(decoder: Decoder, requests: list[Request], accepts=True) -> list[Completion]:
    """Decode; return the completions in the order of the requests. A drafter must have drafted for
    them to their end and, with `accepts`, had a token accepted at least once."""
    done = sorted(decoder.run(requests), key=lambda completion: completion.index)
    if decoder.drafter:
        assert {completion.fallback for completion in done} == {None}
        steps = [step for completion in done for step in completion.steps]
        assert sum(step.drafted for step in steps) > 0
        assert sum(step.accepted for step in steps) > 0 or not accepts
    return done


def decode(decoder: Decoder, requests: list[Request], accepts=True) -> list[list[int]]:
    """The tokens of `completions`."""
    return [completion.tokens for completion in completions(decoder, requests, accepts)]
