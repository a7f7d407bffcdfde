"""measured.jsonl: what a benchmark has measured so far, so that one that is cut off goes on there.

The first line says what the figures depend on: hashes of recipe, prompts and weights, and the
machine. Figures of two machines are no comparison: where a single one differs, all starts afresh.
Every other line is one round (eval/measure/rounds.py), with all that its methods have made of it.
The file is gone once report.json is there.
"""

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from specdraft.data.atomic import cut_torn_line, stating_shortfall
from specdraft.eval.engine.request import Completion, Step
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.rounds import Round, RoundId
from specdraft.recipes.errors import DataError

NAME = "measured.jsonl"


class Logbook:
    """The rounds of a benchmark, of which a setting (prompts, batch size, temperature) is one part.

    depends_on: what the figures depend on, by name, as JSON.
    """

    def __init__(self, folder: Path, depends_on: Mapping[str, Any]):
        self.path = folder / NAME
        folder.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)
        head, self.rounds = self._read()
        changed = sorted(k for k in {*head, *depends_on} if head.get(k) != depends_on.get(k))
        self.note = ""  # what a user should know
        if head and changed:
            self.note = f"{self.path} was made with another {', '.join(changed)}: starting afresh"
        elif self.rounds:
            known = len(self.rounds)
            self.note = f"continuing from the {known} turns of this benchmark in {self.path}"
        self.file = self.path.open("w" if changed else "a", encoding="utf-8")
        if changed:
            self.rounds = {}
            self._write(depends_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def remember(self, part: int, number: RoundId, make: Callable[[], Round]) -> Round:
        """Return a round of a part: as it was, or made and written down now."""
        if known := self.rounds.get((part, *number)):
            outcomes = json.loads(known)["outcomes"]
            return {name: _outcome(fields) for name, fields in outcomes.items()}
        made = make()
        self._write({"place": [part, *number], "outcomes": made})
        return made

    def remove(self) -> None:
        """Forget everything: it is in the report."""
        self.file.close()
        self.path.unlink()

    def _read(self) -> tuple[dict, dict[tuple[int, ...], str]]:
        """The first line, and the others by their place, as they are: few are needed at a time."""
        written = self.path.read_bytes() if self.path.exists() else b""
        try:
            lines = written.decode().splitlines()
            places = [tuple(json.loads(line)["place"]) for line in lines[1:]]
            head = json.loads(lines[0]) if lines else {}
            if not isinstance(head, dict):
                raise TypeError
            return head, dict(zip(places, lines[1:], strict=True))
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{self.path} is damaged; delete it to measure afresh") from None

    def _write(self, record: Mapping[str, Any]) -> None:
        with stating_shortfall(self.path):
            self.file.write(json.dumps(record, default=_plain) + "\n")
            self.file.flush()


def _plain(value: Any) -> Any:
    """Arrays as lists, outcomes and what they hold as dicts."""
    if isinstance(value, array):
        return value.tolist()
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _outcome(values: dict) -> Outcome:
    values["completions"] = [
        Completion(**one | {"steps": [_step(step) for step in one["steps"]]})
        for one in values["completions"]
    ]
    values["timing"] = Timing(**values["timing"])
    return Outcome(**values | {key: tuple(values[key]) for key in ("drafter_passes", "tries")})


def _step(values: dict) -> Step:
    return Step(**values | {key: tuple(values[key]) for key in ("parents", "path")})
