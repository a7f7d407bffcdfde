"""Speculative decoding inside transformers: `model.generate(.., custom_generate=Speculative(..))`.

    from specdraft.eval.custom_generate import load
    fast = load("runs/tiny")
    model.generate(**inputs, custom_generate=fast, max_new_tokens=128)

The tokens are those of `generate` without it; sampled ones are those of our plain decoding with
seeds drawn from torch's global generator. The model itself is not touched: a copy of its structure
shares its tensors, and is kept between calls, as the drafter is, for as long as the model's tensors
stay where they are. `generate` (transformers 5.23) keeps `tokenizer` and `assistant_model` from a
callable: stop strings come as a `StopStringCriteria`. What a call has gained is in `fast.last`.

Shapes: B rows of the call, T padded prompt length.
"""

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.generation.borrowed_model import BorrowedModel, MakeDrafter
from specdraft.eval.generation.generate_call import GenerateCall, read_call, read_sources
from specdraft.eval.methods.registry import Setup, make_drafter
from specdraft.eval.methods.trained import KINDS, Source, Trained
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.families.encoder_decoder import is_encoder_decoder
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.medusa import MedusaHeads
from specdraft.models.published import find_drafter
from specdraft.models.target import Target, context_length
from specdraft.recipes.errors import DataError
from specdraft.recipes.load import from_dict
from specdraft.recipes.static_trees import AUTO

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def method(
    name: str, settings: dict[str, dict] | None = None, revision: str | None = None, **trained: Any
) -> MakeDrafter:
    """Draft by any method of ours (`python eval/bench.py --help` names them).

    settings: sections of a recipe that differ from their defaults. trained: what it needs, by its
    kind (eval/methods/trained.py), or the folder or Hub id of it; several for a cascade.

        method("gsd", {"drafting": {"tau": 1}}, student="you/draft-lm")

    Raises DataError for what no method drafts with.
    """
    if unknown := trained.keys() - KINDS.keys():
        raise DataError(
            f"method({name!r}): {', '.join(sorted(unknown))} is nothing that drafts; what is "
            f"trained is given as {', '.join(KINDS)}"
        )
    # What a recipe has to say, and no drafter reads.
    base = {"name": name, "data": {"sources": ["tiny"]}, "train": {"steps": 1}} | (settings or {})
    if "cascade" in trained:
        students = trained["cascade"]
        students = tuple(students) if isinstance(students, list | tuple) else (students,)
        names = [str(one) if isinstance(one, Source) else one.name for one in students]
        trained = trained | {"cascade": students}
        base["cascade"] = {"students": names} | base.get("cascade", {})  # K is as large as they ask
    recipe = from_dict(base)

    loaded: weakref.WeakKeyDictionary[Target, Trained] = weakref.WeakKeyDictionary()

    def make(target: Target, rows: int, capacity: int) -> Drafter | None:
        if target not in loaded:  # once, however often rows or capacity change
            parts = {
                kind: KINDS[kind].fetch(one, revision, target) if is_named(one) else one
                for kind, one in trained.items()
            }
            own = Trained(**parts)
            own.check_tokens(target)  # of what is given as an object, too
            loaded[target] = own
        return make_drafter(name, Setup(recipe, target, loaded[target], rows, capacity))

    return make


def is_named(part: Any) -> bool:
    """Whether what is trained, or one of several, is given by its folder or Hub id."""
    parts = part if isinstance(part, list | tuple) else (part,)
    return any(isinstance(one, Source) for one in parts)


def load(
    source: Source,
    revision: str | None = None,
    tree: str = AUTO,
    streamer: BaseStreamer | None = None,
) -> "Speculative":
    """Return a decoding method for `generate` that drafts with a trained drafter of any kind.

    source: its folder, its Hub id (and revision), or the folder of a run that has one. tree: of a
    head, in place of the one beside its weights. Raises HeadError where there is none, or several.

        model.generate(**inputs, custom_generate=load("you/head"), max_new_tokens=128)
    """
    kind, place = find_drafter(source, revision)
    makers = {"student": ssd, "table": maxgram}
    if kind in makers:
        return Speculative(makers[kind](place, revision), streamer)
    drafting = medusa if kind == "medusa" else falcon
    return Speculative(drafting(place, tree, revision), streamer)


def falcon(
    head: FalconHead | Eagle3Head | Source, tree: str = AUTO, revision: str | None = None
) -> MakeDrafter:
    """Draft with a Falcon or EAGLE head (or its folder or Hub id) and the tree that lies beside it,
    or another: a bundled one's name, or a file."""
    return method("falcon_tree", {"eval": {"tree": tree}}, revision, head=head)


def medusa(
    heads: MedusaHeads | Source, tree: str = AUTO, revision: str | None = None
) -> MakeDrafter:
    """Draft with Medusa heads (or their folder or Hub id) and a tree, as `falcon` does."""
    return method("medusa_tree", {"eval": {"tree": tree}}, revision, medusa=heads)


def ssd(student: Target | Source, revision: str | None = None, gamma: int = 5) -> MakeDrafter:
    """Draft `gamma` tokens at a time with a small causal LM, from its folder or by its Hub id."""
    drafting = {"gamma": gamma, "theta_prob": 0.0}
    return method("ssd", {"drafting": drafting}, revision, student=student)


def maxgram(table: MaxGramTable | Source, revision: str | None = None, n: int = 10) -> MakeDrafter:
    """Draft `n` tokens by copying, then by a Max-Gram table (or its folder or Hub id)."""
    return method("maxgram", {"maxgram": {"n": n}}, revision, table=table)


