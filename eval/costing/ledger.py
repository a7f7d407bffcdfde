"""costs.json while it is measured, and when it is whole.

It says what its figures depend on: the machine, the target with its dtype, the drafter. Points are
written down as they come, and the same command goes on behind them; those of another version,
machine or target are dropped, those of another drafter where drafts are what was measured.

    {"schema": 2, "recipe": .., "environment": {..}, "target": {..}, "drafter": {..} or null,
     "points": [{"what": "verify", "rows": 1, "nodes": 4, "cached": 64, "ms": 0.9, "tries": [..]}],
     "model": null, or what eval/pricing/cost.py reads}
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from specdraft.data.atomic import write_atomic
from specdraft.eval.costing.bench import Cell, Key
from specdraft.eval.costing.curves import fit, knots
from specdraft.eval.pricing.cost import SCHEMA, CostModel, draft_terms, loop_terms, verify_terms
from specdraft.recipes.errors import DataError

BUSY = 0.08  # unrest of a machine that does something else, too
PATIENCE = 1.0  # seconds of measuring that may be lost: to write takes longer than most points
# Of the environment, what does not say which machine it is.
ELSEWHERE = ("commit", "python")
_verify_terms = partial(verify_terms, knots=(1,))
TERMS = {"verify": _verify_terms, "ragged": _verify_terms, "loop": loop_terms, "draft": draft_terms}


class Ledger:
    """Points of a machine, a target and a drafter, by what they are of.

    subject: "environment", "target" and "drafter", as JSON; what is there of another is dropped.
    """

    def __init__(self, path: Path, recipe: str, subject: Mapping[str, Any]):
        self.path, self.recipe = path, recipe
        self.subject = json.loads(json.dumps(subject))  # as it is read again
        self.points: dict[Key, dict] = {}
        self.model: CostModel | None = None
        self.note = ""  # what a user should know
        self._written = time.monotonic()
        if path.exists():
            self._take_over(self._read())

    def _read(self) -> dict:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            list(differing(content, self.subject))
            if content["schema"] == SCHEMA and not all(map(is_sound, content["points"])):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{self.path} holds no costs; delete it and measure them again"
            ) from error
        return content

    def _take_over(self, content: dict) -> None:
        """Keep the points of the same machine, target and drafter."""
        changed = list(differing(content, self.subject))
        kept = [] if changed not in ([], ["drafter"]) else content["points"]
        if changed:
            kept = [point for point in kept if point["what"] != "draft"]
            if "drafter" not in changed:  # a new drafter is measured as a matter of course
                self.note = (
                    f"{self.path} was made with another {', '.join(changed)}: measuring again"
                )
        elif kept:
            self.note = f"continuing from the {len(kept)} points in {self.path}"
        self.points = {key_of(point): point for point in kept}

    def tries(self, cell: Cell) -> list[float]:
        """What was measured of a cell, in milliseconds."""
        point = self.points.get(cell.key)
        return point["tries"] if point else []

    def add(self, cell: Cell, ms: float) -> None:
        """Note a try of a cell, and write all down, now or soon."""
        tries = [*self.tries(cell), round(ms, 6)]
        point = {"what": cell.what, **cell.at, "ms": settled(tries), "tries": tries}
        self.points[cell.key], self.model = point, None
        if time.monotonic() - self._written > PATIENCE:
            self.write()

    def of(self, what: str) -> list[dict]:
        """The points of verify, loop, draft or ragged."""
        return [point for point in self.points.values() if point["what"] == what]

    def fit(self) -> CostModel:
        """Put curves through all points."""
        parts = (self.of(what) for what in ("verify", "loop", "draft", "ragged"))
        self.model = fitted(*parts)
        return self.model

    def write(self) -> None:
        """Write the file, whole or not at all."""
        content = {"schema": SCHEMA, "recipe": self.recipe, **self.subject}
        content |= {"points": [*self.points.values()]}
        content |= {"model": self.model and self.model.to_dict()}
        write_atomic(self.path, f"{json.dumps(content, indent=1)}\n".encode())
        self._written = time.monotonic()


def settled(tries: Sequence[float]) -> float:
    """The milliseconds of a cell: the lower quartile of its tries.

    Whatever else a machine does only ever adds time. Beside two trainings on two cores, medians of
    two measurements were 23% apart and 13% off their curve, lower quartiles 10% and 2%; on a quiet
    machine both are the same.

    >>> settled([5.0, 1.1, 1.0, 1.2, 9.0, 1.3, 1.4])
    1.1
    """
    return sorted(tries)[len(tries) // 4]


def unrest(points: Sequence[Mapping[str, Any]]) -> float:
    """How far apart the tries of a point lie: their median deviation as a share of the point, the
    median over all points."""
    return median(
        median(abs(ms - median(point["tries"])) for ms in point["tries"]) / point["ms"]
        for point in points
    )


def at_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers at which a point was measured (rows, nodes, ..): arguments of its terms, and of
    the methods of `CostModel`."""
    return {name: value for name, value in point.items() if name not in ("what", "ms", "tries")}


def key_of(point: Mapping[str, Any]) -> Key:
    """The key of the cell that a point is of."""
    return Cell(point["what"], at_of(point), open=lambda: float).key


def is_sound(point: Mapping[str, Any]) -> bool:
    """Whether a curve can go through a point. Raises KeyError or TypeError for what is none."""
    ms = [point["ms"], *point["tries"]]
    numbers = [*ms, *TERMS[point["what"]](**at_of(point)).values()]
    return all(map(isfinite, numbers)) and min(numbers) >= 0 and min(ms) > 0 and len(ms) > 1


def differing(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterable[str]:
    """What differs between costs that are there and a subject: who measured them, parts of the
    machine, target or drafter."""
    ours, theirs = wanted["environment"], there["environment"]
    if there["schema"] != SCHEMA:
        yield "version of specdraft"
    for name in sorted(ours.keys() - set(ELSEWHERE)):
        if ours[name] != theirs.get(name):
            yield name
    for part in ("target", "drafter"):
        if there[part] != wanted[part]:
            yield part


def fitted(
    verify: Sequence[dict],
    loop: Sequence[dict],
    draft: Sequence[dict],
    ragged: Sequence[dict] = (),  # verify, of rows of which some are wider than others
) -> CostModel:
    """Return the curves through points."""
    places = knots([point["rows"] * point["nodes"] for point in verify])
    verify = [*verify, *ragged]
    of_verify = [
        verify_terms(p["rows"], p["nodes"], p["cached"], places, p.get("widest")) for p in verify
    ]
    of_loop = [loop_terms(point["rows"], point["nodes"]) for point in loop]
    of_draft = [draft_terms(**at_of(point)) for point in draft]
    return CostModel(
        verify=fit(of_verify, _ms(verify)),
        knots=places,
        loop=fit(of_loop, _ms(loop)),
        draft=fit(of_draft, _ms(draft)) if draft else None,
    )


def _ms(points: Sequence[dict]) -> list[float]:
    return [point["ms"] for point in points]
