"""The published prompt sets, by name: from the Hub, or from a file in their published format.

    eval.prompts: gsm8k                       the Hub's copy, test split
    eval.prompts: gsm8k:path/to/test.jsonl    a file: JSONL, JSON, Parquet or a saved dataset

A row becomes one question of one or more user turns. Summaries and translations are asked for in
the words of Spec-Bench (arXiv 2401.07851), whose eight MT-bench categories count as one task;
competition problems in those of Qwen, programs in those of LiveCodeBench. The nine sets of DeepSpec
are also read from its own files (eval_datasets/*.jsonl), whose rows are {"turns": [..]}: their
first turns are what its figures are of.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.data.chat import BrokenRowError
from specdraft.data.protocols import (
    DEEPSPEC,
    DRAFT_LMS,
    MT_BENCH,
    SPEC_BENCH,
    SPEED_BENCH,
    Protocol,
)
from specdraft.data.sources import Row, Source
from specdraft.recipes.errors import DataError, in_a_line
from specdraft.recipes.interrupt import abandonable
from specdraft.recipes.sections.evaluation import EvalSection

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
    """How a set's rows are read, and how its published figures are made.

    hub: repository, configuration and split of the Hub, or the address of a file there.
    """

    turns: Callable[[Mapping], Turns]  # raises KeyError, TypeError for a row of another format
    format: str  # of a row, as it is published
    hub: tuple[str, str | None, str] | str | None
    protocol: Protocol
    questions: int | None = None  # that published figures are of
    category: Callable[[Mapping], str] | None = None

    def departures(self, settings: EvalSection, trees: bool, turns: Sequence[int]) -> Iterator[str]:
        """Yield where a measurement departs from the protocol, a phrase each.

        trees: whether its drafts branch; turns: of every question that it asks.
        """
        yield from self.protocol.departures(settings, trees, max(turns))
        if self.questions not in (None, len(turns)):
            yield f"{len(turns)} questions, not {self.questions}"


def _deepspec(own: Callable[[Mapping], Any]) -> Callable[[Mapping], Turns]:
    """Read a row of DeepSpec's files, or one of the set's own form, which asks one question."""
    return lambda row: row["turns"][:1] if "turns" in row else [own(row)]


def _alpaca(row: Mapping) -> Any:
    asked, text = row["instruction"], row.get("input")
    return f"{asked}\n\n{text}" if isinstance(asked, str) and text else asked


def _boxed(row: Mapping) -> str:
    return (
        row["problem"] + "\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def _program(row: Mapping) -> str:
    how = "Read the input from stdin, solve the problem and write the answer to stdout."
    if code := row["starter_code"]:
        how = "Use the following starter code."
    answer = f"```python\n{code or '# YOUR CODE HERE'}\n```"
    return f"### Question:\n{row['question_content']}\n\n### Format: {how}\n{answer}\n\n### Answer:"


def _arena(row: Mapping) -> Turns:
    if "turns" not in row:
        return [row["prompt"]]
    first = row["turns"][:1]  # of v0.1 an object, of DeepSpec a text
    return [turn["content"] if isinstance(turn, Mapping) else turn for turn in first]


def _spec_bench_task(row: Mapping) -> str:
    return "mt_bench" if row["category"] in MT_BENCH_CATEGORIES else row["category"]


def _speed_bench(row: Mapping) -> Turns:
    if any(MASKED in turn for turn in row["turns"]):
        raise BrokenRowError(
            "a text that is not published with the set; fetch all with prepare_data.py of "
            "github.com/NVIDIA/Model-Optimizer, examples/specdec_bench, and give its file"
        )
    return row["turns"]


def _of_speed_bench(split: str, questions: int) -> PromptSet:
    hub = ("nvidia/SPEED-Bench", split, "test")
    return PromptSet(_speed_bench, _TURNS, hub, SPEED_BENCH, questions, lambda row: row["category"])


MT_BENCH_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # SPEED-Bench's, in place of texts
# Keys of a row's id; else it is the line.
_IDS = ("id", "question_id", "prompt_id", "task_id", "unique_id", "uid")
_TURNS = '{"question_id": .., "category": "..", "turns": ["..", ..]}'
_PROBLEM = '{"problem": "..", "answer": ".."}'
SETS = {
    "mt_bench": PromptSet(
        lambda row: row["turns"] if "turns" in row else row["prompt"],
        _TURNS,
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        MT_BENCH,
        80,
        lambda row: row["category"],
    ),
    "humaneval": PromptSet(
        _deepspec(lambda row: row["prompt"]),
        '{"task_id": "..", "prompt": ".."}',
        ("openai/openai_humaneval", None, "test"),
        DEEPSPEC,
        164,
    ),
    "gsm8k": PromptSet(
        _deepspec(lambda row: row["question"]),
        '{"question": "..", "answer": ".."}',
        ("openai/gsm8k", "main", "test"),
        DEEPSPEC,
        500,
    ),
    "math500": PromptSet(
        _deepspec(_boxed),
        _PROBLEM,
        ("HuggingFaceH4/MATH-500", None, "test"),
        DEEPSPEC,
        500,
    ),
    "aime25": PromptSet(
        _deepspec(_boxed), _PROBLEM, ("math-ai/aime25", None, "test"), DEEPSPEC, 30
    ),
    "mbpp": PromptSet(
        _deepspec(lambda row: row["prompt"] if "prompt" in row else row["text"]),
        '{"task_id": .., "prompt": ".."}, or of the full set "text"',
        ("google-research-datasets/mbpp", "sanitized", "test"),
        DEEPSPEC,
        256,
    ),
    "livecodebench": PromptSet(  # its last release, 175 problems; all are files of gigabytes
        _deepspec(_program),
        '{"question_id": "..", "question_content": "..", "starter_code": ".."}',
        "hf://datasets/livecodebench/code_generation_lite/test6.jsonl",
        DEEPSPEC,
        500,
    ),
    "arena_hard": PromptSet(
        _arena,
        '{"uid": "..", "prompt": ".."}, or of v0.1 {"turns": [{"content": ".."}]}',
        "hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",
        DEEPSPEC,
        500,
    ),
    "alpaca": PromptSet(
        _deepspec(_alpaca),
        '{"instruction": "..", "input": "..", "output": ".."}',
        ("tatsu-lab/alpaca", None, "train"),
        DEEPSPEC,
        500,
    ),
    "cnn_dailymail": PromptSet(
        lambda row: ["Summarize: " + row["article"]],
        '{"article": "..", "highlights": "..", "id": ".."}',
        ("abisee/cnn_dailymail", "3.0.0", "test"),
        DRAFT_LMS,
    ),
    "xsum": PromptSet(
        lambda row: ["Summarize: " + row["document"]],
        '{"document": "..", "summary": "..", "id": ".."}',
        ("EdinburghNLP/xsum", None, "test"),
        DRAFT_LMS,
    ),
    "wmt14_en_de": PromptSet(
        lambda row: ["Translate English to German: " + row["translation"]["en"]],
        '{"translation": {"en": "..", "de": ".."}}',
        ("wmt/wmt14", "de-en", "test"),
        DRAFT_LMS,
    ),
    "spec_bench": PromptSet(
        lambda row: row["turns"], _TURNS, None, SPEC_BENCH, 480, _spec_bench_task
    ),
    "speed_bench": _of_speed_bench("qualitative", 880),
    **{
        f"speed_bench_{length}": _of_speed_bench(f"throughput_{length}", 1536)
        for length in ("1k", "2k", "8k", "16k", "32k")  # tokens of a prompt
    },
}


def set_of(name: str) -> PromptSet | None:
    """Return the published set that `eval.prompts` names, with or without a file; None for prompts
    of one's own."""
    return SETS.get(name.partition(":")[0])


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
    category = chosen.category(row.value) if chosen.category else name
    return Question(place, row.called(_IDS), category, turns)


def _of_hub(name: str, hub: tuple[str, str | None, str] | str | None) -> Iterator[Row]:
    if hub is None:
        raise DataError(
            f"eval.prompts = {name}: not on the Hub under a name of its own; get "
            f"{SPEC_BENCH_FILE} and give {name}:PATH"
        )
    import datasets

    repository, *which = [hub] if isinstance(hub, str) else hub
    try:
        if not which:
            return Source(repository).rows()
        configuration, split = which
        dataset = abandonable(datasets.load_dataset, repository, configuration, split=split)
    except Exception as error:
        raise DataError(
            f"eval.prompts = {name}: cannot fetch {repository} from the Hub ({in_a_line(error)}); "
            f"give its file as {name}:PATH"
        ) from error
    return (Row(repository, line, value) for line, value in enumerate(dataset, 1))
