"""The packed forward: tokens of all rows in one sequence, no pad anywhere (EMS-SD).

EMS-SD, "unpad inputs": the rows' tokens are concatenated to [1, N]; linear layers see exactly the
real tokens, and only attention needs to know which token belongs to which row. It learns that from
a plan handed through the model's keyword arguments to an attention function registered with
transformers, so any full-attention decoder-only model works unmodified.

Shapes: N tokens of all rows, T of one row, C capacity of the cache, D head dimension.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from specdraft.eval.families import check_forward, check_positions, check_supported, measure
from specdraft.eval.kv import KVPool
from specdraft.eval.tree import Topology, chain
from specdraft.models.target import Target

ATTENTION = "specdraft_packed"
CAUSAL = None  # a segment without a bias is a chain that starts an empty row


@dataclass(frozen=True)
class Segment:
    """The tokens of one row in a packed forward, written to its slots start .. start + count."""

    row: int
    start: int
    count: int
    # [count, start + count] added to attention scores. None: nothing to hide (one token) or, at
    # start 0, a causal chain.
    bias: Tensor | None


class Plan:
    """Which token of a packed forward belongs to which row, and what it may attend to.

    Rows that bring a single token, as in plain decoding, attend together: one call over their
    regions of the pool, cut at the longest row, instead of one call each. What is stored and what
    the linear layers see stays unpadded.
    """

    def __init__(self, pool: KVPool, segments: Sequence[Segment]):
        self.pool = pool
        firsts = accumulate((segment.count for segment in segments), initial=0)
        placed = list(zip(firsts, segments, strict=False))
        single = [(first, segment) for first, segment in placed if segment.count == 1]
        self.single = SingleTokens(pool, single) if len(single) > 1 else None
        self.others = [part for part in placed if self.single is None or part[1].count > 1]


class SingleTokens:
    """The rows of a plan that bring one token each: S of them."""

    def __init__(self, pool: KVPool, placed: Sequence[tuple[int, Segment]]):
        device = pool.data.device
        rows = [segment.row for _, segment in placed]
        starts = [segment.start for _, segment in placed]
        self.pool = pool
        self.tokens = torch.tensor([first for first, _ in placed], device=device)
        self.rows = torch.tensor(rows, device=device)
        self.slots = torch.tensor(starts, device=device)
        self.everyone = rows == list(range(pool.data.shape[2]))
        self.longest = max(starts) + 1
        self.mask = torch.arange(self.longest, device=device) <= self.slots[:, None, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        """Write and attend; query [1, heads, N, D] of all tokens; returns [1, heads, S, D]."""
        for kind, tensor in enumerate((key, value)):
            fresh = tensor[0, :, self.tokens].transpose(0, 1)  # [S, kv_heads, D]
            self.pool.data[layer, kind, self.rows, :, self.slots] = fresh
        keys, values = (self._region(layer, kind) for kind in range(2))
        mine = query[:, :, self.tokens].transpose(0, 2)  # [S, heads, 1, D]
        output = F.scaled_dot_product_attention(mine, keys, values, self.mask, **options)
        return output.transpose(0, 2)

    def _region(self, layer: int, kind: int) -> Tensor:
        region = self.pool.data[layer, kind, :, :, : self.longest]
        return region if self.everyone else region[self.rows]


class TreeBias:
    """Additive masks of one topology behind any number of cached tokens, without allocating.

    One row-major tensor [T, C + T] holds zeros (the whole prefix is visible) and then the tree;
    the mask behind `start` cached tokens is the view of its last start + T columns.
    """

    def __init__(self, visible: Tensor, capacity: int, dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        zeros = torch.zeros(len(visible), capacity, dtype=dtype)
        self.full = torch.cat((zeros, bias), 1).to(device)

    def behind(self, start: int) -> Tensor:
        """The mask [T, start + T]."""
        return self.full[:, self.capacity - start :]


def attend(plan: Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None):
    """Write keys and values to the pool and attend row by row; query [1, heads, N, D]."""
    options = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if plan.single is None and len(plan.others) == 1:
        return _attend_row(plan.pool, plan.others[0], layer, query, key, value, options)
    output = torch.empty_like(query)
    for part in plan.others:
        first, segment = part
        output[:, :, first : first + segment.count] = _attend_row(
            plan.pool, part, layer, query, key, value, options
        )
    if plan.single is not None:
        tokens = plan.single.attend(layer, query, key, value, **options)
        output[:, :, plan.single.tokens] = tokens
    return output


def _attend_row(pool: KVPool, part: tuple[int, Segment], layer, query, key, value, options):
    first, segment = part
    last, stop = first + segment.count, segment.start + segment.count
    pool.write(layer, segment.row, segment.start, key[0, :, first:last], value[0, :, first:last])
    keys, values = pool.read(layer, segment.row, stop)
    causal = segment.bias is CAUSAL and segment.start == 0 and segment.count > 1
    return F.scaled_dot_product_attention(
        query[:, :, first:last], keys, values, segment.bias, is_causal=causal, **options
    )


def _attention(module, query, key, value, attention_mask, scaling=None, plan=None, **_):
    output = attend(plan, module.layer_idx, query, key, value, scaling)
    return output.transpose(1, 2), None


class PackedTarget:
    """A target ready for packed forwards: its own KV pool, the target's tensors, shared."""

    def __init__(self, target: Target, rows: int, capacity: int):
        check_supported(target)
        check_positions(target, capacity)
        AttentionInterface.register(ATTENTION, _attention)
        # A structural copy that shares every tensor, so that the caller's model keeps its own
        # attention function.
        tensors = [*target.model.parameters(), *target.model.buffers()]
        view = copy.deepcopy(target.model, {id(tensor): tensor for tensor in tensors})
        geometry = measure(target, view)
        view.config._attn_implementation = ATTENTION
        self.base = view.base_model
        self.target = target
        self.pool = KVPool(
            **vars(geometry),
            rows=rows,
            capacity=capacity,
            dtype=target.dtype,
            device=target.device,
        )
        self._biases: dict[Topology, TreeBias] = {}
        check_forward(target, self._read_in_two, capacity)

    def segment(self, row: int, topology: Topology) -> Segment:
        """Plan one row's tree (or, on an empty row, its prompt as a chain) behind its cache."""
        start, count = self.pool.lengths[row], len(topology)
        if count == 1 or (start == 0 and topology.is_chain):
            return Segment(row, start, count, CAUSAL)
        if topology not in self._biases:
            self._biases[topology] = TreeBias(
                topology.ancestors, self.pool.capacity, self.target.dtype, self.target.device
            )
        return Segment(row, start, count, self._biases[topology].behind(start))

    def forward(self, ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Run packed ids [N] at absolute positions [N]; return features [N, H]."""
        hidden = self.base(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            plan=Plan(self.pool, segments),
        )
        return hidden.last_hidden_state[0]

    @torch.inference_mode()
    def _read_in_two(self, ids: Tensor) -> Tensor:
        """Features [T, H] of one row read as a prompt and then a chain behind it."""
        positions, half = torch.arange(len(ids), device=ids.device), (len(ids) + 1) // 2
        features = []
        for part in (slice(0, half), slice(half, len(ids))):
            if count := len(ids[part]):
                # Not self.segment: a subclass is not built yet when this runs.
                segments = [PackedTarget.segment(self, 0, chain(count - 1))]
                features.append(PackedTarget.forward(self, ids[part], positions[part], segments))
                self.pool.lengths[0] += count
        self.pool.lengths[0] = 0
        return torch.cat(features)
