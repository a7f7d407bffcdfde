"""Which token of a packed forward belongs to which row, and what it may attend to.

Nothing that is stored or that linear layers see is padded; attention runs per row, or for several
neighbouring rows in one call over their regions of the pool, cut at the longest row.

Shapes: N tokens of all rows, T of one row, S rows of a group, D head dimension.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise, repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Topology
from specdraft.models.families.scores import PLAIN, Scores, aligned, attention, fold_mask, folds

CAUSAL = None  # no bias: at the start of a row a causal chain; behind others nothing is hidden
LONG = 64  # tokens; a longer segment is a prompt: it attends alone and its mask is not kept
FEW = 16  # tokens; so few of a row and pads beside them cost a CPU less than a call


class Segment(NamedTuple):
    """The tokens of one row in a packed forward, written to its slots start .. start + count."""

    row: int
    start: int
    count: int
    # [count, stop - first] added to attention scores, or of every head [heads, ..]. None: at start
    # 0 a causal chain; behind others every token sees all of the segment.
    bias: Tensor | None
    first: int = 0  # slots before it are out of sight
    topology: Topology | None = None  # asked by recurrent layers
    known: int = 1  # of its tokens, from the first, that are committed

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def is_causal(self) -> bool:
        return self.bias is CAUSAL and self.start == 0 and self.count > 1

    def on(self, device: torch.device) -> "Segment":
        """The same segment with its bias on another device."""
        return self if self.bias is None else self._replace(bias=self.bias.to(device))


class Plan:
    """The segments of one packed forward, and how they are attended to."""

    def __init__(self, pool: KVPool, segments: Sequence[Segment], device: torch.device):
        self.pool, self.segments, self.device = pool, segments, device
        self._elsewhere: dict[torch.device, Plan] = {}
        self._within: dict[int | None, Plan] = {}
        firsts = accumulate((segment.count for segment in segments), initial=0)
        self.placed = list(zip(firsts, segments, strict=False))
        self.alone = len(segments) == 1

    @cached_property
    def mapping(self) -> tuple[Tensor, Tensor]:
        """Row and slot of every token, [N] each."""
        rows = [s.row for s in self.segments for _ in range(s.count)]
        slots = [slot for s in self.segments for slot in range(s.start, s.stop)]
        return upload(rows, self.device), upload(slots, self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """What a row that is alone adds to scores."""
        return _aligned(self.placed[0][1].bias)

    @cached_property
    def groups(self) -> list["Group"]:
        """The rows that attend together."""
        parts = _attention_groups(self.placed, self.device)
        return [Group(self.pool, part, self.device) for part in parts]

    def on(self, device: torch.device) -> "Plan":
        """The plan of the same forward for layers on this device, made when the first one asks."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            segments = [segment.on(device) for segment in self.segments]
            self._elsewhere[device] = Plan(self.pool, segments, device)
        return self._elsewhere[device]

    def place(self, positions: Tensor) -> None:
        """Note the positions [N] of what is written, for windows."""
        rows, slots = self.mapping
        self.pool.positions[rows, slots] = positions

    def within(self, window: int | None, positions: Tensor | None = None) -> "Plan":
        """The plan for layers whose tokens see `window` tokens, themselves included, and what
        their distances add, made when the first one asks; itself while it would be the same.

        positions: of the queries [N], where these are not the tokens at the ends of the segments.
        """
        if self.pool.leaning is None and (
            window is None or all(segment.stop <= window for segment in self.segments)
        ):
            return self
        if window not in self._within:
            counts = [segment.count for segment in self.segments]
            own = repeat(None) if positions is None else positions.split(counts)
            pairs = zip(self.segments, own, strict=False)
            segments = [self._narrowed(segment, at, window) for segment, at in pairs]
            self._within[window] = Plan(self.pool, segments, self.device)
        return self._within[window]

    def _narrowed(self, segment: Segment, at: Tensor | None, window: int | None) -> Segment:
        """The segment without what lies `window` positions or more before each of its tokens, and
        with what its distance adds. at: positions of its queries; None: of its tokens."""
        row, pool = segment.row, self.pool
        # All that is read now comes after what is committed, whose slots, pads aside, are its
        # positions.
        oldest = min(pool.lengths[row] - pool.pads[row], segment.start)
        first = 0 if window is None else max(oldest + 1 - window, 0)
        positions = pool.positions[row, first : segment.stop]
        at = positions[segment.start - first :] if at is None else at
        distance = at[:, None] - positions
        bias = segment.bias
        if bias is None:
            bias = torch.zeros(distance.shape, dtype=pool.dtype, device=self.device)
            if segment.is_causal:
                hide_later(bias)
        else:
            bias = bias[:, first:]
        if window is not None:
            bias = bias.masked_fill(distance >= window, -torch.inf)
        if pool.leaning is not None:  # what is later is hidden
            bias = bias + pool.leaning[:, distance.clamp(min=0)]
        return segment._replace(first=first, bias=bias)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN
    ) -> Tensor:
        """Write keys and values to the pool and attend; query and result are [1, heads, N, D]."""
        self.write(layer, key, value)
        return self.read(layer, query, scores)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values [1, kv_heads, N, D] to their rows and slots."""
        if self.alone:  # by slices
            segment = self.placed[0][1]
            self.pool.write(layer, segment.row, segment.start, key, value)
            return
        rows, slots = self.mapping
        for kind, fresh in enumerate((key, value)):
            # Indices with a slice between them come first: [N, kv_heads, D] is what is written.
            # Of a forward under autocast, they are less precise than what is kept.
            cached = self.pool.kv[layer][kind]
            cached[rows, :, slots] = fresh[0].transpose(0, 1).to(cached.dtype)

    def read(self, layer: int, query: Tensor, scores: Scores = PLAIN) -> Tensor:
        """Attend to what is written; query and result are [1, heads, N, D].

        The queries may be fewer than the tokens that a plan wrote: another plan's, whose segments
        end where those of the first do.
        """
        if self.alone:  # attended as it lies
            segment = self.placed[0][1]
            keys, values = self.pool.read(layer, segment.row, segment.first, segment.stop)
            return attention(query, keys, values, self.mask, segment.is_causal, scores)
        count, heads = query.shape[2], query.shape[1]  # laid out as the model reads it
        output = query.new_empty(1, count, heads, self.pool.value_dim).transpose(1, 2)
        for group in self.groups:
            group.attend(layer, query, output, scores)
        return output


class Group:
    """Neighbouring rows that attend in one call, S of them with up to T tokens each.

    A call costs more than a few pads inside it: all rows that bring few tokens are one group, but
    for those of many more than the others; on CUDA all short segments are, on a CPU others where
    they bring equally many, so that queries are a view.
    """

    def __init__(self, pool: KVPool, placed: Sequence[tuple[int, Segment]], device: torch.device):
        segments = [segment for _, segment in placed]
        self.pool, self.segments = pool, segments
        self.place, self.row = placed[0][0], segments[0].row
        self.size = segments[-1].row + 1 - self.row
        self.count = max(segment.count for segment in segments)
        self.first = min(segment.first for segment in segments)  # slots that are read
        self.stop = max(segment.stop for segment in segments)
        self.total = sum(segment.count for segment in segments)
        mask, self.cells = segments[0].bias, None
        self.folded: Tensor | None = None  # the mask, once a layer asks
        self.is_causal = len(segments) == 1 and segments[0].is_causal
        if len(segments) > 1:
            mask = self._mask(segments, device)
        self.mask = _aligned(mask)
        if self.size * self.count != self.total:
            cells = [(s.row - self.row) * self.count + n for s in segments for n in range(s.count)]
            self.cells = upload(cells, device)

    def _mask(self, segments: Sequence[Segment], device: torch.device) -> Tensor:
        """[S, 1 or heads, T, slots]; what no token asks for stays visible: nothing is NaN."""
        heads = 1 if self.pool.leaning is None else len(self.pool.leaning)
        length = self.stop - self.first
        firsts, stops = [0] * self.size, [length] * self.size
        for segment in segments:
            firsts[segment.row - self.row] = segment.first - self.first
            stops[segment.row - self.row] = segment.stop - self.first
        slots = torch.arange(length, device=device)
        hidden = (slots >= upload(stops, device)[:, None]) | (
            slots < upload(firsts, device)[:, None]
        )
        shape = (self.size, heads, self.count, length)
        mask = torch.zeros(shape, dtype=self.pool.dtype, device=device)
        mask.masked_fill_(hidden[:, None, None], -torch.inf)
        for segment in segments:
            place = mask[segment.row - self.row, :, : segment.count]
            if segment.bias is not CAUSAL:
                place[..., segment.first - self.first : segment.stop - self.first] = segment.bias
            elif segment.is_causal:
                hide_later(place[..., : segment.count])
        return mask

    def attend(self, layer: int, query: Tensor, output: Tensor, scores: Scores) -> None:
        """Attend for this group's part of query [1, heads, N, D], into the same part of output."""
        part = slice(self.place, self.place + self.total)
        mine, heads = query[0, :, part], query.shape[1]  # [heads, total, D]
        shape = (heads, self.size, self.count, query.shape[-1])
        if self.cells is not None:
            spread = mine.new_zeros(heads, self.size * self.count, shape[-1])
            mine = spread.index_copy_(1, self.cells, mine)
        rows, slots = slice(self.row, self.row + self.size), slice(self.first, self.stop)
        keys, values = self.pool.read_rows(layer, rows, slots)
        queries = mine.reshape(shape).transpose(0, 1)
        mask = self.mask
        if self.size > 1 and folds(queries, keys, scores):
            if self.folded is None:
                self.folded = fold_mask(mask, heads, keys.shape[1])
            mask = self.folded
        attended = attention(queries, keys, values, mask, self.is_causal, scores)
        attended = attended.transpose(0, 1).flatten(1, 2)
        if self.cells is not None:
            attended = attended.index_select(1, self.cells)
        output[0, :, part] = attended


