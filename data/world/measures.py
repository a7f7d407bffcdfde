"""Measure the bundled target on held-out requests: likelihood, entropy, variety, correctness.

Shapes: B rows, T time, V vocabulary.
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdraft.data.world.arithmetic import final_number
from specdraft.data.world.chats import question
from specdraft.data.world.lexicon import facts, words
from specdraft.data.world.tokenizer import END
from specdraft.data.world.world import KINDS, Message, to_messages

MAX_NEW_TOKENS = 256
ROWS = 40  # prompts in one batch
QUESTIONS = 50  # about the facts of each kind of thing
LOOP_NGRAM, LOOP_COUNT = 4, 5  # the same 4-gram five times in one answer counts as a loop


@dataclass(frozen=True)
class Answer:
    """One generated answer; `ended` says that the model closed it itself."""

    kind: str
    prompt: str  # the last request
    context: str  # all that was said before the answer
    reference: str
    tokens: list[int]
    text: str
    ended: bool


@torch.no_grad()
def perplexity(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    talks: Sequence[tuple[str, list[Message]]],
) -> dict[str, float]:
    """Return exp(mean negative log likelihood) of the last answers, by kind and for `all`."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kind, messages in talks:
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        start = len(_prompt_ids(tokenizer, messages[:-1]))
        tokens = torch.tensor([ids])
        logits = model(tokens).logits[:, start - 1 : -1]  # [1, answer, V]
        losses = torch.nn.functional.cross_entropy(logits[0], tokens[0, start:], reduction="sum")
        for key in (kind, "all"):
            sums[key] += losses.item()
            counts[key] += len(ids) - start
    return {key: float(torch.tensor(sums[key] / counts[key]).exp()) for key in (*KINDS, "all")}


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    talks: Sequence[tuple[str, list[Message]]],
    sample_seed: int | None = None,
) -> tuple[list[Answer], float]:
    """Answer the last request of every talk: greedily, or at T=1 when a seed is given.

    Returns the answers and the mean entropy (nats) of the model at the tokens it produced.
    """
    tokenizer.padding_side = "left"
    end = tokenizer.convert_tokens_to_ids(END)
    decoding: dict[str, object] = {"do_sample": False}
    if sample_seed is not None:
        torch.manual_seed(sample_seed)
        decoding = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    answers, entropy, count = [], 0.0, 0
    for group in (talks[first : first + ROWS] for first in range(0, len(talks), ROWS)):
        rows = [{"input_ids": _prompt_ids(tokenizer, messages[:-1])} for _, messages in group]
        inputs = tokenizer.pad(rows, return_tensors="pt")
        made = model.generate(
            **inputs,
            max_new_tokens=MAX_NEW_TOKENS,
            **decoding,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(made.logits, 1)  # [B, T, V]
        new = made.sequences[:, inputs["input_ids"].shape[1] :]  # [B, T]
        spread = torch.distributions.Categorical(logits=logits).entropy()  # [B, T]
        for (kind, messages), row, spreads in zip(group, new.tolist(), spread, strict=True):
            length = row.index(end) + 1 if end in row else len(row)
            entropy += spreads[:length].sum().item()
            count += length
            text = tokenizer.decode(row[:length], skip_special_tokens=True)
            *before, reference = (message["content"] for message in messages)
            said = before[-1], "\n".join(before), reference
            answers.append(Answer(kind, *said, row[:length], text, end in row))
    return answers, entropy / count


def _ngrams(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def distinct(answers: list[Answer], n: int) -> float:
    """Return the number of different n-grams over the number of n-grams, all answers together."""
    grams = [gram for made in answers for gram in _ngrams(made.tokens, n)]
    return len(set(grams)) / len(grams)


def loops(made: Answer) -> bool:
    """Say whether one n-gram comes back so often that the answer must be stuck."""
    counts = Counter(_ngrams(made.tokens, LOOP_NGRAM))
    return max(counts.values(), default=0) >= LOOP_COUNT


def _parses(text: str) -> bool:
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    try:
        return block is not None and bool(ast.parse(block[1]).body)
    except SyntaxError:
        return False


def faithful(made: Answer) -> bool:
    """Say whether every person and town of an answer was named before the answer."""
    return all(
        word in made.context for word in (*words("names"), *words("towns")) if word in made.text
    )


@torch.no_grad()
def facts_right(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Ask QUESTIONS about each kind of thing; return how often the fact is in the answer.

    The facts are part of training; how they are asked for is drawn anew.
    """
    rng = random.Random(0)
    shares = {}
    for kind in facts():
        talks, values = [], []
        for _ in range(QUESTIONS):
            x = rng.choice(list(facts()[kind]))
            attribute = rng.choice(list(facts()[kind][x]))
            talks.append((kind, to_messages([question(rng, kind, x, attribute)])))
            values.append(facts()[kind][x][attribute])
        made, _ = answer(model, tokenizer, talks)
        shares[kind] = _share([v in a.text for v, a in zip(values, made, strict=True)])
    return shares


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def _behaviour(answers: list[Answer]) -> dict[str, float]:
    of_kind = {kind: [made for made in answers if made.kind == kind] for kind in KINDS}
    solved = [final_number(a.text) == final_number(a.reference) for a in of_kind["math"]]
    return {
        "answers": len(answers),
        "distinct_answers": len({made.text for made in answers}),
        "mean_tokens": sum(len(made.tokens) for made in answers) / len(answers),
        **{f"distinct_{n}": distinct(answers, n) for n in (1, 2, 3)},
        "ended": _share([made.ended for made in answers]),
        "loops": _share([loops(made) for made in answers]),
        "math_right": _share(solved),
        "summary_faithful": _share([faithful(made) for made in of_kind["summary"]]),
        "code_parses": _share([_parses(made.text) for made in of_kind["code"]]),
    }


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[tuple[str, list[Message]]],
    references: Sequence[tuple[str, list[Message]]],
) -> tuple[dict[str, object], list[Answer]]:
    """Return all figures and the greedy answers to `prompts`.

    `prompts` are answered by the model; `references` (any number of held-out conversations) are
    what the perplexity is taken on. Entropies are in nats.
    """
    greedy, greedy_entropy = answer(model, tokenizer, prompts)
    sampled, entropy = answer(model, tokenizer, prompts, sample_seed=0)
    metrics = {
        "perplexity": perplexity(model, tokenizer, references),
        "reference_conversations": len(references),
        "entropy_sampled": entropy,
        "entropy_greedy": greedy_entropy,
        "facts_right": facts_right(model, tokenizer),
        "greedy": _behaviour(greedy),
        "sampled": _behaviour(sampled),
    }
    return metrics, greedy
