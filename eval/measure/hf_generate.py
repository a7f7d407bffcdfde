"""The baselines of transformers: `model.generate` alone, with an assistant, with prompt lookup.

They run on the same weights as ours. Hooks on the models count their forwards and the time in
them, so that what is left is transformers' own overhead, measured as ours is.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from specdraft.eval.engine.request import Completion, Request, Step
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.outcome import Outcome
from specdraft.models.target import Target


@dataclass
class Meter:
    """Forwards of a model and the seconds they took."""

    forwards: int = 0
    seconds: float = 0.0

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Count while the context is open."""

        def enter(*_) -> None:
            self.seconds -= time.perf_counter()

        def leave(*_) -> None:
            self.seconds += time.perf_counter()
            self.forwards += 1

        with model.register_forward_pre_hook(enter), model.register_forward_hook(leave):
            yield


class Generate:
    """`generate`: one request at a time or, greedy and without drafts, as one padded batch.

    With a student, it assists with `gamma` tokens a step, as many as our chain drafts; with
    `lookup_tokens`, prompt lookup copies so many.
    """

    def __init__(
        self,
        target: Target,
        student: Target | None = None,
        gamma: int = 0,
        lookup_tokens: int | None = None,
    ):
        self.target, self.options, self.assistant = target, {}, None
        self.model = _with(target.model, **_ids(target.model.generation_config))
        self.pad = min(target.eos_ids, default=0)
        if lookup_tokens:
            self.options = {"prompt_lookup_num_tokens": lookup_tokens}
        if student:
            # `gamma` tokens every time, no early exit.
            settings = {"num_assistant_tokens": gamma, "assistant_confidence_threshold": 0.0}
            settings["num_assistant_tokens_schedule"] = "constant"
            self.assistant = _with(student.model, **settings)
            self.options = {"assistant_model": self.assistant}

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        # Assisted generation takes one row only, and so does a sampling seed.
        together = not self.options and requests[0].temperature == 0.0
        batches = [list(requests)] if together else [[request] for request in requests]
        target, assistant, completions = Meter(), Meter(), []
        with ExitStack() as stack:
            # As our loop runs. `generate` of itself only turns gradients off, and loses a tenth.
            stack.enter_context(torch.inference_mode())
            stack.enter_context(target.on(self.target.model))
            if self.assistant is not None:
                stack.enter_context(assistant.on(self.assistant))
            began = time.perf_counter()
            for batch in batches:
                before = target.forwards
                rows = self._generate(batch)
                steps = target.forwards - before
                completions += [self._completion(tokens, steps) for tokens in rows]
            seconds = time.perf_counter() - began
        for index, completion in enumerate(completions):
            completion.index = index
        timing = Timing(verify=target.seconds, forwards=target.forwards)
        return Outcome(completions, seconds, timing, (assistant.forwards,), assistant.seconds)

    def _generate(self, batch: list[Request]) -> list[list[int]]:
        """New tokens of every row, as `generate` pads them."""
        read = [request.source or request.prompt for request in batch]
        longest = max(map(len, read))
        pads = [longest - len(ids) for ids in read]
        ids = [[self.pad] * p + list(one) for p, one in zip(pads, read, strict=True)]
        mask = [[0] * p + [1] * (longest - p) for p in pads]
        begun = {}
        if batch[0].source:  # T5's and BART's encoders take padding on the right
            ids = [row[p:] + row[:p] for p, row in zip(pads, ids, strict=True)]
            mask = [row[::-1] for row in mask]
            starts = [list(request.prompt) for request in batch]
            begun = {"decoder_input_ids": torch.tensor(starts, device=self.target.device)}
            # Its own would have as many layers as the encoder.
            begun["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        output = self.model.generate(
            input_ids=torch.tensor(ids, device=self.target.device),
            attention_mask=torch.tensor(mask, device=self.target.device),
            max_new_tokens=batch[0].max_new_tokens,
            pad_token_id=self.pad,
            **_sampling(batch[0]),
            **self.options,
            **begun,
        )
        return output[:, len(batch[0].prompt) if begun else longest :].tolist()

    def _completion(self, tokens: list[int], forwards: int) -> Completion:
        ends = (n for n, token in enumerate(tokens, start=1) if token in self.target.eos_ids)
        tokens = tokens[: next(ends, len(tokens))]
        # Which tokens came from which forward is not visible from here: only their numbers are.
        forwards = min(forwards, len(tokens))
        spread = [len(tokens) - forwards + 1] + [1] * (forwards - 1)
        return Completion(0, tokens, [Step(n, 0, 0, n - 1) for n in spread])


def _with(model: nn.Module, **settings) -> nn.Module:
    """The model with these settings of `generate` and no others: a repetition penalty, say, that
    its own files ask for would be no plain decoding."""
    own = copy.copy(model)
    own.generation_config = GenerationConfig(**settings)
    return own


def _ids(config: GenerationConfig) -> dict:
    """Which tokens begin, end and pad."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    return {name: getattr(config, name) for name in names}


def _sampling(request: Request) -> dict:
    if request.temperature == 0.0:
        return {"do_sample": False}
    torch.manual_seed(request.seed)
    settings = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p")}
    return {"do_sample": True} | settings
