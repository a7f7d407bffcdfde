"""The ways of decoding that are measured side by side, behind one call: prompts in, tokens out.

Ours run in the one decoder; `generate` and `hf_prompt_lookup` are transformers' own, on the same
weights, and count target forwards with a hook.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from specdraft.eval.decoder import Completion, Decoder, Drafter, Request, Step, Timing
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.lookup import PromptLookup
from specdraft.eval.static import StaticTree
from specdraft.models.falcon import FalconHead
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import METHODS, EvalSection
from specdraft.recipes.static_trees import load_tree_paths

NEEDS_HEAD = ("falcon_chain", "falcon_tree")
NEEDS_STUDENT = ("ssd",)


@dataclass(frozen=True)
class Outcome:
    """One batch of requests decoded by one method. `timing` is None where it is not ours to see."""

    completions: list[Completion]
    seconds: float
    timing: Timing | None = None
    drafter_forwards: int = 0


class DecodingMethod(Protocol):
    """Decodes a batch of requests."""

    def __call__(self, requests: Sequence[Request]) -> Outcome: ...


class Engine:
    """Our decoder, with or without a drafter."""

    def __init__(self, target: Target, drafter: Drafter | None, rows: int, capacity: int):
        self.decoder = Decoder(target, drafter, rows, capacity)

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        decoder, drafter = self.decoder, self.decoder.drafter
        decoder.timing = Timing()
        before = drafter.forwards if drafter else 0
        began = time.perf_counter()
        completions = sorted(decoder.run(requests), key=lambda done: done.index)
        seconds = time.perf_counter() - began
        spent = (drafter.forwards if drafter else 0) - before
        return Outcome(completions, seconds, replace(decoder.timing), spent)


class Generate:
    """transformers' `model.generate`, one request at a time or, greedy, as one padded batch."""

    def __init__(self, target: Target, lookup_tokens: int | None = None):
        self.target = target
        self.options = {"prompt_lookup_num_tokens": lookup_tokens} if lookup_tokens else {}
        self.pad = min(target.eos_ids, default=0)

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        # Assisted generation takes one row only, and so does a sampling seed.
        together = not self.options and requests[0].temperature == 0.0
        batches = [list(requests)] if together else [[request] for request in requests]
        completions, began = [], time.perf_counter()
        for batch in batches:
            completions += self._generate(batch, first=len(completions))
        return Outcome(completions, time.perf_counter() - began)

    def _generate(self, batch: list[Request], first: int) -> list[Completion]:
        longest, forwards = max(len(request.prompt) for request in batch), 0

        def count(*_) -> None:
            nonlocal forwards
            forwards += 1

        pads = [longest - len(request.prompt) for request in batch]
        ids = torch.tensor([[self.pad] * p + r.prompt for p, r in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * p + [1] * (longest - p) for p in pads])
        hook = self.target.model.register_forward_hook(count)
        try:
            output = self.target.model.generate(
                input_ids=ids.to(self.target.device),
                attention_mask=mask.to(self.target.device),
                max_new_tokens=batch[0].max_new_tokens,
                pad_token_id=self.pad,
                **_sampling(batch[0]),
                **self.options,
            )
        finally:
            hook.remove()
        return [
            self._completion(first + n, row[longest:].tolist(), forwards)
            for n, row in enumerate(output)
        ]

    def _completion(self, index: int, tokens: list[int], forwards: int) -> Completion:
        ends = (n for n, token in enumerate(tokens, start=1) if token in self.target.eos_ids)
        tokens = tokens[: next(ends, len(tokens))]
        # Which tokens came from which forward is not visible from here: only their numbers are.
        forwards = min(forwards, len(tokens))
        spread = [len(tokens) - forwards + 1] + [1] * (forwards - 1)
        return Completion(index, tokens, [Step(n, 0, 0, n - 1) for n in spread])


def _sampling(request: Request) -> dict:
    if request.temperature == 0.0:
        return {"do_sample": False}
    torch.manual_seed(request.seed)
    return {
        "do_sample": True,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
    }


def make_method(
    name: str,
    settings: EvalSection,
    target: Target,
    head: FalconHead | None,
    capacity: int,
    student: Target | None = None,
) -> DecodingMethod:
    """Build a method by its name; RecipeError for an unknown one or one without its drafter."""
    rows = settings.batch_size
    if name not in METHODS:
        raise RecipeError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    if name in NEEDS_HEAD and head is None:
        raise RecipeError(f"method {name} needs a trained head; train one first")
    if name in NEEDS_STUDENT and student is None:
        raise RecipeError(f"method {name} needs a student; give the recipe one and train it")
    if name == "generate":
        return Generate(target)
    if name == "hf_prompt_lookup":
        return Generate(target, settings.hf_lookup_copy)
    drafter = None
    if name == "prompt_lookup":
        drafter = PromptLookup(settings.lookup_match, settings.lookup_copy, rows, target.device)
    elif name in NEEDS_STUDENT:
        drafter = SSD(student, rows, capacity, settings.ssd_gamma, settings.ssd_theta)
    elif name in NEEDS_HEAD:
        k = head.config.block_size
        chain = StaticTree.chain(settings.chain_depth, k)
        tree = chain if name == "falcon_chain" else StaticTree(load_tree_paths(settings.tree), k)
        drafter = FalconDrafter(head, target, tree, rows, capacity)
    return Engine(target, drafter, rows, capacity + (drafter.max_nodes if drafter else 0))
