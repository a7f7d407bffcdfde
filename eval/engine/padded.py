"""The vanilla way of decoding several rows, as a baseline: pad what is ragged to the longest.

EMS-SD (arXiv 2405.07542), section 2: rows accept and draft different numbers of tokens. The vanilla
method keeps every row's cache as long as that of the row that accepted most (KV padding) and feeds
every row as many tokens as the row that drafted most (input padding); a finished row stays in its
batch as pads until the batch is done. Each of the two can be switched on alone, as in Table 2.

Outputs are the same as without pads, since pads are hidden from every real token.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdraft.eval.engine.batch import RowInput
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.plan import Segment, hide_later
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology
from specdraft.eval.engine.verdict import Verdict
from specdraft.eval.families.support import check_can_be_cut
from specdraft.models.feature_layers import Layers
from specdraft.models.target import Target

PADDINGS = {"padded": (True, True), "pad_kv": (True, False), "pad_inputs": (False, True)}


class PaddedTarget(PackedTarget):
    """A packed target whose cache, inputs or both are padded to the longest row of a batch."""

    def __init__(
        self,
        target: Target,
        rows: int,
        capacity: int,
        layers: Layers,
        *,
        pad_kv: bool,
        pad_inputs: bool,
    ):
        check_can_be_cut(target, "decoded with pads")
        super().__init__(target, rows, capacity, layers)
        self.pad_kv, self.pad_inputs = pad_kv, pad_inputs
        self.members: list[int] = []
        shape = (rows, capacity)
        self.holes = torch.zeros(shape, dtype=torch.bool, device=target.device)

    def begin(self, rows: int) -> None:
        """A new batch moves in: rows 0 .. rows - 1 stay together until the last one is done."""
        self.members = list(range(rows))
        self.pool.lengths = [0] * len(self.pool.lengths)
        self.pool.pads = [0] * len(self.pool.pads)
        self.holes.zero_()

    def align(self) -> None:
        """Before a step: bring every row's cache to the length of the longest, with holes."""
        lengths = self.pool.lengths
        longest = max(lengths[row] for row in self.members)
        for row in self.members if self.pad_kv else ():
            self.holes[row, lengths[row] : longest] = True
            self.pool.pads[row] += longest - lengths[row]
            lengths[row] = longest

    def segment(self, row: int, topology: Topology, known: int = 1) -> Segment:
        segment = super().segment(row, topology, known)
        if not self.pad_kv or segment.start == 0:
            return segment
        bias = self._open(segment.count, segment.stop)
        if segment.bias is not None:
            bias.copy_(segment.bias)
        holes = self.holes[row, : segment.start]
        bias[:, : segment.start].masked_fill_(holes, float("-inf"))
        return segment._replace(bias=bias)

    def forward(self, ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        if not self.pad_inputs:
            return super().forward(ids, positions, segments)
        count = max(segment.count for segment in segments)
        present = {segment.row: segment for segment in segments}
        padded = [self._pad(row, present.get(row), count) for row in self.members]
        places = {row: place * count for place, row in enumerate(self.members)}
        cells = [places[s.row] + n for s in segments for n in range(s.count)]
        cells, size = upload(cells, ids.device), count * len(padded)
        spread = [ids.new_zeros(size).index_copy_(0, cells, real) for real in (ids, positions)]
        return super().forward(*spread, padded)[cells]

    def _pad(self, row: int, segment: Segment | None, count: int) -> Segment:
        """The segment with `count` tokens; pads see everything and are seen by no real token."""
        if segment is None:  # finished: nothing but pads, at the end of its cache
            start = self.pool.lengths[row]
            return Segment(row, start, count, self._open(count, start + count))
        if segment.count == count:
            return segment
        bias = self._open(count, segment.start + count)
        bias[: segment.count, segment.stop :] = float("-inf")
        mine = bias[: segment.count, : segment.stop]
        if segment.bias is not None:
            mine.copy_(segment.bias)
        elif segment.is_causal:
            hide_later(mine)
        return Segment(row, segment.start, count, bias)

    def _open(self, count: int, stop: int) -> Tensor:
        return torch.zeros(count, stop, dtype=self.target.dtype, device=self.target.device)


class PaddedDecoder(Decoder):
    """The decoder over a padded target: static batches of at most `rows` requests."""

    packed: PaddedTarget

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: int,
        capacity: int,
        pad_kv: bool = True,
        pad_inputs: bool = True,
    ):
        self.packing = partial(PaddedTarget, pad_kv=pad_kv, pad_inputs=pad_inputs)
        super().__init__(target, drafter, rows, capacity, prefill=rows * capacity)

    def _fill_gaps(self) -> None:
        """A finished row stays where it is, as pads."""

    def _verify(self, inputs: list[RowInput]) -> tuple[Tensor, list[Verdict | None]]:
        self.packed.align()
        return super()._verify(inputs)
