"""costs.json while it is measured, and when it is whole.

It says what its figures depend on: the machine, the target with its dtype, the drafter. Points are
written down as they come, and the same command goes on behind them; those of another version,
machine or target are dropped, those of another drafter where drafts are what was measured.

    {"schema": 3, "recipe": .., "environment": {..}, "target": {..}, "drafter": {..} or null,
     "points": [{"what": "verify", "rows": 1, "nodes": 4, "cached": 64, "ms": 0.9, "tries": [..],
                 "paces": [..]}],
     "model": null, or what eval/pricing/cost.py reads}

tries: the milliseconds of every visit; paces: those of a plain forward meanwhile; ms: the median of
their ratios, at the mean pace of all visits. A machine that did something else during a visit was
slow at both, and what decoding takes is what it takes at the mean pace.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

from specdraft.data.atomic import write_atomic
from specdraft.eval.costing.bench import Cell, Key, Try, settled
from specdraft.eval.costing.curves import fit, knots
from specdraft.eval.pricing.cost import SCHEMA, CostModel, draft_terms, loop_terms, verify_terms
from specdraft.recipes.errors import DataError

MEASURED = {"what", "ms", "tries", "paces"}  # of a point; else it has where it was measured
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

    def add(self, cell: Cell, found: Try) -> None:
        """Note a try of a cell, and write all down, now or soon."""
        empty = {"what": cell.what, **cell.at, "ms": found.ms, "tries": [], "paces": []}
        point = self.points.setdefault(cell.key, empty)
        point["tries"].append(round(found.ms, 6))
        point["paces"].append(round(found.pace, 6))
        self.model = None
        if time.monotonic() - self._written > PATIENCE:
            self.write()

    def of(self, what: str) -> list[dict]:
        """The points of verify, loop, draft or ragged."""
        return [point for point in self.points.values() if point["what"] == what]

    def fit(self) -> CostModel:
        """Put curves through all points."""
        self._settle()
        parts = (self.of(what) for what in ("verify", "loop", "draft", "ragged"))
        self.model = fitted(*parts)
        return self.model

    def _settle(self) -> None:
        """Say what each point takes at the mean pace."""
        points = [*self.points.values()]
        pace = mean([own for point in points for own in point["paces"]] or [0.0])
        for point in points:
            point["ms"] = round(settled(tries_of(point), pace), 6)

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self._settle()
        content = {"schema": SCHEMA, "recipe": self.recipe, **self.subject}
        content |= {"points": [*self.points.values()]}
        content |= {"model": self.model and self.model.to_dict()}
        write_atomic(self.path, f"{json.dumps(content, indent=1)}\n".encode())
        self._written = time.monotonic()


def tries_of(point: Mapping[str, Any]) -> list[Try]:
    """What every visit of a point found."""
    return [*map(Try, point["tries"], point["paces"])]


def unrest(points: Sequence[Mapping[str, Any]]) -> float:
    """How far apart the paces of a machine lie: their median deviation as a share of the median."""
    paces = [pace for point in points for pace in point["paces"]]
    usual = median(paces)
    return median(abs(pace - usual) for pace in paces) / usual


def at_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers at which a point was measured (rows, nodes, ..): arguments of its terms, and of
    the methods of `CostModel`."""
    return {name: value for name, value in point.items() if name not in MEASURED}


def key_of(point: Mapping[str, Any]) -> Key:
    """The key of the cell that a point is of."""
    return Cell(point["what"], at_of(point), open=lambda: float).key


def is_sound(point: Mapping[str, Any]) -> bool:
    """Whether a curve can go through a point. Raises KeyError or TypeError for what is none."""
    ms = [point["ms"], *point["tries"], *point["paces"]]
    numbers = [*ms, *TERMS[point["what"]](**at_of(point)).values()]
    of_pairs = len(ms) > 1 and len(point["tries"]) == len(point["paces"])
    return of_pairs and all(map(isfinite, numbers)) and min(numbers) >= 0 and min(ms) > 0


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
