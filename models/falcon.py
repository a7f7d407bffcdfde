"""The Falcon head: a semi-autoregressive (SAR) drafter of k tokens per pass.

Falcon (AAAI 2025). Input at position i is the pair (e(t_{i+1}), f_i): the token one ahead and the
target's feature. A two-layer LSTM fuses the sequence of pairs, a decoder layer with relaxed causal
attention mixes it, and the output at i predicts the feature k ahead, f_{i+k}, whose lm_head drafts
t_{i+k+1}. With k = 1 and a linear fusion it is EAGLE-1. The head holds no embedding and no lm_head:
those are the target's. Beyond the paper, the slots of a block may read the newest input
(`models/sar/reading.py`) and the token drafted before their own (`models/sar/coupling.py`).

Relaxed causal mask, k = 2, first block of one position (phase 1): x sees what is marked.

    position  0 | 1 2 | 3 4
           0  x
           1  x   x x
           2  x   x x
           3  x   x x   x x
           4  x   x x   x x

Shapes: B rows, T time, H hidden, K block size, C blocks, Q queries of a block, R passes, N packed
tokens, D head dimension.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models.feature_layers import check_width
from specdraft.models.sar.blocks import BlockLayout, Seen, attending, rollout_mask
from specdraft.models.sar.coupling import COUPLINGS
from specdraft.models.sar.fusion import FUSIONS, State
from specdraft.models.sar.layer import Attend, DecoderLayer, Rope, checkpointed, rotations
from specdraft.models.sar.reading import READINGS
from specdraft.models.saved import SavedConfig, SavedHead, Scale, Vocabulary
from specdraft.models.weights.prepacked import Packable
from specdraft.recipes.fields import Draft, Few, Fraction, Interval, Tokens, Width, shown
from specdraft.recipes.find import HEADS


@dataclass(frozen=True)
class FalconConfig(SavedConfig):
    """Everything a head's shape and scales depend on; saved beside its weights.

    Raises ValueError for a value that no head has.
    """

    hidden_size: Width
    vocab_size: Vocabulary
    block_size: Draft = 2
    fusion: str = "lstm"
    reads: str = "own"  # what a slot's query reads: a name of READINGS
    coupling: str = "none"  # of a slot with the token before it: a name of COUPLINGS
    layers: Few = 1
    heads: Few = 4
    kv_heads: Few = 4
    intermediate_size: Width = 512
    window: Tokens | None = None  # inputs that an input sees, itself included; None: all before it
    input_norm: bool = True  # of the first decoder layer; EAGLE-1 has none
    rope_theta: Annotated[float, Interval(1, 1e12)] = 10000.0
    norm_eps: Fraction = 1e-5
    # Standard deviations of the target's embeddings and features on the training data. The head
    # works on inputs and outputs divided by them: left alone, a target with embeddings of 0.04 and
    # features of 6.7 hides its tokens from the LSTM.
    embed_scale: Scale = 1.0
    feature_scale: Scale = 1.0
    target: dict = field(default_factory=dict)  # identity of the target it was trained for
    draft_vocab: Vocabulary | None = None  # tokens it drafts among; None: all
    # Of the target, read beside its last feature: models/feature_layers.py.
    feature_layers: tuple[Few, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))  # JSON has lists
        if len(set(self.feature_layers)) < len(self.feature_layers):
            raise ValueError(f"feature_layers = {shown(self.feature_layers)}: each layer once")
        parts = {"fusion": FUSIONS, "reads": READINGS, "coupling": COUPLINGS}
        for key, known in parts.items():
            if (value := getattr(self, key)) not in known:
                raise ValueError(f"{key} = {shown(value)}: must be one of {', '.join(known)}")
        if self.block_size == 1 and not self.is_plain:
            raise ValueError(
                f"block_size = 1: a block of one slot has reads = own and coupling = none, not "
                f"{self.reads} and {self.coupling}"
            )
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must divide hidden_size ({self.hidden_size}) "
                f"and be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.hidden_size // self.heads % 2:
            raise ValueError(
                f"heads = {self.heads}: must divide hidden_size ({self.hidden_size}) into even "
                "parts, which are rotated in pairs"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the slots of a block are left to themselves, as in the paper."""
        return self.reads == "own" and self.coupling == "none"

    @property
    def head_dim(self) -> int:
        """Of attention."""
        return self.hidden_size // self.heads

    @property
    def is_eagle(self) -> bool:
        """Whether this is the head of EAGLE-1 (arXiv 2401.15077): one token per pass, linear."""
        return self.block_size == 1 and self.fusion in ("linear", "biased")


