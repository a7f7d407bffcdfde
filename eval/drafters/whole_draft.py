"""A static draft of all rows with fixed shapes, so that a GPU replays it as a whole.

All passes of a tree follow from what was committed: no choice needs the host. So they are one CUDA
graph (models/passes/graphs.py) for R rows side by side, M inputs of each and L slots in sight; what
differs from draft to draft is which tokens and features are read, and where a row stands.

    slots   0 .. starts     starts .. base       base ..                      capacity
            read before     new inputs [M]       drafted inputs, pass by pass  spare: pads

Shapes: R rows, M inputs, L slots, E paths of a pass, K block size, Q queries of a block, H hidden,
W width of the target's features, D head dimension, N nodes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.eval.drafters.head import HeadDrafter
from specdraft.eval.drafters.static import Pass
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import columns_of, view_from
from specdraft.models.families.scores import aligned
from specdraft.models.passes.graphs import Replays, slots_in_sight
from specdraft.models.passes.replayed import MOST

STEP = 4  # numbers of inputs are multiples of it, so that there are few graphs


class Planned(NamedTuple):
    """A static tree, on the device."""

    passes: list[Pass]
    choices: Tensor  # [N - 1], of each node among the ranked tokens of all passes
    # Given rows, a pass and its slots: what its distributions are made of, and their ranked tokens.
    choose: Callable[..., tuple[Tensor, Tensor]]


class WholeDraft:
    """The drafts of a tree with a head that carries no state, for rows that are greedy."""

    def __init__(self, drafter: HeadDrafter, tree: Planned):
        self.drafter, self.tree = drafter, tree
        self.replays = Replays(drafter.target.device)
        self._grids: dict[tuple[int, int, int], DraftGrid] = {}

    def grow(self, rows: list[int]) -> Tensor | None:
        """Read what is new of each row and draft: tokens [.., N - 1]; None, and nothing is read,
        where a row has a prompt to read."""
        own, read = self.drafter, [self.drafter.unread(row) for row in rows]
        longest = max(len(ahead) for ahead, _, _ in read)
        if longest > MOST:
            return None
        size = self._size(rows, longest)
        if size not in self._grids:
            self._grids[size] = DraftGrid(own, self.tree, *size, like=read[0][1])
        grid = self._grids[size]
        grid.fill(rows, read)
        nodes = self.replays.run(grid, grid.draft)
        for row, inputs in zip(rows, read, strict=True):
            own.remember(row, inputs, (), ())
        return nodes.index_select(0, upload(rows, nodes.device))

    def _size(self, rows: list[int], longest: int) -> tuple[int, int, int]:
        """R, M and L that hold a draft."""
        own, lengths = self.drafter, self.drafter.pool.lengths
        count = min(1 << max(rows).bit_length(), len(lengths))
        inputs = -(-longest // STEP) * STEP
        stop = max(lengths[:count]) + inputs + own.scratch
        return count, inputs, slots_in_sight(stop, own.pool.capacity)


class DraftGrid:
    """The tensors of one fixed shape."""

    def __init__(
        self,
        drafter: HeadDrafter,
        tree: Planned,
        rows: int,
        inputs: int,
        slots: int,
        like: Tensor,  # features, [.., W]
    ):
        self.own, self.tree = drafter, tree
        self.rows, self.inputs, self.slots = rows, inputs, slots
        device = like.device
        self.tokens = torch.zeros(rows, inputs, dtype=torch.long, device=device)
        self.features = like.new_zeros(rows, inputs, like.shape[-1])
        self._data = torch.zeros(2, rows, dtype=torch.long, device=device)
        self.starts, self.counts = self._data  # where a row's inputs begin, and how many there are
        self._row_of = torch.arange(rows, device=device)[:, None]
        self._slots = torch.arange(aligned(slots), device=device)
        self._views = [self._view(plan) for plan in tree.passes[1:]]

    def _view(self, plan: Pass) -> Tensor:
        """What each query of a later pass sees of what is cached, of what is drafted, and of what
        is behind it, [E * Q, 2 + drafted], additive."""
        own = self.own
        visible = plan.visible.unflatten(0, (-1, own.k))[:, own.k - own.reach :].flatten(0, 1)
        return view_from(visible, own.dtype).to(own.target.device)

    # -- before a draft --------------------------------------------------------------------------

    def fill(self, rows: list[int], read: list[tuple]) -> None:
        """Put what is read in its place; a row that drafts nothing reads nothing."""
        lengths, tokens, places = self.own.pool.lengths, [], []
        starts, counts = lengths[: self.rows], [0] * self.rows
        for row, (ahead, _, again) in zip(rows, read, strict=True):
            starts[row], counts[row] = lengths[row] - again, len(ahead)
            tokens += ahead
            places += range(row * self.inputs, row * self.inputs + len(ahead))
        sent = upload([*starts, *counts, *tokens, *places], self.tokens.device)
        data, ids, where = sent.split((2 * self.rows, len(tokens), len(tokens)))
        self._data.copy_(data.view(2, -1))
        features = torch.cat([part for _, part, _ in read])
        self.tokens.view(-1).index_copy_(0, where, ids)
        self.features.flatten(0, 1).index_copy_(0, where, features)

    # -- in a draft ------------------------------------------------------------------------------

    def draft(self) -> Tensor:
        """Run all passes; return the tokens of the nodes [R, N - 1]."""
        ranked, drawn = [], None
        for plan in self.tree.passes:
            slots = self._extend(plan, ranked[-1], drawn) if ranked else self._read()
            drawn, tokens = self.tree.choose([], plan, slots, {})
            ranked.append(tokens)
        return torch.cat(ranked, 1).index_select(1, self.tree.choices)

    def _read(self) -> Tensor:
        """The first pass, over what is new: its slots [R, K, H]."""
        own, head = self.own, self.own.head
        features = head.join(self.features.to(own.dtype))
        fused, _ = head.fuse(head.inputs(own.embed(self.tokens), features))
        numbers = torch.arange(self.inputs, device=fused.device)
        positions = self.starts[:, None] + numbers
        written = positions.masked_fill(numbers >= self.counts[:, None], own.pool.capacity)
        newest = self.counts[:, None] + numbers[: own.reach] - own.reach
        newest = newest.clamp(min=0)
        blocks = fused.gather(1, newest[..., None].expand(-1, -1, fused.shape[-1]))
        # The first slot is always seen: of a row that reads nothing nothing shall be NaN.
        hidden = self._slots >= (self.starts + self.counts).clamp(min=1)[:, None]
        mask = torch.zeros_like(hidden, dtype=own.dtype).masked_fill_(hidden, -torch.inf)
        mask = mask[:, None, None].expand(-1, -1, own.reach, -1)
        places = positions, written, self.starts[:, None] + newest
        return self._decode(fused, blocks[:, None], places, mask)

    def _extend(self, plan: Pass, ranked: Tensor, drawn: Tensor) -> Tensor:
        """A later pass, over drafted blocks: its slots [R, E * K, H]."""
        own, head, size = self.own, self.own.head, self.own.k
        tokens, hidden = ranked.index_select(1, plan.blocks), drawn.index_select(1, plan.features)
        fused, _ = head.fuse(head.pairs(own.embed(tokens), hidden))
        starts, count = self.starts + self.counts, fused.shape[1]
        base = starts[:, None]
        numbers = torch.arange(count, device=fused.device)
        positions = base + plan.depth - size + numbers % size
        written = base + plan.scratch + numbers
        blocks = fused.unflatten(1, (-1, size))[:, :, size - own.reach :]
        asked = positions.unflatten(1, (-1, size))[:, :, size - own.reach :].flatten(1)
        view = self._views[self.tree.passes.index(plan) - 1]
        columns = columns_of(self._slots, starts, view.shape[1] - 2)
        mask = view.index_select(1, columns.flatten()).unflatten(1, columns.shape)
        return self._decode(
            fused, blocks, (positions, written, asked), mask.transpose(0, 1)[:, None]
        )

    def _decode(
        self,
        fused: Tensor,  # [R, T, H], all that is read
        blocks: Tensor,  # [R, E, Q, H], of it, what queries are made of
        places: tuple[Tensor, Tensor, Tensor],  # [R, T] positions and slots, [R, E * Q] positions
        mask: Tensor,  # [R, 1, E * Q, L]
    ) -> Tensor:
        """The slots [R, E * K, H] of blocks."""
        own, head = self.own, self.own.head
        positions, written, asked = places

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for cached, fresh in zip(own.pool.kv[layer], (key, value), strict=True):
                # Indices with a slice between them come first: [R, T, kv_heads, D] is written.
                cached[self._row_of, :, written] = fresh.transpose(1, 2)
            keys, values = own.pool.read_rows(layer, slice(self.rows), slice(self.slots))
            grouped = query.shape[1] != keys.shape[1]
            seen = mask[..., : self.slots]
            return F.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=grouped)

        queries = head.reading.queries(blocks)
        source = fused, self._rope(positions)
        hidden = head.decode(queries.flatten(1, 2), self._rope(asked), attend, source)
        return head.reading.slots(hidden.view_as(queries)).flatten(1, 2)

    def _rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """cos and sin at positions [R, T]; a pad beyond the table's end gets its last entry."""
        own, places = self.own, positions.clamp(max=self.own.pool.capacity - 1).flatten()
        tables = (table[0, 0].index_select(0, places) for table in own.rope_tables)
        return tuple(table.view(len(positions), 1, -1, table.shape[-1]) for table in tables)
