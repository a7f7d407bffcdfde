"""Draft with a head and a table, by what each is worth.

The table's draft is free. Where it is likely, the head would hardly add what its pass takes; where
it is not, the head drafts, and behind the ends of its draft the table goes on: a chain that is
likely there spares another pass.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specdraft.eval.drafters.dynamic import Blocks, DynamicFalcon
from specdraft.eval.drafters.ngrams import LONGEST, least_chance
from specdraft.eval.drafters.pass_options import DEFAULT, PassOptions
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Tree
from specdraft.eval.lookup.table import Chain, Followers, Lookups
from specdraft.eval.pricing.beside import WorthBeside
from specdraft.eval.pricing.cost import CostModel
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.target import Target


class FalconBesideTable(DynamicFalcon):
    """Draft with a head where it is worth more than what a table knows. known: of contexts of 1, 2,
    .. tokens; the rest as in `DynamicFalcon`."""

    worth: WorthBeside

    def __init__(
        self,
        head: FalconHead | Eagle3Head,
        target: Target,
        known: Sequence[Followers],
        costs: CostModel | None = None,
        rows: int = 1,
        capacity: int = 2048,
        options: PassOptions = DEFAULT,
    ):
        super().__init__(head, target, costs, rows, capacity, options=options)
        self.worth, self.table = WorthBeside(costs, self.k, self.max_nodes), Lookups(known, rows)
        # Of this step: how likely a path of the table has to be, and what is behind a row's nodes,
        # which is asked for after a pass and, of its ends that have no children, once more.
        self._least = 0.0
        self._found: dict[tuple[int, int], Chain] = {}

    def start(self, row: int, request: Request) -> None:
        super().start(row, request)
        # Like the head, it is told of the prompt as the target reads it.
        self.table.start(row, replace(request, prompt=request.prompt[:1]))

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        super().observe(row, tokens, features)
        self.table.observe(row, tokens, features)

    def move(self, row: int, to: int) -> None:
        super().move(row, to)
        self.table.move(row, to)

    def grow(self, rows: list[int]) -> list[Tree]:
        self.worth.begin(rows, self.table.cached(rows))
        self._least, self._found = least_chance(self.worth), {}
        growths = {row: Blocks([self.memory[row].ahead[-1]]) for row in rows}
        free = {row: self.table.foretell(row, LONGEST, self._least) for row in rows}
        chosen = self.worth.prefers({row: own.chances for row, own in free.items()})
        if chosen:
            self.make_passes({row: growths[row] for row in chosen})
        for row, growth in growths.items():
            if row not in chosen:
                growth.graft(0, free[row].tokens, free[row].chances)
                continue
            for leaf in growth.leaves(self._least):
                behind = self._behind(row, growth, leaf)
                growth.graft(leaf, behind.tokens, behind.chances)
        return self.harvest(rows, growths)

    def going_on(self, rows: list[int], growths: list[Blocks]) -> tuple[list[int], int]:
        free = [
            [self.worth.gain(self._behind(row, own, end).chances) for end in own.deepest]
            for row, own in zip(rows, growths, strict=True)
        ]
        return self.worth.goes_on(rows, [own.end_chances for own in growths], free)

    def _behind(self, row: int, growth: Blocks, node: int) -> Chain:
        """What the table says comes behind a node of a row's draft."""
        if (found := self._found.get((row, node))) is None:
            path, reach = growth.path(node), growth.chances[node]
            found = self.table.behind(row, path, LONGEST, self._least, reach)
            self._found[row, node] = found
        return found