def hide_later(bias: Tensor) -> None:
    """Hide from each token of a chain [T, T] those behind it."""
    bias.masked_fill_(torch.ones_like(bias, dtype=torch.bool).triu_(1), -torch.inf)


def _aligned(mask: Tensor | None) -> Tensor | None:
    """The mask [.., T, C] as CUDA's kernels can read it: a view of a `TreeBias`, which begins
    anywhere, they refuse where its strides look right, and copy in every layer where they do not.
    """
    if mask is None or not mask.is_cuda:
        return mask
    width = mask.shape[-1]
    return F.pad(mask, (0, aligned(width) - width))[..., :width]


def _attention_groups(
    placed: Sequence[tuple[int, Segment]], device: torch.device
) -> list[list[tuple[int, Segment]]]:
    """Cut placed segments into runs that attend together."""
    ragged = device.type == "cuda"
    widest = 0 if ragged else _padded_to([segment.count for _, segment in placed])
    # Rows between two that bring nothing would be pads, too: as many tokens as the widest has. Half
    # as many as rows that bring some, and it takes less to call for each run of these.
    idle = [after.row - row.row - 1 for (_, row), (_, after) in pairwise(placed)]
    few = 0 if 2 * sum(idle) >= len(placed) else FEW
    spread = [*accumulate((count * widest > few for count in idle), initial=0)]

    # Neighbours of one key are a group: a prompt is one by itself; rows padded to the widest, up to
    # where idle ones part them; longer ones of equal count, while rows follow each other.
    def key(item: tuple[int, tuple[int, Segment]]) -> tuple:
        number, (_, segment) = item
        if segment.count > LONG:
            return (number, -1, -1)
        if ragged or segment.count <= widest:
            return (-1, -1, 0 if ragged else spread[number])
        return (-1, segment.count, segment.row - number)

    return [[part for _, part in run] for _, run in groupby(enumerate(placed), key)]


def _padded_to(counts: Sequence[int]) -> int:
    """How many tokens the rows that attend together are padded to, FEW at most: rows of more, as
    prompts among drafts are, take a call of their own, and part those beside them.

    >>> _padded_to([2, 3, 2, 4]), _padded_to([4, 4, 4, 16, 4, 4, 3, 4]), _padded_to([4, 16])
    (4, 4, 16)
    """
    few = {count for count in counts if count <= FEW}

    def tokens(width: int) -> int:
        return sum(width if count <= width else count + 2 * FEW for count in counts)

    return min(few, key=tokens, default=0)
