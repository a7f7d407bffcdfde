"""The ways of decoding that are measured side by side, behind one call: prompts in, tokens out.

Ours run in the one decoder; `generate` and `hf_prompt_lookup` are transformers' own, on the same
weights, and count target forwards with a hook.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import torch

from specdraft.eval.decoder import Completion, Decoder, Drafter, Request, Step, Timing
from specdraft.eval.drafters.cascade import CascadeDrafter
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.lookup import PromptLookup
from specdraft.eval.drafters.maxgram import CONTINUATIONS, MaxGramDrafter
from specdraft.eval.drafters.tail import MaxGramTail
from specdraft.eval.padded import PADDINGS, PaddedDecoder
from specdraft.eval.static import StaticTree
from specdraft.eval.trained import HOW, Trained, needs
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import MaxgramSection, Measured, Recipe
from specdraft.recipes.static_trees import load_tree_paths


@dataclass(frozen=True)
class Outcome:
    """One batch of requests decoded by one method. `timing` has no tokens where it is not ours."""

    completions: list[Completion]
    seconds: float
    timing: Timing
    drafter_passes: tuple[int, ...] = ()  # forwards of each of the drafter's models
    drafter_seconds: float = 0.0

    @property
    def drafter_forwards(self) -> int:
        return sum(self.drafter_passes)


class DecodingMethod(Protocol):
    """Decodes a batch of requests."""

    def __call__(self, requests: Sequence[Request]) -> Outcome: ...


class Engine:
    """Our decoder, with or without a drafter, or the vanilla padded form of it."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        decoder, drafter = self.decoder, self.decoder.drafter
        if isinstance(decoder, PaddedDecoder):
            decoder.packed.begin(len(requests))
        decoder.timing = Timing()
        before = _spent(drafter)
        began = time.perf_counter()
        completions = sorted(decoder.run(requests), key=lambda done: done.index)
        seconds = time.perf_counter() - began
        for done in completions:
            if done.error:
                raise done.error
        *passes, spent = (b - a for a, b in zip(before, _spent(drafter), strict=True))
        return Outcome(completions, seconds, decoder.timing, tuple(passes), spent)


def _spent(drafter: Drafter | None) -> tuple[float, ...]:
    """Passes of each model of a drafter so far, and the seconds that they took together."""
    if drafter is None:
        return (0.0,)
    passes = drafter.passes if isinstance(drafter, CascadeDrafter) else [drafter.forwards]
    return (*passes, drafter.seconds)


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
        completions, timing, began = [], Timing(), time.perf_counter()
        for batch in batches:
            completions += self._generate(batch, len(completions), timing)
        return Outcome(completions, time.perf_counter() - began, timing)

    def _generate(self, batch: list[Request], first: int, timing: Timing) -> list[Completion]:
        longest, before = max(len(request.prompt) for request in batch), timing.forwards

        def enter(*_) -> None:
            timing.verify -= time.perf_counter()

        def leave(*_) -> None:
            timing.verify += time.perf_counter()
            timing.forwards += 1

        pads = [longest - len(request.prompt) for request in batch]
        ids = torch.tensor(
            [[self.pad] * p + list(r.prompt) for p, r in zip(pads, batch, strict=True)]
        )
        mask = torch.tensor([[0] * p + [1] * (longest - p) for p in pads])
        model = self.target.model
        hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
        try:
            output = model.generate(
                input_ids=ids.to(self.target.device),
                attention_mask=mask.to(self.target.device),
                max_new_tokens=batch[0].max_new_tokens,
                pad_token_id=self.pad,
                **_sampling(batch[0]),
                **self.options,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return [
            self._completion(first + n, row[longest:].tolist(), timing.forwards - before)
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
    name: str, recipe: Recipe, target: Target, trained: Trained, capacity: int
) -> DecodingMethod:
    """Build a method by its name; RecipeError for an unknown one or one without its drafter.

    `capacity` holds a prompt and its answer. NAME:padded, NAME:pad_kv and NAME:pad_inputs are
    decoded the vanilla way (eval/padded.py), and `padded` is prompt_lookup:padded. NAME:dynamic is
    the same engine; whoever calls it hands over all requests at once.
    """
    if name not in (known := get_args(Measured)):
        raise RecipeError(f"unknown method {name!r}; known: {', '.join(known)}")
    base, _, way = ("prompt_lookup:padded" if name == "padded" else name).partition(":")
    rows = recipe.eval.batch_size
    if base == "generate":
        return Generate(target)
    if base == "hf_prompt_lookup":
        return Generate(target, recipe.eval.hf_lookup_copy)
    drafter = make_drafter(base, recipe, target, trained, capacity)
    room = capacity + (drafter.max_nodes if drafter else 0)
    if way not in PADDINGS:
        return Engine(Decoder(target, drafter, rows, room))
    # Aligned caches grow by what the luckiest row accepts: at worst by the sum over rows.
    room += (rows - 1) * recipe.eval.max_new_tokens
    return Engine(PaddedDecoder(target, drafter, rows, room, *PADDINGS[way]))


def make_drafter(
    name: str, recipe: Recipe, target: Target, trained: Trained, capacity: int
) -> Drafter | None:
    """Build the drafter of a method, for `eval.batch_size` rows; None for plain decoding."""
    if name == "plain":
        return None
    settings, rows = recipe.eval, recipe.eval.batch_size
    if name == "prompt_lookup":
        return PromptLookup(settings.lookup_match, settings.lookup_copy, rows, target.device)
    for need in needs(name):
        if not getattr(trained, need):
            raise RecipeError(f"method {name} needs {HOW[need]}")
    if name == "maxgram":
        return make_maxgram(recipe.maxgram, trained.table, rows, target.device)
    if name == "cascade":
        bottom = make_maxgram(recipe.maxgram, trained.table, rows, target.device)
        k, leniency = recipe.cascade.k, recipe.cascade.leniency
        return CascadeDrafter(trained.cascade, bottom, k, leniency, rows, capacity)
    if name == "falcon_maxgram":
        inner = make_drafter("falcon_tree", recipe, target, trained, capacity)
        bottom = make_maxgram(recipe.maxgram, trained.table, rows, target.device)
        return MaxGramTail(inner, bottom, recipe.maxgram.n, recipe.maxgram.branches)
    if name == "ssd":
        gamma, theta = settings.ssd_gamma, settings.ssd_theta
        return SSD(trained.student, rows, capacity, gamma, theta)
    k = trained.head.config.block_size
    chain = StaticTree.chain(settings.chain_depth, k)
    tree = chain if name == "falcon_chain" else StaticTree(load_tree_paths(settings.tree), k)
    return FalconDrafter(trained.head, target, tree, rows, capacity)


def make_maxgram(
    section: MaxgramSection, table: MaxGramTable, rows: int, device: torch.device
) -> MaxGramDrafter:
    """Build the Max-Gram drafter that a recipe describes."""
    return MaxGramDrafter(
        CONTINUATIONS[section.continuation],
        section.n,
        section.min_match,
        section.branches,
        table.next_id.tolist(),
        rows,
        device,
    )
