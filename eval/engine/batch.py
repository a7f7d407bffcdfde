"""What one step reads: of every row some committed tokens and the tree behind them, packed.

Two rows, one with the last 3 tokens of its prompt left to read and no draft, one running with a
tree of 2 drafted nodes, are 6 packed tokens (c committed, r root, d drafted):

    packed    0 1 2   3 4 5         RowInput of row 0: count 3, first 0, root 2, stop 3
    token     c c r   r d d         RowInput of row 1: count 1, first 3, root 3, stop 6
    verified      0   1 2 3         places among the logits: what the target says after each node

The root is the last committed token, so that every row has one. A prompt that is read in parts has
nothing verified until its last part.

Shapes: N packed tokens, M nodes that are verified.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.plan import Segment
from specdraft.eval.engine.row import Row
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Tree, after_chain


def schedule(rows: Sequence[Row | None], prefill: int) -> list[tuple[Row, int]]:
    """The rows that take part in a step, by slot, and how many unread tokens each reads.

    Prompts share `prefill` tokens in the order of admission; running rows always take part.
    """
    shares, prompts = [], []
    for row in rows:
        if row and row.tokens:
            shares.append((row, 1))
        elif row:
            prompts.append(row)
    if not prompts:
        return shares
    for row in sorted(prompts, key=lambda row: row.index):
        count = min(len(row.unread), prefill)
        prefill -= count
        if count:
            shares.append((row, count))
    return sorted(shares, key=lambda share: share[0].slot)


class RowInput(NamedTuple):
    """One row's part of a packed forward, and where it lies there."""

    row: Row
    count: int  # unread tokens that are read now, the root included
    tree: Tree
    first: int  # of its packed tokens
    root: int
    stop: int  # where the next row's begin
    # Its places among the verified nodes; None where the end of what is committed is not reached.
    verified: slice | None


def row_inputs(
    shares: Sequence[tuple[Row, int]], drafts: Mapping[int, Tree], empty: Tree
) -> list[RowInput]:
    """Put drafts, by slot, behind what their rows read; rows without one get the empty tree."""
    inputs, first, node = [], 0, 0
    for row, count in shares:
        tree, root = drafts.get(row.slot, empty), first + count - 1
        stop = root + len(tree.topology)
        verified = None
        if count == len(row.unread):
            verified = slice(node, node := node + stop - root)
        inputs.append(RowInput(row, count, tree, first, root, stop, verified))
        first = stop
    return inputs


class Batch(NamedTuple):
    """The input of a packed forward."""

    ids: Tensor  # [N]
    positions: Tensor  # [N]
    segments: list[Segment]
    nodes: Tensor | None  # [M], places of those that are verified; None: all N are
    cached: int  # tokens in the rows' caches before it, and pads among them
    cache_pads: int


def pack(inputs: Sequence[RowInput], packed: PackedTarget) -> Batch:
    """Concatenate the tokens of all rows; no pad anywhere (EMS-SD, unpadded inputs)."""
    ids, positions, segments, nodes, cached, pads = [], [], [], [], 0, 0
    device = packed.target.device
    for one in inputs:
        row, start = one.row, one.row.num_cached_tokens
        topology = after_chain(one.count - 1, one.tree.topology)
        segments.append(segment := packed.segment(row.slot, topology, one.count))
        ids.append(row.unread[: one.count])
        if one.stop - one.root > 1:
            ids.append(one.tree.tokens)
        positions += map(start.__add__, topology.depths)
        cached += start
        pads += segment.start - start
        if one.verified:
            nodes += range(one.root, one.stop)
    nodes = upload(nodes, device) if len(nodes) < len(positions) else None
    places = upload(positions, device)
    return Batch(_joined(ids, device), places, segments, nodes, cached, pads)


def _joined(parts: Sequence[list[int] | Tensor], device: torch.device) -> Tensor:
    """Committed tokens, which the host knows, and drafted ones in one tensor [N]."""
    if device.type == "cpu":  # where to read a tensor is no wait, and takes less than to join two
        lists = (part if isinstance(part, list) else part.tolist() for part in parts)
        return upload([*chain.from_iterable(lists)], device)
    held = [upload(part, device) if isinstance(part, list) else part for part in parts]
    return torch.cat(held) if len(held) > 1 else held[0]  # plain decoding has nothing to join
