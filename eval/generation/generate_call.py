"""What one call of transformers' `model.generate` asks for, in the terms of our decoder.

Everything is honoured or refused by name. A generation config is compared field by field with its
defaults, so that a field we have never heard of is refused and not ignored; logits processors,
which is what most fields turn into, are checked once more as objects.

Shapes: B rows of the call, T padded prompt length, S padded length of an encoder-decoder's sources.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    generation,
)

from specdraft.eval.engine.request import Request
from specdraft.recipes.errors import DataError

# What each is a setting of, of a `Request` and of the warper itself; in the order of `warp`.
WARPERS = {
    generation.TemperatureLogitsWarper: "temperature",
    generation.TopKLogitsWarper: "top_k",
    generation.TopPLogitsWarper: "top_p",
}
# What they do to the logits after a node depends on the tokens before it and on nothing else.
PROCESSORS = (
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
)
ENDINGS = (generation.EosTokenCriteria, generation.MaxLengthCriteria)  # which requests have
HONOURED = {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "stop_strings"),
    *("max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens"),
    *("do_sample", "temperature", "top_k", "top_p"),
    *("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    *("forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size", "repetition_penalty"),
    *("sequence_bias", "suppress_tokens"),
    *("num_return_sequences", "return_dict_in_generate"),
}
# These change how transformers computes, or beams, which are refused: never our tokens.
WITHOUT_EFFECT = {
    *("cache_config", "cache_implementation", "max_cache_len", "use_cache", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "transformers_version"),
    *("early_stopping", "length_penalty"),
}
UNUSED = {"logits_to_keep", "past_key_values", "use_cache"}  # what generate prepares for a forward


@dataclass(frozen=True)
class GenerateCall:
    """Requests, in the order of the rows, and what ends and pads them."""

    requests: list[Request]
    criteria: StoppingCriteriaList  # other than length and end-of-sequence tokens
    pad_id: int | None  # None: all rows are of one length

    @property
    def goes_on(self) -> bool:
        """Whether `generate` goes on with a row that a criterion has stopped, until all have been:
        it pads where there is an end-of-sequence token, and nowhere else."""
        return len(self.requests) > 1 and not self.requests[0].eos_ids

    def stops(self, index: int, tokens: list[int], device: torch.device) -> bool:
        """Whether a criterion ends a row behind these new tokens."""
        if not self.criteria:
            return False
        ids = torch.tensor([[*self.requests[index].prompt, *tokens]], device=device)
        return bool(self.criteria(ids, None))


@dataclass(frozen=True)
class Processing:
    """A request's `process`: the processors of a call, as `generate` runs them on one row."""

    processors: LogitsProcessorList
    padding: list[int]  # in front of the prompt: `generate` counts it as tokens
    device: torch.device  # where the processors have what they compare with

    @classmethod
    def of(
        cls, processors: Sequence[LogitsProcessor], row: int, ids: Tensor, prompt: Sequence[int]
    ) -> "Processing":
        """Return the processors for one row of the call, given its padded ids [T]."""
        own = LogitsProcessorList(_of_row(one, row) for one in processors)
        return cls(own, ids[: len(ids) - len(prompt)].tolist(), ids.device)

    def __call__(self, tokens: list[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([self.padding + tokens], device=self.device)
        scores = logits[None].to(self.device, torch.float32, copy=True)
        return self.processors(ids, scores)[0].to(logits.device)


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a processor for a row alone: a repetition penalty knows row by row what to ignore."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        processor = copy(processor)
        processor.prompt_ignore_length = int(ignored[row])
    return processor


def read_call(
    input_ids: Tensor,  # [B, T]
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    arguments: dict,
    # Of the rows, for an encoder-decoder, with the padding in front of each.
    sources: Sequence[tuple[list[int], list[int]]] | None,
) -> GenerateCall:
    """Translate what `generate` hands to a decoding method; DataError for what we cannot honour.

    Seeds of sampled rows are drawn from torch's global generator: `torch.manual_seed` decides.
    """
    _check_config(config)
    prompts = _prompts(input_ids, arguments)
    ends = (c.eos_token_id.tolist() for c in criteria if type(c) is generation.EosTokenCriteria)
    eos_ids = [token for ids in ends for token in ids]
    processing, warpers = _parted(processors)
    settings = _sampling(warpers, config.do_sample) | {"eos_ids": frozenset(eos_ids)}
    new_tokens = criteria.max_length - input_ids.shape[1]
    read = sources or [([], [])] * len(prompts)
    requests = [
        Request(prompt, new_tokens, source=source, source_padding=padding, **settings)
        for prompt, (padding, source) in zip(prompts, read, strict=True)
    ]
    if processing:
        requests = [
            replace(request, process=Processing.of(processing, number, ids, request.prompt))
            for number, (request, ids) in enumerate(zip(requests, input_ids, strict=True))
        ]
    if config.do_sample:
        seeds = torch.randint(2**63 - 1, (len(requests),)).tolist()
        requests = [replace(r, seed=seed) for r, seed in zip(requests, seeds, strict=True)]
    others = [c for c in criteria if type(c) not in ENDINGS]
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids), None)
    return GenerateCall(requests, StoppingCriteriaList(others), pad)


