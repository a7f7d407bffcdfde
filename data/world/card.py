"""Write the facts about the bundled target beside its weights: metrics.json and CARD.md."""

import json
from pathlib import Path

from transformers import LlamaForCausalLM

from specdraft.data.world.measures import Answer
from specdraft.data.world.world import KINDS

SAMPLES_PER_KIND = 2
HEAD = """# The bundled tiny target

A small chat model of a made-up world, trained from scratch by `python data/tiny.py`: a Llama of
{config.num_hidden_layers} layers x {config.hidden_size}, {config.num_attention_heads} heads over \
{config.num_key_value_heads} key/value heads, feed-forward {config.intermediate_size}, a
vocabulary of {config.vocab_size}, tied embeddings, {parameters:,} parameters \
({megabytes:.1f} MB in bfloat16).
It is an experimental target: small enough to train and decode on a CPU, with answers varied enough
that drafting them is real work. It knows nothing about the real world, and it often errs about its
own: the figures below say how often sums, facts and copied names are right.

- **Training.** {steps} steps, {tokens:,} tokens of fresh conversations (no fixed set), AdamW,
  {minutes:.0f} minutes on {threads} CPU threads ({speed:.0f} tokens/s).
- **Talk.** `chat` (facts about towns, people, animals, foods; follow-ups), `math` (word problems
  step by step), `code` (small Python functions), `story`, `summary` (retelling a passage of the
  prompt). One to four turns, no system prompt.
- **Held out.** A sixteenth of all user requests, chosen by a checksum of their text, never occurs
  in training; the evaluation prompts (`data/tiny/prompts.jsonl`) are drawn from that part.

All figures below: held-out requests, weights as stored (bfloat16), run in float32.

"""


def _table(metrics: dict) -> str:
    greedy, sampled, perplexity = metrics["greedy"], metrics["sampled"], metrics["perplexity"]
    by_kind = ", ".join(f"{kind} {perplexity[kind]:.2f}" for kind in KINDS)
    known = ", ".join(f"{kind} {share:.0%}" for kind, share in metrics["facts_right"].items())
    rows = [
        ("perplexity of reference answers", f"{perplexity['all']:.3f} ({by_kind})"),
        ("entropy per token at T=1, on sampled answers", f"{metrics['entropy_sampled']:.3f} nats"),
        ("entropy per token along greedy answers", f"{metrics['entropy_greedy']:.3f} nats"),
        ("chat: fact right, by what is asked about (greedy)", known),
    ]
    both = (
        ("different answers", "distinct_answers", ".0f"),
        ("tokens per answer", "mean_tokens", ".1f"),
        ("distinct-1", "distinct_1", ".4f"),
        ("distinct-2", "distinct_2", ".4f"),
        ("distinct-3", "distinct_3", ".4f"),
        ("ends by itself within 256 tokens", "ended", ".1%"),
        ("stuck in a loop (a 4-gram 5 times)", "loops", ".1%"),
        ("math: final number right", "math_right", ".1%"),
        ("summary: names no person or town but those of the prompt", "summary_faithful", ".1%"),
        ("code: block is valid Python", "code_parses", ".1%"),
    )
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    lines += ["", f"| over {greedy['answers']} prompts | greedy | T=1 |", "|---|---|---|"]
    for name, key, form in both:
        lines.append(f"| {name} | {greedy[key]:{form}} | {sampled[key]:{form}} |")
    return "\n".join(lines)


def _samples(answers: list[Answer]) -> str:
    parts = ["\n## Samples (greedy)\n"]
    for kind in KINDS:
        for made in [made for made in answers if made.kind == kind][:SAMPLES_PER_KIND]:
            parts.append(f"**{kind}**\n\n````text\n> {made.prompt}\n\n{made.text}\n````\n")
    return "\n".join(parts)


def write_card(
    out: Path,
    model: LlamaForCausalLM,
    training: dict[str, float],
    metrics: dict,
    answers: list[Answer],
) -> None:
    """Write `metrics.json` and `CARD.md` to `out`."""
    figures = {"training": training, **metrics}
    (out / "metrics.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    parameters = model.num_parameters()
    head = HEAD.format(
        config=model.config,
        parameters=parameters,
        megabytes=2 * parameters / 1e6,
        speed=training["tokens"] / (60 * training["minutes"]),
        **training,
    )
    text = head + _table(metrics) + "\n" + _samples(answers)
    (out / "CARD.md").write_text(text, encoding="utf-8")
