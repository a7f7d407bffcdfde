"""What decoding costs on one machine: milliseconds of verifying, of drafting, of the loop around.

eval/costs.py measures it and writes costs.json; whoever chooses how much to draft reads it there:

    costs = load_costs(Path("runs/tiny/costs.json"), target)
    step = costs.verify_ms(rows, nodes, cached) + costs.draft_ms(paths, levels, rows)
    step += costs.loop_ms(rows, nodes)

Linear layers see the N = r n tokens of a packed forward, whoever they belong to; a row adds a call
and its cache, and attention a score for each node and each cached token:

    verify(r, n, c) = a + a' [r > 1] + g(r n) + b r + (f + h r) [n > 1] + d r c + e r n c
                      + p r (w - n)

g rises from knot to knot by a slope of its own: on a GPU it is flat until the weights are no longer
what takes the time, on a CPU a single token has a kernel of its own. A single row attends as it
lies, several are gathered, [r > 1], and padded to the widest, w. Drafts, [n > 1], need masks, and
their forward finds in the machine's caches what the drafter has left there. No weight is negative:
more tokens never cost less.

Shapes: r rows, n nodes of a row in the mean (the root included), w nodes of the widest row, c
cached tokens of a row, N tokens of all.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Self

from specdraft.eval.pricing.machine import machine
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

COSTS = "costs.json"  # in the folder of a run
# In 1, a loop was priced with trees whose shapes it had yet to make; in 2, points had in them
# whatever else the machine did.
SCHEMA = 3
# Of a drafter's config, what its drafts take as long with: whose it is, numbers that depend on what
# it was trained on, and a window, which a recipe may say anew.
UNTIMED = {"target", "embed_scale", "feature_scale", "norm_eps", "rope", "rope_theta", "window"}
PROCESSORS = ("gpu", "cpu")  # of an environment: what other costs come of, by name
Terms = dict[str, float]  # of a cost, by name: what a weight is multiplied by


@dataclass(frozen=True)
class Curve:
    """A sum of terms with weights of at least zero, and how far it is from what was measured.

    Errors are relative: of the points it was fitted to, and (median_held_out) of each point by the
    curve that is fitted to all others.
    """

    weights: dict[str, float]  # milliseconds, of each term
    points: int
    median_error: float
    worst_error: float
    median_held_out: float

    def ms(self, terms: Terms) -> float:
        """Milliseconds of what has these terms."""
        return sum(weight * terms[name] for name, weight in self.weights.items())


def verify_terms(
    rows: int, nodes: float, cached: float, knots: Sequence[int], widest: int | None = None
) -> Terms:
    """Terms of a verifying forward. knots: numbers of tokens, ascending, where g's slope changes;
    widest: nodes of the widest row; None: of each.

    >>> verify_terms(2, 3, 10, knots=(1, 4), widest=5)  # doctest: +NORMALIZE_WHITESPACE
    {'forward': 1, 'several': 1, 'rows': 2, 'drafts': 1, 'row drafts': 2, 'cached': 20,
     'scores': 60, 'pads': 4, 'tokens from 1': 3, 'tokens from 4': 2}
    """
    tokens, drafts = rows * nodes, int(nodes > 1)
    terms = {"forward": 1, "several": int(rows > 1), "rows": rows}
    terms |= {"drafts": drafts, "row drafts": rows * drafts}
    terms |= {"cached": rows * cached, "scores": tokens * cached}
    terms["pads"] = rows * ((widest or nodes) - nodes)
    for first, last in pairwise([*knots, inf]):
        terms[f"tokens from {first}"] = max(0, min(tokens, last) - first)
    return terms


def draft_terms(
    rows: int, paths: Sequence[int], levels: Sequence[int], best_first: bool = False
) -> Terms:
    """Terms of a draft: of its passes, by their paths, and of its rounds, by their distributions.

    The first pass, which reads what was committed, is the draft's own. A single row's passes may be
    one function each where every distribution is behind the most probable path, and are not where
    some are `wide` (models/passes/row.py). best_first: behind each pass the host chooses for every
    row what is read on and what is verified, which a static tree knows before.

    >>> draft_terms(2, paths=[1, 4], levels=[1, 2, 4])  # doctest: +NORMALIZE_WHITESPACE
    {'draft': 1, 'several': 2, 'wide': 0, 'rows': 2, 'passes': 1, 'row passes': 2, 'paths': 8,
     'levels': 3, 'nodes': 14, 'choices': 0, 'row choices': 0}
    """
    later, choices = len(paths) - 1, len(paths) * best_first
    return {
        "draft": 1,
        "several": len(paths) * (rows > 1),
        "wide": len(paths) * (rows == 1 and max(levels) > 1),
        "rows": rows,
        "passes": later,
        "row passes": rows * later,
        "paths": rows * sum(paths[1:]),
        "levels": len(levels),
        "nodes": rows * sum(levels),
        "choices": choices,
        "row choices": rows * choices,
    }


def loop_terms(rows: int, nodes: float) -> Terms:
    """Terms of a step of the decoder outside of its forward and of its drafter."""
    drafts = int(nodes > 1)
    terms = {"step": 1, "several": int(rows > 1), "rows": rows}
    return terms | {"drafts": drafts, "row drafts": rows * drafts, "nodes": rows * (nodes - 1)}


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of the parts of a step, for one target, one drafter and one machine."""

    verify: Curve
    knots: tuple[int, ...]
    loop: Curve
    draft: Curve | None = None  # None: there was no trained drafter

    def verify_ms(self, rows: int, nodes: float, cached: float) -> float:
        """A forward over `rows` rows of `nodes` nodes each, the root included, behind `cached`
        tokens, until its choices are on the host."""
        return self.verify.ms(verify_terms(rows, nodes, cached, self.knots))

    @property
    def pad_ms(self) -> float:
        """What a row adds to a verifying forward by each node that the widest one has more."""
        return self.verify.weights.get("pads", 0.0)

    def draft_ms(
        self,
        paths: Sequence[int],
        levels: Sequence[int],
        rows: int = 1,
        best_first: bool = False,
    ) -> float:
        """A draft of `rows` rows.

        paths: of every pass of a head, how many blocks it reads, the first of which is what was
        committed (1); of every forward of a student, how many nodes; of Medusa heads [1]. levels:
        of every round of choices, in all passes, how many distributions it ranks, e.g. those of
        all depths in Medusa's one (`shape_of` in eval/costing/drafts.py counts both in a tree).
        best_first: whether the host chooses, instead of a static tree.

        Raises DataError where no drafter was measured.
        """
        if self.draft is None:
            raise DataError("these costs have no drafter; train one, then run eval/costs.py")
        return self.draft.ms(draft_terms(rows, paths, levels, best_first))

    def loop_ms(self, rows: int, nodes: float = 1) -> float:
        """The decoder's own part of a step: packing, accepting, moving the cache."""
        return self.loop.ms(loop_terms(rows, nodes))

    @property
    def is_sound(self) -> bool:
        """Whether all parts of a step have a price. Raises what curves raise that are none."""
        prices = [self.verify_ms(2, 2, 1), self.loop_ms(2, 2)]
        prices += [self.draft_ms([1, 1], [1, 1], 2)] if self.draft else []
        curves = filter(None, (self.verify, self.loop, self.draft))
        weights = [weight for curve in curves for weight in curve.weights.values()]
        return min(prices) > 0 and all(0 <= float(weight) < inf for weight in weights)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self) | {"knots": [*self.knots]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave. Raises TypeError or KeyError where parts are missing."""
        parts = {name: values[name] for name in ("verify", "loop", "draft")}
        curves = {name: part and Curve(**part) for name, part in parts.items()}
        return cls(knots=tuple(values["knots"]), **curves)


def costs_file(recipe: Recipe, target: Target) -> Path:
    """Where the costs of a run are: those of its target enlarged have a file of their own."""
    own = re.sub(r"\W+", "_", target.name)
    return Path(recipe.output.dir) / (f"costs_{own}.json" if target.is_enlarged else COSTS)


def load_costs(
    path: Path, target: Target | None = None, form: Mapping[str, Any] | None = None
) -> CostModel:
    """Read what eval/costs.py has written, for a target, if one is given; a warning says where it
    was measured by another version, or on another machine than this target's.

    form: of the drafter that drafts; what was measured of drafts of another form is left out.
    Raises DataError where there is none, half of it, or another target's.
    """
    if not path.is_file():
        raise DataError(f"no costs at {path}; measure them: python eval/costs.py RECIPE")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (model := content["model"]) is None:
            raise DataError(f"{path} is not whole; the command that began it goes on with it")
        costs = CostModel.from_dict(model)
        if not costs.is_sound:
            raise ValueError
        same_version = content["schema"] == SCHEMA
        name, weights = (content["target"][key] for key in ("name", "weights"))
        there, elsewhere = _timed(content["drafter"] or {}), content["environment"]
        elsewhere = {part: elsewhere.get(part) for part in PROCESSORS}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} holds no costs; delete it and measure them again") from error
    if not same_version:
        warnings.warn(
            f"{path} was measured by another version of specdraft, whose prices differ; measure "
            "again: python eval/costs.py RECIPE",
            stacklevel=2,
        )
    if target is not None:
        if target.identity()["weights"] != weights:
            whose = f"{name}, not of {target.name}"
            if name == target.name:
                whose = f"{name} with other weights"
            raise DataError(f"{path} is of {whose}; measure this one: python eval/costs.py RECIPE")
        _compare(path, elsewhere, machine(target.device))
    if form is not None and there != _timed(json.loads(json.dumps(form))):
        return replace(costs, draft=None)
    return costs


def _compare(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Warn of the first processor that is not the one that costs were measured on."""
    for part in PROCESSORS:
        if there[part] != here[part]:
            warnings.warn(
                f"{path} was measured on another machine ({part} {there[part]}, not {here[part]}): "
                "drafts are as long as they would be worth there; measure this one: "
                "python eval/costs.py RECIPE",
                stacklevel=3,
            )
            return


def _timed(form: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a drafter's form that the time of its drafts depends on."""
    config = form.get("config", {})
    sizes = {name: size for name, size in config.items() if name not in UNTIMED}
    return {**form, "weights": None, "config": sizes}
