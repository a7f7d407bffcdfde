"""Tiny random encoder-decoders, and what they generate for sources by themselves."""

import torch
import transformers
from random_models import VOCAB
from torch import nn
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from specdraft.eval.engine.request import Request
from specdraft.models.target import Target

_T5 = {
    "d_model": 16,
    "d_kv": 5,
    "d_ff": 32,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
_BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "pad_token_id": 1,
}
# Class, settings, and whether lm_head has its own matrix.
FAMILIES = {
    "t5": ("T5", _T5, False),
    "flan-t5": (
        "T5",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        True,
    ),
    "bart": ("Bart", _BART, True),
    "mbart": ("MBart", {**_BART, "scale_embedding": True}, True),
    "pegasus": ("Pegasus", _BART, True),
}


def random_seq2seq(name: str = "flan-t5", seed: int = 2, **changes) -> Target:
    """A tiny encoder-decoder with random weights, sharp enough that nothing is a near-tie."""
    torch.manual_seed(seed)
    kind, settings, untied = FAMILIES[name]
    common = {"vocab_size": VOCAB, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**{**common, **settings, **changes})
    model = AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases, which would start at one and zero
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "relative" in part:
                parameter.normal_(std=2.0)
            else:
                embeds = "embed" in part or "shared" in part
                parameter.normal_(std=1.0 if embeds else 0.8 if kind == "T5" else 0.3)
        if untied:
            model.lm_head.weight = nn.Parameter(2.0 * torch.randn_like(model.lm_head.weight))
    if name == "bart":  # as in published models
        model.generation_config.forced_bos_token_id = 5
    return Target(model, None, name)


def generated(target: Target, source: list[int], length: int) -> list[int]:
    """New tokens that the family's own `generate` gives for a source."""
    ids = torch.tensor([source], device=target.device)
    options = {"max_new_tokens": length + len(target.start_ids) - 1, "do_sample": False}
    # The default cache would have as many layers as the encoder.
    options["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    output = target.model.generate(input_ids=ids, num_beams=1, **options)
    return output[0, len(target.start_ids) :].tolist()


def asked(target: Target, sources: list[list[int]], length: int = 12, **settings) -> list[Request]:
    """A request for each source."""
    return [
        Request(target.start_ids, length, source=source, seed=n, **settings)
        for n, source in enumerate(sources)
    ]
