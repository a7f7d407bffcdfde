"""What all drafts of a Falcon or EAGLE head read, K depths per pass.

The first pass of a draft reads what the target has just committed, with its true features, and its
last K positions give the first K depths. Further passes read drafted blocks: the tokens chosen and
the features predicted, continuing the fusion's state and attention from the parent block. What the
passes read of drafts is scratch behind the row's cache, forgotten at the next draft.

Shapes: R rows, E paths of a pass, K block size, Q queries of a block, L layers of the fusion's
state, H hidden, M inputs of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.eval.drafters.pass_options import PassOptions
from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.plan import CAUSAL, LONG, Plan, Segment
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Tree, TreeBias
from specdraft.models.eagle3 import Eagle3Head, vocabulary_of
from specdraft.models.falcon import FalconHead
from specdraft.models.families.scores import ALIGNED
from specdraft.models.passes.replayed import ReplayedPass
from specdraft.models.passes.row import Block, RowPass, reads_alone
from specdraft.models.sar.blocks import block_index
from specdraft.models.sar.fusion import State
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import frozen_view

# Masks of drafted inputs and of their queries; None: nothing to hide.
Hidden = tuple[TreeBias | None, TreeBias | None]


@dataclass(slots=True)
class Memory:
    """What one row has to read, and the fusion's way back by up to K - 1 positions.

    When fewer than K tokens are committed at a step, the block that ends at the newest position
    reaches back into what has been read: those inputs are read again as part of the new block.
    """

    request: Request
    ahead: list[int]  # tokens one ahead: `old` read before, then the new ones
    features: list[Tensor]  # parts of the features of the same positions
    old: int
    states: State  # before each old position and after the last, each [L, 1, old + 1, H]


class HeadDrafter:
    """A `Drafter` around a head: all rows in one batch, state per row in its own KV pool.

    Subclasses say what is drafted: `grow`. depth: of the deepest node. scratch: drafted inputs that
    the passes of a draft may read. siblings, sharpness: of `row_pass`, which those of a single row
    may go through.
    """

    from_tokens = False
    max_nodes: int
    rules: frozenset[str]

    def __init__(
        self,
        head: FalconHead | Eagle3Head,
        target: Target,
        rows: int,
        capacity: int,
        depth: int,
        scratch: int,
        siblings: int,
        options: PassOptions,
        sharpness: float | None = None,
    ):
        head.check_target(target.identity())
        config, self.feature_layers = head.config, head.config.feature_layers
        way_out = "train a head for this target"
        target.check_layers(self.feature_layers, key="the head's feature_layers", way_out=way_out)
        head = head.to(target.device).eval()
        self.dtype = torch.float32 if head.fuse.start(1, target.device) else options.dtype
        self.head = frozen_view(head, target.prepacked.most, self.dtype)
        self.target, self.k, self.depth = target, config.block_size, depth
        self.reach = head.reading.reach
        self.vocabulary = vocabulary_of(self.head, target)
        self.capacity, self.scratch = capacity, scratch
        self.pool = KVPool(
            [target.device] * config.layers,
            rows,
            config.kv_heads,
            capacity + scratch,
            config.head_dim,
            self.dtype,
            windows=[config.window] * config.layers,
            spare=ALIGNED if target.replays else 0,
        )
        self.memory: list[Memory | None] = [None] * rows
        self.forwards, self.seconds = 0, 0.0
        self._newest_bias = self._bias(torch.ones(self.reach, self.reach, dtype=torch.bool))
        self._read_biases: dict[int, TreeBias] = {}
        self._no_draft = Tree.empty(target.device)
        everywhere = torch.arange(self.pool.capacity, device=target.device)[None]
        # cos and sin, [1, 1, capacity, D] each
        self.rope_tables = tuple(table.to(self.dtype) for table in self.head.rope(everywhere))
        self.row_pass = self._make_row_pass(siblings, sharpness, options.compiles)

    # -- the Drafter protocol --------------------------------------------------------------------

    def start(self, row: int, request: Request) -> None:
        start = tuple(s[:, :, None] for s in self.head.fuse.start(1, self.target.device))
        self.memory[row] = Memory(request, [], [], 0, start)
        self.pool.lengths[row] = 0

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        memory = self.memory[row]
        memory.ahead += tokens
        memory.features.append(features)  # not joined: that is done for all rows at once

    def move(self, row: int, to: int) -> None:
        self.memory[to] = self.memory[row]
        self.pool.move(row, to)

    def draft(self, rows: list[int]) -> list[Tree]:
        """Draft for each row; an empty tree while too few tokens are known."""
        able = [row for row in rows if len(self.memory[row].ahead) >= self.reach]
        trees = dict(zip(able, self.grow(able), strict=True)) if able else {}
        return [trees.get(row, self._no_draft) for row in rows]

    def grow(self, rows: list[int]) -> list[Tree]:
        """Draft behind what is committed of each row."""
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens [..], as precise as the head: [.., H]."""
        return self.target.embed(tokens).to(self.dtype)

    # -- a single row ----------------------------------------------------------------------------

    def _make_row_pass(
        self, siblings: int, sharpness: float | None, compiles: bool
    ) -> RowPass | None:
        """The pass of a single greedy row; None for a head that needs the packed one."""
        if not reads_alone(self.head, self.target):
            return None
        parts = self.head, self.target, self.vocabulary, self.rope_tables
        kind = ReplayedPass if self.target.replays else RowPass
        row_pass = kind(*parts, siblings, sharpness, compiles)
        if compiles:
            row_pass.make(self._caches(0))
        return row_pass

    def goes_alone(self, rows: list[int]) -> bool:
        """Whether `row_pass` does for the rows what packed passes do."""
        return (
            self.row_pass is not None
            and len(rows) == 1
            and self.memory[rows[0]].request.temperature == 0
        )

    def read_alone(self, row: int) -> Block:
        """Read the new inputs of a row, and draft the block behind them."""
        ahead, features, again = inputs = self.unread(row)
        start, tokens = self.pool.lengths[row] - again, upload(ahead, self.target.device)
        block = self.row_pass.read(tokens, features, self._caches(row), start)
        self.remember(row, inputs, (), ())
        return block

    def go_on_alone(self, row: int, block: Block, depth: int) -> Block:
        """Read the most probable path of a row's block, which ends at a depth; draft the next."""
        start = self.pool.lengths[row] + depth - self.k
        return self.row_pass.go_on(block, self._caches(row), start)

    def _caches(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the row, layer by layer."""
        pool, layers = self.pool, range(self.head.config.layers)
        return [pool.read(layer, row, 0, pool.capacity) for layer in layers]

    # -- reading drafted blocks ------------------------------------------------------------------

    def read_blocks(
        self,
        rows: list[int],
        tokens: Tensor,  # [R, E * K], of the blocks
        hidden: Tensor,  # [R, E * K, H], features that they were drawn from, at unit scale
        state: State,  # of the fusion before each block, [L, R * E, H]
        place: tuple[int, int],  # depth of the blocks' ends; drafted inputs read before them
        biases: list[Hidden],  # of each row
    ) -> tuple[Tensor, State]:
        """Read E drafted blocks per row; return their slots [R, E * K, H] and end states."""
        depth, scratch = place
        count = tokens.shape[1]
        inputs = self.head.pairs(self.embed(tokens), hidden)
        fused, state = self.head.fuse(inputs.view(-1, self.k, inputs.shape[-1]), state)
        counts = [self.k] * len(fused)
        starts = [self.pool.lengths[row] for row in rows]
        offsets = range(depth - self.k, depth)
        positions: Sequence[int] = range(starts[0] + offsets[0], starts[0] + depth)
        if len(rows) > 1 or count > self.k:
            offsets = [*offsets] * (count // self.k)
            positions = [start + n for start in starts for n in offsets]
        segments, asks, asking = [], [], count // self.k * self.reach
        for row, start, (own, asked) in zip(rows, starts, biases, strict=True):
            first = start + scratch
            segments.append(Segment(row, first, count, own and own.after(start)))
            last = first + count - asking
            asks.append(Segment(row, last, asking, asked and asked.after(start)))
        slots = self._decode(fused, fused.flatten(0, 1), counts, positions, segments, asks)
        return slots.view(len(rows), count, -1), tuple(s[:, :, -1] for s in state)

    def hiding(self, visible: Tensor) -> Hidden:
        """The masks of drafted inputs, of which each sees what `visible` [E * K, ..] says."""
        if visible.all():
            return None, None
        own = asked = self._bias(visible)
        if self.reach < self.k:  # queries alone: the last of every block
            newest = visible.unflatten(0, (-1, self.k))[:, self.k - self.reach :]
            asked = self._bias(newest.flatten(0, 1))
        return own, asked

    # -- reading what was committed --------------------------------------------------------------

    def unread(self, row: int) -> tuple[list[int], Tensor, int]:
        """Tokens ahead [M] and features [M, H] to read now, and how many were read before."""
        memory = self.memory[row]
        if len(memory.features) > 1:
            memory.features = [torch.cat(memory.features)]
        again = min(max(self.reach - (len(memory.ahead) - memory.old), 0), memory.old)
        skip = memory.old - again
        return memory.ahead[skip:], memory.features[0][skip:], again

    def _read(self, rows: list[int]) -> tuple[Tensor, State]:
        """Read the new inputs of all rows; return their slots [R, K, H] and end states."""
        read = [self.unread(row) for row in rows]
        befores = []  # the fusion's states before the first input to read
        for row, (_, _, again) in zip(rows, read, strict=True):
            place = self.memory[row].old - again
            befores.append(tuple(s[:, :, place] for s in self.memory[row].states))
        counts = [len(ahead) for ahead, _, _ in read]
        fused, states = self._fuse_ragged(read, counts, befores)
        positions: list[Sequence[int]] = []
        segments, asks = [], []
        for row, (ahead, _, again) in zip(rows, read, strict=True):
            start = self.pool.lengths[row] - again
            segments.append(self._read_segment(row, start, len(ahead)))
            positions.append(range(start, start + len(ahead)))
            newest = start + len(ahead) - self.reach
            # Behind others nothing is hidden from them; at the start none would mean a chain.
            bias = None if newest else self._newest_bias.after(newest)
            asks.append(Segment(row, newest, self.reach, bias))
        blocks = _newest(fused, counts, self.reach)
        slots = self._decode(blocks, fused, counts, _in_a_row(positions), segments, asks)
        for row, inputs, before, after in zip(rows, read, befores, states, strict=True):
            self.remember(row, inputs, before, after)
        last_states = zip(*([s[:, :, -1] for s in state] for state in states), strict=True)
        return slots, tuple(torch.cat(parts, 1) for parts in last_states)

    def remember(self, row: int, inputs: tuple, before: State, after: State) -> None:
        """Note that a row has read its inputs, and the fusion's states around them."""
        ahead, features, again = inputs
        memory, old = self.memory[row], min(self.reach - 1, len(ahead))
        self.pool.lengths[row] += len(ahead) - again
        memory.ahead = ahead[len(ahead) - old :]
        memory.features = [features[len(ahead) - old :]]
        memory.old = old
        memory.states = tuple(
            torch.cat((b[:, :, None], a), 2)[:, :, len(ahead) - old :]
            for b, a in zip(before, after, strict=True)
        )

    def _fuse_ragged(
        self, read: list[tuple], counts: list[int], befores: list[State]
    ) -> tuple[Tensor, list[State]]:
        """Fuse the inputs of all rows: fused, one row behind the other, and states [L, 1, M, H] of
        each row."""
        whole = upload([token for ahead, _, _ in read for token in ahead], self.target.device)
        features = self.head.join(_joined([part for _, part, _ in read]).to(self.dtype))
        inputs = self.head.inputs(self.embed(whole), features)
        if not befores[0]:  # every position stands by itself
            fused, _ = self.head.fuse(inputs[None])
            return fused[0], [()] * len(read)
        parts, fused, states = inputs.split(counts), [None] * len(read), [None] * len(read)
        for group in self._side_by_side(counts):
            padded = pad_sequence([parts[n] for n in group], batch_first=True)
            before = zip(*(befores[n] for n in group), strict=True)
            out, after = self.head.fuse(padded, tuple(torch.cat(b, 1) for b in before))
            for place, n in enumerate(group):
                fused[n] = out[place, : counts[n]]
                states[n] = tuple(s[:, place : place + 1, : counts[n]] for s in after)
        return _joined(fused), states

    def _side_by_side(self, counts: list[int]) -> list[list[int]]:
        """Cut rows into those that are read side by side, padded to the longest: what a step
        has brought, short prompts, and every long one alone."""
        step = self.depth + self.k  # at most, with what is read again
        groups = [[n for n, count in enumerate(counts) if count <= step]]
        groups += [[n for n, count in enumerate(counts) if step < count <= LONG]]
        groups += [[n] for n, count in enumerate(counts) if count > LONG]
        return [group for group in groups if group]

    def _read_segment(self, row: int, start: int, count: int) -> Segment:
        """Who sees whom among a row's new inputs: relaxed causal attention (Falcon), in blocks of
        K whose last one ends at the newest position, however the inputs before were cut."""
        if self.head.config.reads != "own":  # written alone: the queries are asked for apart
            return Segment(row, start, count, None)
        if (self.k == 1 and start == 0) or count == 1:
            return Segment(row, start, count, CAUSAL)
        if count not in self._read_biases:
            blocks = block_index(count, self.k, (count - 1) % self.k + 1)
            bias = self._bias(blocks[:, None] >= blocks[None])
            if count > LONG:  # a prompt's length rarely comes again
                return Segment(row, start, count, bias.after(start))
            self._read_biases[count] = bias
        return Segment(row, start, count, self._read_biases[count].after(start))

    # -- the head's parts ------------------------------------------------------------------------

    def _decode(
        self,
        blocks: Tensor,  # [.., Q, H], the fused inputs that queries are made of
        fused: Tensor,  # [.., H], all that is read
        counts: list[int],  # of its inputs, those of each block or row, one behind the other
        positions: Sequence[int],
        segments: list[Segment],
        asks: list[Segment],  # of the queries, where these are not the inputs themselves
    ) -> Tensor:
        """Read fused inputs; return the slots [.., K, H] of the blocks."""
        sequence, rope = fused[None], self._rope_at(positions)
        plan = Plan(self.pool, segments, sequence.device)
        if (window := self.head.config.window) is not None:
            plan.place(upload(positions, sequence.device))
        if self.head.config.reads == "own":
            hidden = self.head.decode(sequence, rope, plan.within(window).attend)[0]
            return _newest(hidden, counts, self.k)
        queries = self.head.reading.queries(blocks)  # [.., Q, H]
        places = _in_a_row(positions[end - self.reach : end] for end in accumulate(counts))
        at = rope if len(places) == len(positions) else self._rope_at(places)
        asking = Plan(self.pool, asks, sequence.device)
        if window is not None:
            asking = asking.within(window, upload(places, sequence.device))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            plan.write(layer, key, value)
            return asking.read(layer, query)

        flat = queries.reshape(1, -1, queries.shape[-1])
        hidden = self.head.decode(flat, at, attend, (sequence, rope))
        return self.head.reading.slots(hidden.view_as(queries))

    def _rope_at(self, positions: Sequence[int]) -> tuple[Tensor, ...]:
        if isinstance(positions, range):
            return tuple(
                table.narrow(2, positions[0], len(positions)) for table in self.rope_tables
            )
        places = upload(positions, self.target.device)
        return tuple(table.index_select(2, places) for table in self.rope_tables)

    def _bias(self, visible: Tensor) -> TreeBias:
        return TreeBias(visible, self.capacity, self.dtype, self.target.device)


def _newest(inputs: Tensor, counts: list[int], reach: int) -> Tensor:
    """The last `reach` inputs of each row [R, reach, H]; inputs: one row behind the other."""
    if len({*counts}) == 1:  # as they lie
        return inputs.view(len(counts), counts[0], -1)[:, -reach:]
    places = [n for end in accumulate(counts) for n in range(end - reach, end)]
    newest = inputs.index_select(0, upload(places, inputs.device))
    return newest.view(len(counts), reach, -1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along their first dimension; a lone one is returned as it is, not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _in_a_row(parts: Iterable[Sequence[int]]) -> Sequence[int]:
    """Positions of all rows, one row behind the other; those of a lone row stay a range."""
    first, *others = parts
    return [*chain(first, *others)] if others else first