class FalconHead(SavedHead, Packable, tags=["falcon"]):
    """Draft k features per pass from the target's features and the tokens one ahead."""

    trainers = HEADS
    checkpointing = False  # whether backward runs the decoder layers again, to keep less for it

    def __init__(self, config: FalconConfig):
        super().__init__(config)
        width = config.hidden_size
        self.fuse = FUSIONS[config.fusion](2 * width, width)
        self.reading = READINGS[config.reads](width, config.block_size)
        coupling = COUPLINGS[config.coupling]
        self.coupling = coupling and coupling(width)
        self.layers = nn.ModuleList(
            DecoderLayer(
                width,
                config.heads,
                config.kv_heads,
                config.intermediate_size,
                config.norm_eps,
                normed=config.input_norm or number > 0,
            )
            for number in range(config.layers)
        )
        half = width // config.heads // 2
        inverse = config.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("inverse_frequency", inverse, persistent=False)
        # Ascending; whoever makes a new head says which, until then the first.
        drafted = config.draft_vocab
        self.register_buffer("draft_ids", None if drafted is None else torch.arange(drafted))
        count = len(config.feature_layers)
        # Zero, and drawn from no generator: a head with layers begins as the head without.
        self.layer_fusion = nn.Parameter(torch.zeros(width, count * width)) if count else None

    # -- the seam shared by training and drafting ------------------------------------------------

    def join(self, features: Tensor) -> Tensor:
        """Fuse wide features [.., (1 + n) * H] into features [.., H]: f + s F [norm l_1; ..; norm
        l_n], with s the feature scale. Without layers they are returned as they are.

        Raises HeadError for features without the layers that this head reads.
        """
        config, width = self.config, self.config.hidden_size
        check_width(features, width, config.feature_layers)
        if not config.feature_layers:
            return features
        layers = features[..., width:].unflatten(-1, (-1, width))
        normed = F.rms_norm(layers, (width,), eps=config.norm_eps).flatten(-2)
        fused = self.linear(normed, self.layer_fusion)
        return features[..., :width] + config.feature_scale * fused

    def inputs(self, ahead: Tensor, features: Tensor) -> Tensor:
        """Join e(t_{i+1}) and f_i, each [.., H], at the target's scales: [.., 2H] at unit scale."""
        return self.pairs(ahead, features / self.config.feature_scale)

    def pairs(self, ahead: Tensor, hidden: Tensor) -> Tensor:
        """The same of features that are at unit scale, as drafting predicts them."""
        return torch.cat((ahead / self.config.embed_scale, hidden), -1)

    def rope(self, positions: Tensor) -> Rope:
        """cos and signed sin for positions [S, T]: [S, 1, T, D]."""
        return rotations(positions, self.inverse_frequency)

    def decode(
        self,
        queries: Tensor,
        rope: Rope,
        attend: Attend,
        source: tuple[Tensor, Rope] | None = None,
    ) -> Tensor:
        """Run the decoder layers over queries [S, Q, H]; what they make of them, at unit scale.

        source: the fused inputs that keys and values are made of, [S, T, H] with their rope; None:
        of each layer's own input (`reads: own`).
        """
        for number, layer in enumerate(self.layers):
            queries = layer(queries, rope, number, attend, source)
        return queries

    def couple(self, hidden: Tensor, before: Tensor, ahead: Tensor) -> Tensor:
        """What a slot predicts once the token before it is drafted; features in, at unit scale,
        embeddings of the target `ahead`, all [.., H]."""
        return self.coupling(hidden, before, ahead / self.config.embed_scale)

    # -- training --------------------------------------------------------------------------------

    def forward(
        self,
        ahead: Tensor,  # [B, T, H], e(t_{i+1})
        features: Tensor,  # [B, T, (1 + n) * H], f_i and layers of the target
        blocks: Tensor,  # [B, T], index of the block each position belongs to, from 0
        valid: Tensor | None = None,  # [B, T], False at padding
        keep: Tensor | None = None,  # [B, T], positions whose given feature stays in later passes
        passes: int = 1,
        revised: tuple[Tensor, Tensor, Tensor] | None = None,  # ahead, features; [B, T], where
        drafted: Tensor | None = None,  # [B, T, H], `ahead` where that is not of the true tokens
    ) -> Tensor:
        """Predict f_{i+k} at every i; returns [R, B, T, H], one prediction per pass.

        Pass 1 reads the given features. In pass r a block reads what pass r - 1 predicted for it
        from the block before, and sees its r - 1 nearest ancestors as they were in their own
        passes: exactly what drafting r * k tokens ahead meets, for all blocks at once. Coupled
        slots hear the true token before their own.

        With `revised`, the first prediction is that of blocks which read these inputs in place of
        their own, each for itself: what precedes a block, LSTM state included, stays as given.

        Unless the head is the paper's, predictions of blocks that are not whole mean nothing.
        """
        features = self.join(features)
        if revised is not None:
            revised = (revised[0], self.join(revised[1]), revised[2])
        rope = self.rope(torch.arange(ahead.shape[1], device=ahead.device)[None])
        layout = None
        if passes > 1 or not self.config.is_plain:
            layout = BlockLayout(blocks, self.config.block_size)
        chosen = self._drafted_before(ahead if drafted is None else drafted)
        seen: Seen = [() for _ in self.layers]
        outputs: list[Tensor] = []
        state: State = ()
        for number in range(passes):
            if number > 0:
                features = layout.inherited(outputs[-1], features, keep)
            fused, state = self._fuse(self.inputs(ahead, features), state, layout)
            mask = rollout_mask(blocks, valid, number, self.config.window)
            output, seen = checkpointed(
                self.checkpointing, self._predict, fused, rope, seen, mask, layout, chosen
            )
            outputs.append(output)
            if number == 0 and revised is not None:
                revision = self._revise(output, revised, blocks, valid, state, seen, chosen)
        first = outputs[:1] if revised is None else [revision]
        return torch.stack(first + outputs[1:])

    def _drafted_before(self, ahead: Tensor) -> Tensor | None:
        """Of every position the embedding of the token that is drafted before its own, t_{i+k}."""
        return None if self.coupling is None else ahead.roll(1 - self.config.block_size, dims=1)

    def _revise(
        self,
        first: Tensor,  # [B, T, H], the first prediction
        revised: tuple[Tensor, Tensor, Tensor],
        blocks: Tensor,
        valid: Tensor | None,
        state: State,
        seen: Seen,
        chosen: Tensor | None,
    ) -> Tensor:
        """Return the first prediction with that of the revised blocks, each read for itself.

        A block without a revised position would predict what it did, and is not read again.
        """
        ahead, features, where = revised
        layout = BlockLayout(blocks, self.config.block_size, where)
        inputs = self.inputs(layout.gather(ahead), layout.gather(features))
        fused, _ = layout.fuse(self.fuse, inputs, state)
        # No other block sees the revision: what it adds to `seen` is forgotten.
        rope, mask = self.rope(layout.positions), layout.mask(blocks, valid, self.config.window)
        if chosen is not None:
            chosen = layout.gather(chosen)
        output, _ = checkpointed(
            self.checkpointing, self._predict, fused, rope, seen, mask, None, chosen
        )
        return layout.scatter(first, output)

    def _predict(
        self,
        fused: Tensor,  # [B, T, H]
        rope: Rope,
        seen: Seen,
        mask: Tensor,
        layout: BlockLayout | None,  # None: `fused` is laid out already
        chosen: Tensor | None,  # [B, T, H], embedding of the token drafted before each position's
    ) -> tuple[Tensor, Seen]:
        """Run one pass behind what was `seen`; return its features and what is seen after it."""
        after: Seen = []
        if self.config.is_plain:
            output = self.decode(fused, rope, attending(seen, after, mask))
        else:
            output = self._predict_blocks(fused, rope, seen, after, mask, layout, chosen)
        return output * self.config.feature_scale, after

    def _predict_blocks(
        self,
        fused: Tensor,
        rope: Rope,
        seen: Seen,
        after: Seen,
        mask: Tensor,
        layout: BlockLayout | None,
        chosen: Tensor | None,
    ) -> Tensor:
        """Run one pass of a head whose slots read the newest input, or hear the token before their
        own; return what they predict, at unit scale."""
        size = self.config.block_size

        def laid_out(x: Tensor) -> Tensor:  # [B, C, K, H]
            return (x if layout is None else layout.gather(x)).unflatten(1, (-1, size))

        if self.config.reads == "own":
            slots = laid_out(self.decode(fused, rope, attending(seen, after, mask)))
        else:
            queries = self.reading.queries(laid_out(fused))  # [B, C, Q, H]
            rows, count = torch.arange(len(fused), device=fused.device)[:, None], queries.shape[2]
            where = torch.arange(fused.shape[1], device=fused.device).expand(len(fused), -1)
            where = where if layout is None else layout.positions
            where = where.unflatten(1, (-1, size))[..., -count:].flatten(1)  # [B, C * Q]
            at = tuple(
                x.expand(len(fused), -1, -1, -1)[rows, :, where].transpose(1, 2) for x in rope
            )
            attend = attending(seen, after, mask[rows, :, where].transpose(1, 2))
            hidden = self.decode(queries.flatten(1, 2), at, attend, (fused, rope))
            slots = self.reading.slots(hidden.view_as(queries))
        if chosen is not None:
            slots = self._coupled(slots, laid_out(chosen))
        slots = slots.flatten(1, 2)
        return slots if layout is None else layout.in_order(slots)

    def _coupled(self, slots: Tensor, chosen: Tensor) -> Tensor:
        """Couple the slots of blocks, one after the other, with the token before; [.., K, H]."""
        first, *later = slots.unbind(-2)
        coupled = [first]
        for hidden, token in zip(later, chosen.unbind(-2)[1:], strict=True):
            coupled.append(self.couple(hidden, coupled[-1], token))
        return torch.stack(coupled, -2)

    def _fuse(
        self, inputs: Tensor, state: State, layout: BlockLayout | None
    ) -> tuple[Tensor, State]:
        """Fuse whole rows [B, T, 2H], or in later passes each block behind its parent's `state`."""
        if not state:  # the first pass; or nothing is carried, and rows are as good as blocks
            return self.fuse(inputs)
        fused, state = layout.fuse(self.fuse, layout.gather(inputs), state)
        return layout.in_order(fused), tuple(layout.in_order(part) for part in state)
