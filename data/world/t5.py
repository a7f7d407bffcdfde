"""Train a small encoder-decoder from scratch on pairs drawn while it trains: a FLAN-T5 in shape.

Shapes: B rows, S tokens of a source, T tokens of a target, V vocabulary.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from specdraft.data.world.pairs import pairs, word_salad
from specdraft.data.world.tokenizer import END, PAD, VOCAB_SIZE
from specdraft.data.world.training import TrainSettings, learn

POOL = 64  # batches drawn at once, so that rows of a length stand together
SALADS = 0.4  # of all pairs
IGNORED = -100


def build_t5(tokenizer: PreTrainedTokenizerFast, seed: int) -> T5ForConditionalGeneration:
    """Return the untrained model: 6 layers that read and 6 that write, 128 wide."""
    torch.manual_seed(seed)
    eos, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=128,
            d_kv=32,
            d_ff=344,
            num_layers=6,  # as many that write: transformers' own `generate` counts on it
            num_heads=4,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            dropout_rate=0.0,
            eos_token_id=eos,
            pad_token_id=pad,
            decoder_start_token_id=pad,
        )
    )
    # FLAN-T5's lm_head is a matrix of its own, which a config alone cannot say any more.
    weight = torch.randn(VOCAB_SIZE, model.config.d_model) * model.config.d_model**-0.5
    model.lm_head.weight = torch.nn.Parameter(weight)
    # To copy is to find what came before: one head of the encoder's begins by looking there.
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    with torch.no_grad():
        bias[1, 0] += 8.0  # the bucket of the token before
    return model


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield (tokens, (sources [B, S], targets [B, T])) of fresh pairs, padded on the right.

    B * (S + T) is at most `tokens`. Targets are padded with IGNORED.
    """
    stream, order, backend = pairs(seed), random.Random(seed), tokenizer.backend_tokenizer
    eos = tokenizer.eos_token_id
    while True:
        rows, drawn = [], 0
        while drawn < POOL * tokens:
            source, target = word_salad(order) if order.random() < SALADS else next(stream)
            rows.append((backend.encode(source).ids, [*backend.encode(target).ids, eos]))
            drawn += len(rows[-1][0]) + len(rows[-1][1])
        rows.sort(key=lambda row: (len(row[0]), len(row[1])))
        parts = _parts(rows, tokens)
        order.shuffle(parts)
        for part in parts:
            sources, targets = zip(*part, strict=True)
            count = sum(map(len, sources)) + sum(map(len, targets))
            yield count, (_pad(sources, tokenizer.pad_token_id), _pad(targets, IGNORED))


def _parts(rows: list, tokens: int) -> list[list]:
    """Rows in their order, in parts that hold `tokens` with their padding."""
    parts, longest = [[]], (0, 0)
    for row in rows:
        longest = tuple(max(a, len(b)) for a, b in zip(longest, row, strict=True))
        if parts[-1] and (len(parts[-1]) + 1) * sum(longest) > tokens:
            parts.append([])
            longest = tuple(map(len, row))
        parts[-1].append(row)
    return parts


def _pad(rows: tuple[list[int], ...], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value)


def loss_of(model: T5ForConditionalGeneration, sources: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets' tokens, in nats."""
    mask = sources != model.config.pad_token_id
    logits = model(input_ids=sources, attention_mask=mask, labels=targets).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def train_t5(settings: TrainSettings, tokenizer: PreTrainedTokenizerFast, out: Path) -> dict:
    """Train a model made from nothing and keep `out` up to date; returns as `learn`."""
    model = build_t5(tokenizer, settings.seed)
    stream = batches(tokenizer, settings.seed, settings.tokens_per_step)
    return learn(model, stream, lambda batch: loss_of(model, *batch), settings, out)
