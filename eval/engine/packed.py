"""The packed forward: tokens of all rows in one sequence, no pad anywhere (EMS-SD).

EMS-SD, "unpad inputs": the rows' tokens are concatenated to [1, N]; linear layers see exactly the
real tokens, and only attention needs to know which token belongs to which row. It learns that from
a plan (plan.py) handed through the model's keyword arguments to an attention function registered
with transformers, so a decoder-only model works unmodified if its attention goes through that
interface.

Row 0 with 5 cached tokens reads a root and two children, row 2 with 3 cached its root alone:

    packed token  0 1 2 3       what row 0 may see (`TreeBias`: 0 visible, -inf hidden):
    row_mapping   0 0 0 2       token 0   0 0 0 0 0   0    -inf -inf
    slot_mapping  5 6 7 3       token 1   0 0 0 0 0   0    0    -inf
                                token 2   0 0 0 0 0   0    -inf 0

Shapes: N tokens of all rows, T of one row, H hidden.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.plan import CAUSAL, LONG, Plan, Segment
from specdraft.eval.engine.source import Sources
from specdraft.eval.engine.states import States
from specdraft.eval.engine.tree import Topology, TreeBias, chain
from specdraft.eval.families.probe import measure
from specdraft.eval.families.recurrent import recurrent_layers
from specdraft.eval.families.support import check_forward, check_positions, check_supported
from specdraft.models.families.alibi import attention_inputs, has_alibi
from specdraft.models.families.encoder_decoder import Places
from specdraft.models.families.scores import Scores
from specdraft.models.feature_layers import Layers, Taps, remove_captures, wide_features
from specdraft.models.target import Target
from specdraft.models.weights.placement import shared
from specdraft.models.weights.prepacked import prepack_layers
from specdraft.recipes.errors import TargetError

ATTENTION, BESIDE_SOURCE = "specdraft_packed", "specdraft_packed_beside_source"
KEPT_BIASES = 64  # topologies whose masks are kept, the most recently used


def _attention(module, query, key, value, attention_mask, scaling=None, plan=None, **options):
    layer = plan.pool.numbers[module.layer_idx]
    plan = plan.within(plan.pool.windows[layer]).on(query.device)
    scores = Scores(scaling, options.get("softcap"), options.get("s_aux"))
    attended = plan.attend(layer, query, key, value, scores)
    return attended.transpose(1, 2).contiguous(), None  # some families take views of it


def _attention_beside_source(module, query, key, value, *mask, sources=None, sight=None, **options):
    if not module.reads_source:
        return _attention(module, query, key, value, *mask, **options)
    layer, sight = module.layer_idx, sight.on(query.device)
    sources.write(layer, key, value)
    attended = sight.read(layer, query, Scores(options.get("scaling")))
    return attended.transpose(1, 2).contiguous(), None


class PackedTarget:
    """A target ready for packed forwards: its own KV pool, the target's tensors, shared.

    layers: of the target, that features have behind them: models/feature_layers.py.
    """

    spare = 0  # slots of a row behind its capacity

    def __init__(self, target: Target, rows: int, capacity: int, layers: Layers = ()):
        target.check_runs()
        check_supported(target)
        check_positions(target, capacity)
        AttentionInterface.register(ATTENTION, _attention)
        AttentionInterface.register(BESIDE_SOURCE, _attention_beside_source)
        # A structural copy that shares every tensor, so that the caller's model keeps its own
        # attention function.
        self.base = view = copy.deepcopy(target.base, shared(target.model))
        remove_captures(view)
        prepack_layers(view, target.prepacked)
        recurrent = recurrent_layers(target, view)
        others = [layer.number for layer in recurrent]
        geometry, of_sources = measure(target, view, capacity, others)
        if not has_alibi(view):
            view.config._attn_implementation = BESIDE_SOURCE if of_sources else ATTENTION
        self.target, self.layers = target, layers
        sizes = {"rows": rows, "dtype": target.dtype}
        self.pool = KVPool(**vars(geometry), **sizes, capacity=capacity, spare=self.spare)
        self.sources = None
        if of_sources:
            self.sources = Sources(target, partial(KVPool, **vars(of_sources), **sizes))
        self.states = States(recurrent, rows) if recurrent else None
        self.inputs = 0  # tokens that the linear layers saw in the last forward, pads included

        def bias(topology: Topology) -> TreeBias:
            return TreeBias(topology.ancestors, capacity, target.dtype, target.device)

        # Kept for the next draft of the same shape; not bound to self, which would be a cycle.
        self._bias, self._kept_bias = bias, lru_cache(KEPT_BIASES)(bias)
        self.taps = Taps.of(view, layers, target.depth)
        self._check(capacity)

    def _check(self, capacity: int) -> None:
        """Compare what packed forwards give with what the model does."""
        try:
            check_forward(self.target, self._read_in_two, capacity, self.layers)
        except TargetError:
            if self.taps is None:
                raise
            # Its hidden states may not be what its layers return: transformers knows which are.
            self.taps.remove()
            self.taps = None
            check_forward(self.target, self._read_in_two, capacity, self.layers)

    def start(self, row: int, source: Sequence[int] = (), padding: Sequence[int] = ()) -> None:
        """Empty a row for a new request, and read its source where there is one."""
        self.pool.lengths[row] = 0
        if self.sources:
            self.sources.start(row, source, padding)

    def move(self, row: int, to: int) -> None:
        """Go on with a row's request in another row, whose own has ended."""
        self.pool.move(row, to)
        for part in (self.sources, self.states):
            if part:
                part.move(row, to)

    def segment(self, row: int, topology: Topology, known: int = 1) -> Segment:
        """Plan one row's tree (or, on an empty row, its prompt as a chain) behind its cache.

        known: how many of its nodes, from the first, are committed, whatever is accepted.
        """
        start, count = self.pool.lengths[row], len(topology)
        bias = CAUSAL
        if count > 1 and (start or not topology.is_chain):
            bias = (self._kept_bias if count <= LONG else self._bias)(topology).after(start)
        return Segment(row, start, count, bias, 0, topology, known)

    def keep(self, row: int, path: list[int]) -> None:
        """Commit the accepted nodes of what a row has just read; see `KVPool.keep`."""
        self.pool.keep(row, path)
        if self.states:
            self.states.keep(row, path)

    def forward(self, ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Run packed ids [N] at absolute positions [N]; return features [N, H], wide with layers of
        the target."""
        self.inputs = len(ids)
        plan = Plan(self.pool, segments, ids.device)
        if self.states:
            self.states.begin(segments, ids.device)
        if self.pool.positions is not None:
            plan.place(positions)
        return self._run(ids, positions, plan)

    def _run(self, ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        inputs = {"input_ids": ids[None], "position_ids": positions[None]}
        if self.sources:
            inputs = {"input_ids": ids[None]} | self._beside_sources(positions, plan.segments)
        inputs |= attention_inputs(self.base, _attention, plan=plan)
        return wide_features(self.base, self.layers, ids.device, self.taps, **inputs)[0]

    def _beside_sources(self, positions: Tensor, segments: Sequence[Segment]) -> dict:
        sources, device = self.sources, positions.device
        return {
            "encoder_hidden_states": sources.states([segment.row for segment in segments]),
            "attention_mask": positions.new_ones(1, len(positions)),  # or it would be made
            "past_key_values": Places(positions),
            "sources": sources,
            "sight": Plan(sources.pool, sources.sights(segments), device),
        }

    @torch.inference_mode()
    def _read_in_two(self, ids: Tensor) -> Tensor:
        """Features [T, H] of one row read as a prompt and then a chain behind it."""
        positions, half = torch.arange(len(ids), device=ids.device), (len(ids) + 1) // 2
        features = []
        PackedTarget.start(self, 0, ids.tolist())
        for part in (slice(0, half), slice(half, len(ids))):
            if count := len(ids[part]):
                # Not self.segment: a subclass is not built yet when this runs.
                segments = [PackedTarget.segment(self, 0, chain(count - 1))]
                features.append(PackedTarget.forward(self, ids[part], positions[part], segments))
                self.keep(0, [*range(count)])
        self.pool.lengths[0] = 0
        return torch.cat(features)
