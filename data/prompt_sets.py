"""The published prompt sets, by name: from the Hub, or from a file in their published format.

    eval.prompts: gsm8k                       the Hub's copy, test split
    eval.prompts: gsm8k:path/to/test.jsonl    a file: JSONL, JSON, Parquet or a saved dataset

A row becomes one question of one or more user turns. Summaries and translations are asked for in
the words of Spec-Bench (arXiv 2401.07851), whose eight MT-bench categories count as one task.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.data.chat import BrokenRowError
from specdraft.data.sources import Row, Source
from specdraft.recipes.errors import DataError, in_a_line

Turns = list[Any]  # of the user; checked to be text
SPEC_BENCH_FILE = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"


@dataclass(frozen=True)
class Question:
    """What one row asks. `turns` are the user's; the second one follows the target's answer."""

    place: str  # source:line
    id: str
    category: str
    turns: list[str]


@dataclass(frozen=True)
class PromptSet:
    """How a set's rows are read. `hub` is repository, configuration and split of the Hub."""

    turns: Callable[[Mapping], Turns]  # raises KeyError, TypeError for a row of another format
    format: str  # of a row, as it is published
    hub: tuple[str, str | None, str] | None
    category: Callable[[Mapping], str] | None = None


def _alpaca(row: Mapping) -> Turns:
    asked, text = row["instruction"], row.get("input")
    return [f"{asked}\n\n{text}" if isinstance(asked, str) and text else asked]


def _spec_bench_task(row: Mapping) -> str:
    return "mt_bench" if row["category"] in MT_BENCH_CATEGORIES else row["category"]


MT_BENCH_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
_IDS = ("id", "question_id", "prompt_id", "task_id")  # keys of a row's id; else it is the line
_TURNS = '{"question_id": .., "category": "..", "turns": ["..", ..]}'
SETS = {
    "mt_bench": PromptSet(
        lambda row: row["turns"] if "turns" in row else row["prompt"],
        _TURNS,
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        lambda row: row["category"],
    ),
    "humaneval": PromptSet(
        lambda row: [row["prompt"]],
        '{"task_id": "..", "prompt": ".."}',
        ("openai/openai_humaneval", None, "test"),
    ),
    "gsm8k": PromptSet(
        lambda row: [row["question"]],
        '{"question": "..", "answer": ".."}',
        ("openai/gsm8k", "main", "test"),
    ),
    "alpaca": PromptSet(
        _alpaca,
        '{"instruction": "..", "input": "..", "output": ".."}',
        ("tatsu-lab/alpaca", None, "train"),
    ),
    "cnn_dailymail": PromptSet(
        lambda row: ["Summarize: " + row["article"]],
        '{"article": "..", "highlights": "..", "id": ".."}',
        ("abisee/cnn_dailymail", "3.0.0", "test"),
    ),
    "xsum": PromptSet(
        lambda row: ["Summarize: " + row["document"]],
        '{"document": "..", "summary": "..", "id": ".."}',
        ("EdinburghNLP/xsum", None, "test"),
    ),
    "wmt14_en_de": PromptSet(
        lambda row: ["Translate English to German: " + row["translation"]["en"]],
        '{"translation": {"en": "..", "de": ".."}}',
        ("wmt/wmt14", "de-en", "test"),
    ),
    "spec_bench": PromptSet(lambda row: row["turns"], _TURNS, None, _spec_bench_task),
}


def is_prompt_set(name: str) -> bool:
    """Whether `eval.prompts` names a published set, with or without a file."""
    return name.partition(":")[0] in SETS


def read_questions(name: str) -> Iterator[Question]:
    """Yield the questions of a set, NAME or NAME:FILE, in its order.

    Raises: DataError for a set that cannot be fetched, and at the first row of another format.
    """
    base, _, path = name.partition(":")
    chosen = SETS[base]
    if path and not Path(path).expanduser().exists():
        raise DataError(f"eval.prompts = {name}: no file at {path}")
    for row in Source(path).rows() if path else _of_hub(base, chosen.hub):
        place = f"{row.source}:{row.line}"
        if row.problem:
            raise DataError(f"{place}: {row.problem}")
        try:
            yield _question(base, chosen, place, row)
        except (KeyError, TypeError, BrokenRowError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"{place}: not a row of {base} ({reason}); its format is {chosen.format}"
            ) from error


def _question(name: str, chosen: PromptSet, place: str, row: Row) -> Question:
    if not isinstance(row.value, Mapping):
        raise BrokenRowError(f"{type(row.value).__name__} is not an object")
    turns = chosen.turns(row.value)
    if not isinstance(turns, list) or not turns:
        raise BrokenRowError("no turns")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise BrokenRowError("an empty question, or one that is no text")
    identifier = next((row.value[key] for key in _IDS if key in row.value), row.line)
    category = chosen.category(row.value) if chosen.category else name
    return Question(place, str(identifier), category, turns)


def _of_hub(name: str, hub: tuple[str, str | None, str] | None) -> Iterator[Row]:
    if hub is None:
        raise DataError(
            f"eval.prompts = {name}: not on the Hub under a name of its own; get "
            f"{SPEC_BENCH_FILE} and give {name}:PATH"
        )
    import datasets

    repository, configuration, split = hub
    try:
        dataset = datasets.load_dataset(repository, configuration, split=split)
    except Exception as error:
        raise DataError(
            f"eval.prompts = {name}: cannot fetch {repository} from the Hub ({in_a_line(error)}); "
            f"give its file as {name}:PATH"
        ) from error
    return (Row(repository, line, value) for line, value in enumerate(dataset, 1))
