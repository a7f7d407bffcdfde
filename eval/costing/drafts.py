"""Drafts that are timed: of a head by passes, paths and rounds; of Medusa heads; of a student.

A head's trees are chains side by side, which part at some depth: behind the pass, so that later
passes read as many blocks, or at the root, so that rounds have as many distributions, too. What a
pass, a path, a round and a distribution cost is what these trees differ by. Chains that are chosen
best first are timed, too: what they take beyond static ones is the host's, which chooses.

Before every draft that is timed, its rows have read their prompts and drafted once. Timed is that
they are shown the tokens of a step, and drafts: what is read again, and what is read anew, is what
running rows read. Prompts and tokens differ in number as those of decoding do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from specdraft.eval.costing.bench import (
    FRESH,
    Between,
    Cell,
    always_nothing,
    bench_request,
    nothing,
)
from specdraft.eval.costing.grid import Grid, apart
from specdraft.eval.drafters.best_first import BestFirst
from specdraft.eval.drafters.branching import Branching
from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.pass_options import DEFAULT, PassOptions
from specdraft.eval.drafters.static import Path as Ranks
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.transfer import wait
from specdraft.eval.methods.trained import KINDS, Trained
from specdraft.eval.pricing.cost import CostModel, Curve
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.medusa import MedusaHeads
from specdraft.models.saved import CONFIG
from specdraft.models.target import Target
from specdraft.recipes.find import HEADS, drafter_folder
from specdraft.recipes.schema import Recipe

SEVERAL = (4, 16)  # rows, beside one
GAMMAS = (1, 2, 4)  # levels of a student's draft
PASSES = (1, 2, 3, 4)  # of a head's chains

Make = Callable[[int], Drafter]  # of rows
Draft = tuple[list[int], list[int], Make]  # with its paths by pass and distributions by round

_NOTHING = Curve({}, points=0, median_error=0.0, worst_error=0.0, median_held_out=0.0)
# Where drafts and nodes cost nothing, the host goes on to the end.
FREE = CostModel(replace(_NOTHING, weights={"rows": 1.0}), (1,), loop=_NOTHING, draft=_NOTHING)


def shape_of(tree: StaticTree) -> tuple[list[int], list[int]]:
    """Return paths by pass and distributions by round: what `CostModel.draft_ms` asks of a tree.

    tree: coupled, where the head is.
    """
    levels = [len(part.slots) for plan in tree.passes for part in plan.rounds]
    return [len(plan.parents) for plan in tree.passes], levels


def trained_drafter(recipe: Recipe, target: Target) -> Trained:
    """Load what the recipe's run has trained to draft with: a head, Medusa heads or a student;
    nothing where there is none. Raises HeadError, TargetError for one that is not whole.
    """
    run, kind = Path(recipe.output.dir), recipe.kind
    elsewhere = recipe.student.training == "none" or recipe.head.model or recipe.medusa.model
    if not (elsewhere or (drafter_folder(run, kind) / CONFIG).is_file()):
        return Trained()
    part = "head" if kind in HEADS else kind
    return Trained(**{part: KINDS[part].load(recipe, target, run)})


class DraftBench:
    """What a run has trained, and the drafts with it that are timed."""

    def __init__(
        self, target: Target, trained: Trained, grid: Grid, options: PassOptions = DEFAULT
    ):
        """options: of a head's passes."""
        self.target, self.trained, self.grid, self.options = target, trained, grid, options
        self.between: Between = always_nothing
        self.capacity = max(apart(min(grid.cached), 2)) + max(apart(FRESH, 2))

    def cells(self) -> Iterator[Cell]:
        """Drafts of one row, and some of several; none where nothing is trained."""
        rows = [count for count in SEVERAL if count <= max(self.grid.rows)]
        for number, one in enumerate(self._drafts()):
            for count in (1, *(rows if number % 3 == 0 else ())):
                yield self._cell(one, count)
        for one in self._chosen():
            for count in (1, *rows):
                yield self._cell(one, count, best_first=True)

    def draft(self, rows: int) -> Callable[[], object]:
        """A draft of some rows: what comes between two forwards; nothing where nothing is
        trained."""
        first = next(self._drafts(), None)
        return self._open(first[-1], rows, always_nothing) if first else nothing

    def _cell(self, draft: Draft, rows: int, **more: bool) -> Cell:
        paths, levels, make = draft
        if self.options.compiles:  # once, and not in every visit
            make = cache(make)
        at = {"rows": rows, "paths": paths, "levels": levels, **more}
        return Cell("draft", at, partial(self._open, make, rows, self.between))

    def _drafts(self) -> Iterator[Draft]:
        if head := self.trained.head:
            yield from self._of_head(head)
        elif heads := self.trained.medusa:
            yield from self._of_medusa(heads)
        elif student := self.trained.student:
            yield from self._of_student(student)

    def _chosen(self) -> Iterator[Draft]:
        """Chains of a head or a student, chosen best first."""
        how = {"capacity": self.capacity, "paths": 1}
        if head := self.trained.head:
            how |= {"nodes": 1, "options": self.options}
            make = partial(DynamicFalcon, head, self.target, FREE, **how)
            for passes in PASSES:
                levels = [1] * passes * head.config.block_size
                yield [1] * passes, levels, partial(make, passes=passes)
        elif (student := self.trained.student) and not self.trained.medusa:
            for depth in GAMMAS:
                make = partial(BestFirst, student, costs=FREE, depth=depth, nodes=depth, **how)
                yield [1] * depth, [1] * depth, make

    def _of_head(self, head: FalconHead | Eagle3Head) -> Iterator[Draft]:
        config, seen = head.config, []
        most = config.draft_vocab or self.target.vocab_size
        how = {"capacity": self.capacity, "options": self.options}
        widths = [width for width in self.grid.widths if width <= most]
        for paths in _trees(config.block_size, widths):
            tree = StaticTree(paths, config.block_size, config.coupling != "none")
            if (shape := shape_of(tree)) not in seen:
                seen.append(shape)
                yield *shape, partial(FalconDrafter, head, self.target, tree, **how)

    def _of_medusa(self, heads: MedusaHeads) -> Iterator[Draft]:
        for depth in range(1, heads.config.heads + 1):
            tree = StaticTree.chain(depth, depth)
            yield [1], [depth], partial(MedusaDrafter, heads, self.target, tree)

    def _of_student(self, student: Target) -> Iterator[Draft]:
        make = partial(Branching, student, capacity=self.capacity)
        for depth in GAMMAS:
            for width in self.grid.widths if depth > 1 else (1,):
                nodes = [1, *[width] * (depth - 1)]
                yield nodes, nodes, partial(make, branching=(width, *[1] * (depth - 1)))

    def _open(self, make: Make, rows: int, between: Between) -> Callable[[], float]:
        drafter, numbers = make(rows), list(range(rows))
        lengths, fresh = apart(min(self.grid.cached), rows), apart(FRESH, rows)
        features = self._features(max(lengths))
        requests = [bench_request(self.target, length, 1) for length in lengths]
        forward = between(rows)

        def show(counts: Sequence[int]) -> None:
            for row, count in enumerate(counts):
                drafter.observe(row, [0] * count, features[:count])

        def go() -> float:
            for row, request in enumerate(requests):
                drafter.start(row, request)
            if not drafter.from_tokens:
                show(lengths)
            drafter.draft(numbers)
            with Stopwatch() as shown:
                show(fresh)
            forward()
            wait(self.target.device)
            with Stopwatch() as watch:
                drafter.draft(numbers)
                wait(self.target.device)
            return shown.seconds + watch.seconds

        return go

    def _features(self, count: int) -> Tensor:
        """Features as a target gives them, [count, H], wide where the head reads more layers."""
        layers, scale = 0, 1.0
        if head := self.trained.head:
            layers, scale = len(head.config.feature_layers), head.config.feature_scale
        shape = (count, (1 + layers) * self.target.hidden_size)
        features = scale * torch.randn(shape, device=self.target.device)
        return features.to(self.target.dtype)


def _trees(k: int, widths: Sequence[int]) -> Iterator[list[Ranks]]:
    """Trees for blocks of k tokens: one chain, of up to four passes, then some side by side."""
    for passes in PASSES:
        yield _chains(1, 1, passes * k)
    for width in widths[1:]:
        yield _chains(width, 1, k)
        yield _chains(width, k, k + 1)
        yield _chains(width, k, 2 * k)
        yield _chains(width, 1, 2 * k)
        yield _chains(width, k, 3 * k)


def _chains(width: int, fork: int, depth: int) -> list[Ranks]:
    """Chains to a depth which are one before the depth `fork`, 1 or more.

    >>> _chains(2, 2, 3)
    [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 0)]
    """
    ends = [(*[0] * (fork - 1), rank, *[0] * (depth - fork)) for rank in range(width)]
    return sorted({end[:length] for end in ends for length in range(1, depth + 1)})
