"""The packed forward with fixed shapes, so that a GPU can replay it (models/passes/graphs.py).

The first R rows lie in a grid with T tokens of each, L of its slots in sight, and what differs from
step to step is data: which tokens, where they are written, and who sees whom. Row 0 with 5 cached
tokens reads a root and two nodes behind it, row 2 with 3 cached its root alone, and T is 4:

    row 0    r d d .    slots  5 6 7 p    start  5    p: a spare slot behind the row's capacity,
    row 1    . . . .           p p p p           0       which pads are written to
    row 2    r . . .           3 p p p           3

The grid has pads where the packed forward has none: a GPU reads its weights for one token as long
as for all of them. Steps that a grid does not suit, prompts above all, stay packed.

Shapes: R rows, T tokens, L slots, N packed tokens, H hidden.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.plan import Segment
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology, chain, columns_of, view_from
from specdraft.models.families.scores import ALIGNED, PLAIN, Scores, aligned, attention
from specdraft.models.feature_layers import Layers
from specdraft.models.passes.graphs import Replays, slots_in_sight
from specdraft.models.target import Target
from specdraft.models.weights.placement import is_kept_elsewhere

MOST = 128  # tokens of a row
FREE = 512  # tokens, pads among them, that take less than to launch a packed forward
KNOWN = 256  # shapes of trees that are kept


class GridTarget(PackedTarget):
    """A packed target that replays its short forwards where its device and its layers allow it."""

    spare = ALIGNED

    def __init__(self, target: Target, rows: int, capacity: int, layers: Layers = ()):
        super().__init__(target, rows, capacity, layers)
        self.replays = Replays(target.device)
        self._grids: dict[tuple[int, int, int], Grid] = {}
        pool = self.pool
        self._is_plain = (
            not (self.states or self.sources or is_kept_elsewhere(target.model))
            and pool.positions is None
            and [tensor.device for tensor in pool.tensors] == [target.device]
        )

    def forward(self, ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        grid = self._grid_of(segments) if self._is_plain else None
        if grid is None:
            return super().forward(ids, positions, segments)
        self.inputs = len(grid.ids)
        places = grid.fill(ids, positions, segments)
        return self.replays.run(grid, lambda: self._read(grid)).index_select(0, places)

    def _read(self, grid: "Grid") -> Tensor:
        grid.look()
        return self._run(grid.ids, grid.positions, grid)

    def _grid_of(self, segments: Sequence[Segment]) -> "Grid | None":
        """The grid that suits a step, where one does."""
        longest = max(segment.count for segment in segments)
        last = max(segment.row for segment in segments)  # those before it lie in the grid, too
        rows, tokens = min(1 << last.bit_length(), len(self.pool.lengths)), _rounded(longest)
        real = sum(segment.count for segment in segments)
        fits = longest <= MOST and rows * tokens <= max(FREE, 2 * real)
        if not fits or not all(map(_has_shape, segments)):
            return None
        stop = max(segment.stop for segment in segments)
        slots = aligned(slots_in_sight(stop, self.pool.capacity))
        size = rows, tokens, slots
        if size not in self._grids:
            self._grids[size] = Grid(self.pool, *size, self.target.device)
        return self._grids[size]


class Grid:
    """The tensors of one fixed shape; a `Plan` to the layers that attend."""

    def __init__(self, pool: KVPool, rows: int, tokens: int, slots: int, device: torch.device):
        self.pool, self.rows, self.tokens, self.slots = pool, rows, tokens, slots
        self.ids = torch.zeros(rows * tokens, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        # Where each token is written; of each row what it has cached and the number of its shape.
        self._data = torch.zeros(rows * (tokens + 2), dtype=torch.long, device=device)
        self._written, self._starts, self._shapes = self._data.split((rows * tokens, rows, rows))
        self._row_of = torch.arange(rows, device=device).repeat_interleave(tokens)
        # Who sees whom, of every known shape: additive, of each token's view of what is cached, of
        # the grid's tokens and of what is behind them. The first is of rows that bring nothing.
        self._known = torch.zeros(KNOWN, tokens, tokens + 2, dtype=pool.dtype, device=device)
        self._numbers: OrderedDict[Topology, int] = OrderedDict()
        self._mask: Tensor | None = None  # [R, 1, T, L]

    # -- before a forward ------------------------------------------------------------------------

    def fill(self, ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Put packed ids and positions [N] in their places; return these, [N]."""
        written = [self.pool.capacity] * len(self.ids)  # the spare slot
        starts, shapes, places = [0] * self.rows, [0] * self.rows, []
        for segment in segments:
            row, count, first = segment.row, segment.count, segment.row * self.tokens
            written[first : first + count] = range(segment.start, segment.stop)
            starts[row], shapes[row] = segment.start, self._number(segment)
            places += range(first, first + count)
        sent = upload([*written, *starts, *shapes, *places], ids.device)
        self._data.copy_(sent[: len(self._data)])
        sent = sent[len(self._data) :]
        self.ids.index_copy_(0, sent, ids)
        self.positions.index_copy_(0, sent, positions)
        return sent

    def _number(self, segment: Segment) -> int:
        """The place of a segment's shape among the known ones; a new one takes that of the least
        recently used."""
        shape = segment.topology or chain(segment.count - 1)
        if shape not in self._numbers:
            # From 1 on: at 0 is the shape of a row that brings nothing.
            full = len(self._numbers) == KNOWN - 1
            number = self._numbers.popitem(last=False)[1] if full else len(self._numbers) + 1
            self._known[number].copy_(self._view(shape))
            self._numbers[shape] = number
        self._numbers.move_to_end(shape)
        return self._numbers[shape]

    def _view(self, shape: Topology) -> Tensor:
        """What each token of a shape sees, [T, T + 2]; pads see everything, so that nothing is
        NaN."""
        count = len(shape)
        view = torch.zeros(self.tokens, self.tokens + 2, dtype=self.pool.dtype)
        ancestors = F.pad(shape.ancestors, (0, self.tokens - count))
        view[:count] = view_from(ancestors, self.pool.dtype)
        return view

    # -- in a forward ----------------------------------------------------------------------------

    def look(self) -> None:
        """Make the mask of what was filled in."""
        slots = torch.arange(self.slots, device=self.ids.device)
        columns = columns_of(slots, self._starts, self.tokens)
        views = self._known.index_select(0, self._shapes)
        columns = columns[:, None].expand(-1, self.tokens, -1)
        self._mask = views.gather(2, columns)[:, None]

    def within(self, window: int | None) -> "Grid":
        """The grid itself: targets whose layers have windows are not read through one."""
        return self

    def on(self, device: torch.device) -> "Grid":
        """The grid itself: targets on several devices are not read through one."""
        return self

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN
    ) -> Tensor:
        """Write keys and values to the pool and attend; query and result are [1, heads, R * T,
        D]."""
        for cached, fresh in zip(self.pool.kv[layer], (key, value), strict=True):
            # Indices with a slice between them come first: [R * T, kv_heads, D] is written.
            cached[self._row_of, :, self._written] = fresh[0].transpose(0, 1)
        rows, slots = slice(self.rows), slice(self.slots)
        keys, values = self.pool.read_rows(layer, rows, slots)
        queries = query[0].unflatten(1, (self.rows, self.tokens)).transpose(0, 1)
        attended = attention(queries, keys, values, self._mask, False, scores)
        return attended.transpose(0, 1).flatten(1, 2)[None]


def packed_target(target: Target, rows: int, capacity: int, layers: Layers = ()) -> PackedTarget:
    """A target ready for packed forwards, replayed where that pays."""
    kind = GridTarget if target.replays else PackedTarget
    return kind(target, rows, capacity, layers)


def _has_shape(segment: Segment) -> bool:
    """Whether who sees whom in a segment is told by its topology alone. Prompts are not asked for:
    each has a length of its own, and would be captured to be read once."""
    if segment.count == 1:
        return segment.bias is None or segment.topology is not None
    return segment.topology is not None and segment.start > 0


def _rounded(count: int) -> int:
    """A number of tokens that a grid has: few of them, so that few are captured."""
    step = 1 if count <= 2 else 4 if count <= 16 else 8
    return -(-count // step) * step
