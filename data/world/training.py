"""Train the bundled target from scratch on conversations drawn while it trains.

Shapes: B rows, T time, H hidden, V vocabulary.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specdraft.data.world.tokenizer import ASSISTANT, END, PAD, USER, VOCAB_SIZE
from specdraft.data.world.world import conversation
from specdraft.models.families.finish import PLAIN, Finish, finish_of

logger = logging.getLogger(__name__)
SAVE_SECONDS = 300
LENGTHS = (64, 112, 160, 224, 320, 448)  # padded lengths of training rows


@dataclass(frozen=True)
class TrainSettings:
    """How long and how fast the target learns. `minutes` ends a run early on a slow machine."""

    steps: int = 6000
    minutes: float | None = None
    tokens_per_step: int = 2048
    lr: float = 3e-3
    warmup: int = 200
    decay_share: float = 0.35  # the last part of the run, in which lr falls to a hundredth
    weight_decay: float = 0.1
    prompt_weight: float = 0.1  # loss on the user's words; answers weigh 1
    compile: bool = True  # 1.5 times as fast; needs a C++ compiler
    seed: int = 0


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained target: 12 layers x 128, deep and narrow."""
    torch.manual_seed(seed)
    eos, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    layers = 12
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        initializer_range=0.02,
        attn_implementation="eager",  # faster than sdpa on a CPU at these lengths
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            # Variance 1 / fan-in; what writes into the residual stream is scaled by its depth.
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = weight.shape[1] ** -0.5 / (math.sqrt(2 * layers) if last else 1)
            torch.nn.init.normal_(weight, std=std)
    return model


def build_variant(start: Path, changes: dict) -> PreTrainedModel:
    """Return the target in `start` with settings of its configuration changed, `model_type` among
    them: what has the same name and shape there keeps its weights, the rest is random.

    Raises ValueError where transformers has no such model.
    """
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    values = {**model.config.to_dict(), **changes, "attn_implementation": "eager"}
    torch.manual_seed(0)
    variant = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    own, kept = variant.state_dict(), model.state_dict()
    fitting = {name: w for name, w in kept.items() if name in own and own[name].shape == w.shape}
    variant.load_state_dict(fitting, strict=False)
    return variant


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple:
    """Return the tokens of a conversation and the weight class of each (True: the answer's)."""
    marks = {"user": USER, "assistant": ASSISTANT}
    ids: list[int] = []
    answer: list[bool] = []
    backend = tokenizer.backend_tokenizer
    for message in messages:
        piece = backend.encode(f"{marks[message['role']]}{message['content']}{END}").ids
        ids += piece
        answer += [False] + [message["role"] == "assistant"] * (len(piece) - 1)
    return ids, answer


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int, prompt_weight: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids [B, T], weights [B, T]) of fresh conversations, B * T at most `tokens`.

    T is one of `LENGTHS` and B follows from it: few shapes, so that layers can be compiled.
    """
    rng = random.Random(seed)
    waiting: dict[int, list[tuple[list[int], list[bool]]]] = {length: [] for length in LENGTHS}
    while True:
        ids, answer = encode(tokenizer, conversation(rng))
        if len(ids) > LENGTHS[-1]:
            continue
        length = next(n for n in LENGTHS if n >= len(ids))
        rows = waiting[length]
        rows.append((ids, answer))
        if (len(rows) + 1) * length > tokens:
            yield _pad(rows, length, tokenizer.pad_token_id, prompt_weight)
            rows.clear()


def _pad(
    rows: list[tuple[list[int], list[bool]]], length: int, pad: int, prompt_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the ids and the loss weights of `rows`, padded on the right to `length`."""
    ids = torch.full((len(rows), length), pad)
    weights = torch.zeros(len(rows), length)
    for n, (row, answer) in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row)
        weights[n, : len(row)] = torch.where(torch.tensor(answer), 1.0, prompt_weight)
    return ids, weights