def read_sources(ids: Tensor, rows: int, arguments: dict) -> list[tuple[list[int], list[int]]]:
    """What the encoder of an encoder-decoder reads for each row: the padding in front, which it
    may count, and the source.

    ids: what `generate` was given [B, S], of which it may make several rows each. arguments: of the
    call; what is of the encoder is taken out of them. DataError for what is not ids, or has padding
    in between.
    """
    mask, _ = arguments.pop("attention_mask", None), arguments.pop("encoder_outputs", None)
    arguments["attention_mask"] = arguments.pop("decoder_attention_mask", None)
    if ids.is_floating_point() or ids.dim() != 2:
        raise DataError("generate: an encoder is given token ids here, no embeddings or features")
    ids = ids.repeat_interleave(rows // len(ids), 0)
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    ends = nn.functional.pad(mask.bool().long(), (1, 1)).diff(dim=-1)  # 1 where a source begins
    if not (ends.clamp(min=0).sum(-1) == 1).all():
        raise DataError(
            "generate: the attention mask hides tokens inside a source, or all of one; pad on one "
            "side (tokenizer.padding_side)"
        )
    starts = mask.argmax(-1).tolist()
    return [
        (row[:start].tolist(), row[kept].tolist())
        for row, kept, start in zip(ids, mask.bool(), starts, strict=True)
    ]


def _check_config(config: GenerationConfig) -> None:
    neutral = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    wanted = {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_")
        and name not in HONOURED | WITHOUT_EFFECT
        and value is not None
        and value is not False
        and value != neutral.get(name)
    }
    if wanted:
        found = ", ".join(f"{name}={value!r}" for name, value in sorted(wanted.items()))
        raise DataError(
            f"generate: {found} cannot be honoured by speculative decoding; "
            "leave it out or generate without custom_generate"
        )


def _prompts(input_ids: Tensor, arguments: dict) -> list[list[int]]:
    """Each row without its left padding."""
    given = {name: value for name, value in arguments.items() if value is not None}
    mask = given.pop("attention_mask", torch.ones_like(input_ids)).bool()
    positions = given.pop("position_ids", None)
    cache = given.get("past_key_values", given.pop("cache_params", None))
    if cache is not None and getattr(cache, "_is_user_defined", False):
        raise DataError("generate: past_key_values cannot be continued; the decoder has its own")
    if unknown := sorted(given.keys() - UNUSED):
        raise DataError(f"generate: {', '.join(unknown)} cannot be honoured; leave it out")
    if not (mask[:, -1].all() and (mask.long().diff(dim=-1) >= 0).all()):
        raise DataError(
            "generate: the attention mask hides tokens inside or behind a prompt; "
            "pad on the left (tokenizer.padding_side = 'left')"
        )
    expected = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not torch.equal(positions.expand_as(expected), expected):
        raise DataError("generate: position_ids of your own cannot be honoured; leave them out")
    return [ids[kept].tolist() for ids, kept in zip(input_ids, mask, strict=True)]


def _parted(processors: LogitsProcessorList) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    """The processors of logits that are honoured, and the others, which have to warp, behind them.
    DataError for another order."""
    processing = [one for one in processors if type(one) in PROCESSORS]
    others = processors[len(processing) :]
    if any(type(one) in PROCESSORS for one in others):
        names = ", ".join(type(one).__name__ for one in processors)
        raise DataError(
            f"generate: cannot honour this order of logits processors: {names}; put those that "
            "warp (temperature, top-k, top-p) last"
        )
    return processing, others


def _sampling(processors: Sequence, do_sample: bool) -> dict:
    """Temperature, top-k and top-p, read from the processors themselves."""
    kinds = [type(processor) for processor in processors]
    if kinds != [kind for kind in WARPERS if kind in kinds] or (kinds and not do_sample):
        names = ", ".join(kind.__name__ for kind in kinds)
        allowed = ", ".join(kind.__name__ for kind in WARPERS)
        raise DataError(
            f"generate: cannot honour these logits processors: {names}; when sampling, {allowed} "
            "are possible, in this order; else none"
        )
    if any(getattr(warper, "min_tokens_to_keep", 1) != 1 for warper in processors):
        raise DataError("generate: min_tokens_to_keep of a logits warper must be 1")
    if any(getattr(warper, "filter_value", -torch.inf) != -torch.inf for warper in processors):
        raise DataError("generate: filter_value of a logits warper must be -inf")
    settings = {"temperature": 1.0 if do_sample else 0.0}
    return settings | {
        WARPERS[kind]: getattr(one, WARPERS[kind])
        for kind, one in zip(kinds, processors, strict=True)
    }
