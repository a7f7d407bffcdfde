"""Figures per category and per question, as Spec-Bench takes them (arXiv 2401.07851, speed.py).

Tokens per step are pooled over all steps. Macro-averages are those of every question, all its turns
together, then their mean: of tokens per second, where the speedup is the ratio of two such means,
and of tokens per step (SPEED-Bench's acceptance length). Time belongs to a question only where it
is decoded alone, at batch size 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from specdraft.data.prompts import Prompt
from specdraft.eval.measure.outcome import Outcome


@dataclass
class Answered:
    """One question with all its turns. Seconds are None where it shared a batch."""

    id: str
    category: str
    outputs: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float | None = 0.0


def by_category(prompts: Sequence[Prompt], parts: Sequence[Outcome]) -> list[dict]:
    """One entry per category, in the order of the prompts."""
    groups: dict[str, list[Answered]] = {}
    for question in _questions(prompts, parts):
        groups.setdefault(question.category, []).append(question)
    return [{"category": name} | _figures(group) for name, group in groups.items()]


def macro(prompts: Sequence[Prompt], parts: Sequence[Outcome]) -> dict:
    """Means over questions: of tokens per step, and of tokens per second; None of these where they
    were not decoded alone."""
    return _macro(_questions(prompts, parts))


def add_speedups(row: dict, plain: dict | None) -> None:
    """Divide a run's macro averages, and those of its categories, by plain decoding's."""
    bases = plain["categories"] if plain else [None] * len(row["categories"])
    pairs = [(row, plain), *zip(row["categories"], bases, strict=True)]
    for ours, base in pairs:
        known = base and base["macro_tokens_per_second"] and ours["macro_tokens_per_second"]
        ratio = known and ours["macro_tokens_per_second"] / base["macro_tokens_per_second"]
        ours["macro_speedup"] = ratio or None


def _questions(prompts: Sequence[Prompt], parts: Sequence[Outcome]) -> list[Answered]:
    answers = [(done, part) for part in parts for done in part.completions]
    questions: list[Answered] = []
    for prompt, (done, part) in zip(prompts, answers, strict=True):
        # A later turn opens its question where the first one failed.
        if prompt.turn == 1 or not questions or questions[-1].id != prompt.id:
            questions.append(Answered(prompt.id, prompt.category))
        last = questions[-1]
        last.outputs += 1
        last.tokens += len(done.tokens)
        last.steps += len(done.steps)
        alone = len(part.completions) == 1 and last.seconds is not None
        last.seconds = last.seconds + part.seconds if alone else None
    return questions


def _figures(questions: list[Answered]) -> dict:
    tokens, steps = sum(q.tokens for q in questions), sum(q.steps for q in questions)
    return {
        "questions": len(questions),
        "outputs": sum(q.outputs for q in questions),
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
    } | _macro(questions)


def _macro(questions: list[Answered]) -> dict:
    alone = all(question.seconds is not None for question in questions)
    speeds = [question.tokens / question.seconds for question in questions] if alone else []
    return {
        "macro_tokens_per_step": fmean(q.tokens / q.steps for q in questions),
        "macro_tokens_per_second": fmean(speeds) if alone else None,
    }