def loss_of(model: PreTrainedModel, ids: Tensor, weights: Tensor, finish: Finish = PLAIN) -> Tensor:
    """Return the weighted mean cross-entropy of the next tokens, in nats."""
    # Rows are padded on the right, so the causal mask alone keeps padding out.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T-1, H]
    labels, weights = ids[:, 1:], weights[:, 1:]
    kept = weights > 0
    logits = finish(model.lm_head(hidden[kept]).float())  # [kept, V]
    losses = F.cross_entropy(logits, labels[kept], reduction="none")
    return (losses * weights[kept]).sum() / weights.sum()


def learning_rate(settings: TrainSettings, step: int, share: float) -> float:
    """Warm-up, constant, then a linear fall; `share` in [0, 1] is how much of the run is over."""
    rise = min(1.0, (step + 1) / settings.warmup)
    fall = min(1.0, max(0.01, (1 - share) / settings.decay_share))
    return settings.lr * rise * fall


def save(model: PreTrainedModel, out: Path) -> None:
    """Write the weights as bfloat16 safetensors, with their config, to `out`."""
    copy = deepcopy(model).to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
        do_sample=False,
        max_new_tokens=256,
    )
    copy.save_pretrained(out)


def load_trained(out: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load what `save` wrote, in float32, as users of the target do."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(out)


def _optimizer(model: PreTrainedModel, settings: TrainSettings) -> torch.optim.Optimizer:
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() == 2], "weight_decay": settings.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def train(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    model: PreTrainedModel | None = None,
) -> dict[str, float]:
    """Train on fresh conversations and keep `out` up to date.

    model: trained on; None: one made from nothing. Returns as `learn`.
    """
    model = model or build_model(tokenizer, settings.seed)
    finish = finish_of(model)
    if settings.compile:
        for layer in model.model.layers:
            # The index only serves a KV cache; equal layers share one compiled graph per shape.
            layer.self_attn.layer_idx = 0
            layer.compile(dynamic=False)
    stream = batches(tokenizer, settings.seed, settings.tokens_per_step, settings.prompt_weight)
    seen = ((int((weights > 0).sum()), (ids, weights)) for ids, weights in stream)
    return learn(model, seen, lambda batch: loss_of(model, *batch, finish), settings, out)


def learn(
    model: PreTrainedModel,
    stream: Iterable[tuple[int, tuple]],
    loss: Callable[[tuple], Tensor],
    settings: TrainSettings,
    out: Path,
) -> dict[str, float]:
    """Train for `settings.steps` steps (or `settings.minutes`) and keep `out` up to date.

    stream: batches, each after the tokens in it; loss: of a batch.
    Returns how long it took: steps, tokens (without padding), minutes and threads.
    """
    optimizer = _optimizer(model, settings)
    # A CPU without instructions for it takes eight times as long in bfloat16 as in float32.
    halved = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    started = saved = time.monotonic()
    seen, done, mean = 0, 0, None
    for step, (count, batch) in zip(range(settings.steps), stream, strict=False):
        share = step / settings.steps
        if settings.minutes is not None:
            share = max(share, (time.monotonic() - started) / (60 * settings.minutes))
        if share >= 1:
            break
        lr = learning_rate(settings, step, share)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halved):
            value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen, done = seen + count, step + 1
        mean = value.item() if mean is None else 0.98 * mean + 0.02 * value.item()
        if step % 50 == 0:
            logger.info(
                "step %d/%d  loss %.4f  lr %.2e  norm %.2f  %.0f tokens/s  %.1f min",
                step, settings.steps, mean, lr, norm,
                seen / (time.monotonic() - started), (time.monotonic() - started) / 60,
            )  # fmt: skip
        if time.monotonic() - saved > SAVE_SECONDS:
            save(model, out)
            saved = time.monotonic()
    save(model, out)
    minutes = (time.monotonic() - started) / 60
    threads = torch.get_num_threads()
    return {"steps": done, "tokens": seen, "minutes": minutes, "threads": threads}