def prompt_lookup(match: int = 2, copy: int = 10) -> MakeDrafter:
    """Draft by copying what followed the last `match` tokens when they occurred before."""
    return method("prompt_lookup", {"eval": {"lookup_match": match, "lookup_copy": copy}})


def no_drafter(target: Target, rows: int, capacity: int) -> None:
    """Plain decoding."""


@dataclass
class Gain:
    """What a call has taken."""

    tokens: int = 0  # new ones of all rows, before a stopping criterion cuts them
    steps: int = 0  # of all rows: tokens / steps is one without a drafter

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)


class Speculative:
    """A decoding method for `generate`; see the module's docstring.

    drafter: builds one for a target, a number of rows and a capacity. streamer: receives the
    prompt, then every token as soon as it is accepted (batch 1 only), as one that is handed to
    `generate` does. last: the `Gain` of the last call, None before the first. Stopping criteria see
    one row at a time, its tokens without padding. Raises DataError, by name, for what cannot be
    honoured, and TargetError for a model that cannot be decoded.
    """

    def __init__(self, drafter: MakeDrafter = no_drafter, streamer: BaseStreamer | None = None):
        self.make_drafter, self.streamer = drafter, streamer
        self.last: Gain | None = None
        self._borrowed: BorrowedModel | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,  # [B, T]
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,  # what an encoder-decoder reads
        **model_kwargs,
    ) -> Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """Decode, called by `generate`; returns [B, T + new tokens of the longest row]."""
        preparing = getattr(model.prepare_inputs_for_generation, "__func__", None)
        if preparing is not type(model).prepare_inputs_for_generation:
            raise DataError(  # of the object alone: peft puts virtual tokens before the prompt
                "generate: inputs that the model does not prepare itself cannot be honoured, as "
                "those of prompt or prefix tuning; take an adapter of weights (LoRA, IA3)"
            )
        sources, output = None, GenerateDecoderOnlyOutput
        if is_encoder_decoder(model.config):
            _check_encoder_decoder(model, model_kwargs.get("decoder_attention_mask"))
            output = GenerateEncoderDecoderOutput
            sources = read_sources(inputs_tensor, len(input_ids), model_kwargs)
        call = read_call(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, sources
        )
        streamer = self.streamer or _of_the_call("streamer")
        if streamer and len(input_ids) > 1:
            raise DataError(f"generate: a streamer takes one row, and there are {len(input_ids)}")
        if self._borrowed is None or not self._borrowed.is_of(model):
            self._borrowed = BorrowedModel(model, self.make_drafter)
        decoder = self._borrowed.decoder(call)
        if self.streamer:  # another one has been shown the prompt by `generate`
            self.streamer.put(input_ids.cpu())
        rows = self._decode(decoder, call, streamer)
        if streamer:
            streamer.end()
        sequences = torch.cat((input_ids, _pad(rows, call.pad_id, input_ids.device)), 1)
        if generation_config.return_dict_in_generate:
            return output(sequences=sequences)
        return sequences

    def _decode(
        self, decoder: Decoder, call: GenerateCall, streamer: BaseStreamer | None
    ) -> list[list[int]]:
        """New tokens of every row, up to what a stopping criterion leaves."""
        rows: list[list[int]] = [[] for _ in call.requests]
        ends: dict[int, int] = {}  # new tokens of rows that a criterion has stopped
        self.last = Gain()
        for update in decoder.stream(call.requests):
            index = update.index
            if update.completion and update.completion.error:
                raise update.completion.error
            if index in ends and not call.goes_on:
                continue
            self.last.tokens += len(update.tokens)
            self.last.steps += len(update.steps)
            for token in update.tokens:
                rows[index].append(token)
                if streamer:
                    streamer.put(torch.tensor([token]))
                if index not in ends and call.stops(index, rows[index], decoder.target.device):
                    ends[index] = len(rows[index])
                    if not call.goes_on:
                        break
            if len(ends) == len(rows):
                last = max(ends.values())
                if not call.goes_on or all(len(row) >= last for row in rows):
                    return [row[:last] for row in rows]
        return rows


def _of_the_call(name: str) -> Any:
    """A variable of the `generate` which is calling us.

    generate hands a callable every argument but a streamer, which it has shown the prompt, and does
    not say which encoder_outputs are its own. Its variables are the only place where a streamer
    that would stay silent, and outputs that would be made again, can be found.
    """
    frame = inspect.currentframe()
    while frame and frame.f_code is not GENERATE:
        frame = frame.f_back
    return frame and frame.f_locals.get(name)


def _check_encoder_decoder(model: PreTrainedModel, mask: Tensor | None) -> None:
    """Raise DataError for what a call hands over that cannot be honoured. mask: of the decoder."""
    if (_of_the_call("kwargs") or {}).get("encoder_outputs") is not None:
        raise DataError("generate: encoder_outputs of your own cannot be honoured; give input_ids")
    if mask is not None and not mask.all() and context_length(model.config):
        raise DataError(  # `generate` counts them; there is no padding here
            "generate: a decoder_attention_mask that hides tokens cannot be honoured with "
            "learned positions; give decoder_input_ids of one length"
        )


def _pad(rows: list[list[int]], pad: int | None, device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    padded = [row + [pad] * (longest - len(row)) for row in rows]
    return torch.tensor(padded, device=device)
