"""The head of EAGLE-3: layers of the target fused, one decoder layer, an lm_head of its own.

EAGLE-3 (arXiv 2503.01840). Low, middle and high layers of the target become one state, h_i = F
[l_1; ..; l_n]. A decoder layer whose attention reads [norm e(t_{i+1}); norm h_i] adds to h_i, which
gives the state g_i, and softmax(L norm g_i) drafts t_{i+2} among N tokens. Drafting reads g_i in
place of h_{i+1}, where the target's layers are not known yet. What g_i has to be, nothing says:
there is no loss on features. EAGLE-3.1 normalises each layer before F, and feeds norm g_i back.

It drafts a token per pass: to the decoder it is a semi-autoregressive head with blocks of one
position, and has the seams of models/falcon.py.

Shapes: B rows, T time, H hidden, n layers, R passes, V vocabulary, N tokens drafted among.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdraft.models.embeddings import DraftVocabulary
from specdraft.models.falcon import FalconHead
from specdraft.models.feature_layers import check_width
from specdraft.models.sar.blocks import BlockLayout, Seen, attending, rollout_mask
from specdraft.models.sar.fusion import State
from specdraft.models.sar.layer import Attend, DecoderLayer, Rope, checkpointed, rotations
from specdraft.models.sar.reading import Own
from specdraft.models.saved import SavedConfig, SavedHead, Vocabulary
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import in_a_line
from specdraft.recipes.fields import Few, Fraction, Interval, Tokens, Width, shown

# Rotations that depend on no sequence's length.
ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Eagle3Config(SavedConfig):
    """Everything a head's shape depends on; saved beside its weights.

    Raises ValueError for a value that no head has.
    """

    hidden_size: Width
    vocab_size: Vocabulary
    feature_layers: tuple[Few, ...]  # of the target, ascending: models/feature_layers.py
    heads: Few = 4
    kv_heads: Few = 4
    head_dim: Annotated[int, Interval(2, 10**4)] = 32
    intermediate_size: Width = 512
    window: Tokens | None = None  # inputs that an input sees, itself included; None: all before it
    rope: dict = field(  # `rope_parameters` of transformers
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    norm_eps: Fraction = 1e-5
    # RMSNorm of the target's layers before they are fused: none, of each (3.1), of all in one.
    layer_norms: Literal["none", "each", "joint"] = "none"
    norm_residual: bool = False  # the layer adds to norm h_i, not to h_i
    norm_output: bool = False  # norm g_i is what is fed back (3.1)
    target: dict = field(default_factory=dict)  # identity of the target it was trained for
    draft_vocab: Vocabulary | None = None  # N; None: all
    architecture: Literal["eagle3"] = "eagle3"  # what tells its config.json from another head's

    # What it is as a semi-autoregressive head; it works at unit scale.
    block_size = layers = 1
    fusion, coupling, reads = "layers", "none", "own"
    feature_scale, is_plain, is_eagle = 1.0, True, False

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = tuple(self.feature_layers)  # JSON has lists
        object.__setattr__(self, "feature_layers", layers)
        if not layers or list(layers) != sorted({*layers}):
            raise ValueError(
                f"feature_layers = {shown(layers)}: EAGLE-3 reads some, each once, in ascending "
                "order"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim}: must be even, for it is rotated in pairs"
            )
        self.rotary()

    def rotary(self) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2], and what cos and sin are multiplied by.

        Raises ValueError for a rotation that there is not.
        """
        if self.rope.get("rope_type") not in ROPES:
            raise ValueError(
                f"rope = {shown(self.rope)}: rope_type must be one of {', '.join(ROPES)}"
            )
        try:
            rotary = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=self.heads * self.head_dim,
                    num_attention_heads=self.heads,
                    head_dim=self.head_dim,
                    rope_parameters=dict(self.rope),
                )
            )
        except Exception as error:  # whatever a rotation makes of values that are none
            raise ValueError(f"rope = {shown(self.rope)}: {in_a_line(error)}") from error
        return rotary.inv_freq, float(rotary.attention_scaling)


class Apart(nn.Module):
    """The fusion of a head that reads token and state side by side: none."""

    KEPT = 4  # the token's norm, and what lm_head reads of all passes together

    def start(self, sequences: int, device: torch.device) -> State:
        return ()

    def forward(self, inputs: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return inputs, ()


class Eagle3Layer(DecoderLayer):
    """Llama's layer, but that its attention reads [norm e; norm h] and it adds to h."""

    def __init__(self, config: Eagle3Config):
        width, heads = config.hidden_size, (config.heads, config.kv_heads)
        inner, eps = config.intermediate_size, config.norm_eps
        super().__init__(width, *heads, inner, eps, reads=2 * width, dim=config.head_dim)
        self.embedding_norm = nn.Parameter(torch.ones(width))
        self.norm_residual = config.norm_residual

    def _normed(self, x: Tensor) -> Tensor:
        embedding, state = x.chunk(2, -1)
        normed = F.rms_norm(embedding, state.shape[-1:], self.embedding_norm, self.eps)
        return torch.cat((normed, super()._normed(state)), -1)

    def _residual(self, x: Tensor) -> Tensor:
        state = x.chunk(2, -1)[1]
        return super()._normed(state) if self.norm_residual else state


class Eagle3Head(SavedHead, tags=["eagle3"]):
    """Draft a token per pass from layers of the target and the tokens one ahead."""

    noun, trainers = "trained EAGLE-3 head", ("eagle3",)
    checkpointing = False  # whether backward runs the passes again, to keep less for it

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        width, joined = config.hidden_size, len(config.feature_layers) * config.hidden_size
        self.fc = nn.Linear(joined, width, bias=False)
        self.layer_norms = None
        if config.layer_norms != "none":
            self.layer_norms = nn.Parameter(torch.ones(joined))
        self.layer = Eagle3Layer(config)
        self.norm = nn.Parameter(torch.ones(width))
        # Not a number until it is set or loaded: a tensor that is missing must not go unseen.
        drafted = config.draft_vocab or config.vocab_size
        self.lm_head = nn.Parameter(torch.full((drafted, width), torch.nan))
        self.register_buffer(
            "draft_ids", None if config.draft_vocab is None else torch.arange(drafted)
        )
        inverse, self.rope_scaling = config.rotary()
        self.register_buffer("inverse_frequency", inverse, persistent=False)
        self.fuse, self.reading = Apart(), Own(width, 1)

    @classmethod
    def of(
        cls, config: Eagle3Config, lm_head: Tensor, draft_ids: Tensor | None, scale: float
    ) -> "Eagle3Head":
        """Make an untrained head for a target with this lm_head [V, H], whose features have this
        scale: its own begins as the target's rows of the draft_ids [N] (None: all)."""
        head = cls(config)
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
            lm_head = lm_head[draft_ids]
        with torch.no_grad():
            head.lm_head.copy_(lm_head * scale)  # it reads norms, which are at unit scale
        return head

    # -- the seams shared with semi-autoregressive heads -------------------------------------------

    @property
    def layers(self) -> tuple[Eagle3Layer]:
        return (self.layer,)

    def join(self, features: Tensor) -> Tensor:
        """Fuse the layers in wide features [.., (1 + n) * H] into states h [.., H].

        Raises HeadError for features without the layers that this head reads.
        """
        config = self.config
        check_width(features, config.hidden_size, config.feature_layers)
        layers = features[..., config.hidden_size :]
        if config.layer_norms == "each":
            each = layers.unflatten(-1, (-1, config.hidden_size))
            normed = F.rms_norm(each, each.shape[-1:], eps=config.norm_eps)
            layers = normed.flatten(-2) * self.layer_norms
        elif config.layer_norms == "joint":
            layers = F.rms_norm(layers, layers.shape[-1:], self.layer_norms, config.norm_eps)
        return self.fc(layers)

    def inputs(self, ahead: Tensor, states: Tensor) -> Tensor:
        """Put e(t_{i+1}) and h_i side by side, each [.., H]: [.., 2H]."""
        return torch.cat((ahead, states), -1)

    pairs = inputs

    def rope(self, positions: Tensor) -> Rope:
        """cos and signed sin for positions [S, T]: [S, 1, T, head_dim]."""
        cos, sin = rotations(positions, self.inverse_frequency)
        return cos * self.rope_scaling, sin * self.rope_scaling

    def decode(self, inputs: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Run the decoder layer over inputs [S, T, 2H]; the states that drafting goes on from."""
        states = self.layer(inputs, rope, 0, attend)
        return self._normed(states) if self.config.norm_output else states

    def answers(self, states: Tensor) -> Tensor:
        """What lm_head reads of states [.., H]."""
        return states if self.config.norm_output else self._normed(states)

    def _normed(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, states.shape[-1:], self.norm, self.config.norm_eps)

    # -- training --------------------------------------------------------------------------------

    def forward(
        self,
        ahead: Tensor,  # [B, T, H], e(t_{i+1})
        features: Tensor,  # [B, T, (1 + n) * H], f_i and layers of the target
        blocks: Tensor,  # [B, T], the positions, as blocks of one
        valid: Tensor | None = None,  # [B, T], False at padding
        passes: int = 1,
        loss: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """Give the states [R, B, T, H] of every pass; or loss(answers [R, B, T, H], lm_head).

        Pass 1 reads the target's layers. In pass r position i reads what pass r - 1 made of
        i - 1, and sees its r - 1 nearest ancestors as they were in their own passes: what drafting
        r tokens ahead meets, at all positions at once ("training-time test", section 3.2). The
        loss is taken in here because launchers that shard weights have them whole within a
        forward only.
        """
        states, outputs = self.join(features), []
        rope = self.rope(torch.arange(ahead.shape[1], device=ahead.device)[None])
        layout, seen = BlockLayout(blocks, 1), [()]
        for number in range(passes):
            if number > 0:
                states = layout.inherited(outputs[-1], states, None)
            mask = rollout_mask(blocks, valid, number, self.config.window)
            inputs = self.inputs(ahead, states)
            output, seen = checkpointed(self.checkpointing, self._pass, inputs, rope, seen, mask)
            outputs.append(output)
        outputs = torch.stack(outputs)
        return outputs if loss is None else loss(self.answers(outputs), self.lm_head)

    def _pass(self, inputs: Tensor, rope: Rope, seen: Seen, mask: Tensor) -> tuple[Tensor, Seen]:
        after: Seen = []
        return self.decode(inputs, rope, attending(seen, after, mask)), after


class OwnVocabulary(DraftVocabulary):
    """The tokens of a head with an lm_head of its own, which is as precise as the target's."""

    def __init__(self, head: Eagle3Head, target: Target, prepacked: PrepackedWeights):
        super().__init__(head.draft_ids, target, prepacked)
        self.head, self.own = head, head.lm_head.detach().to(target.lm_head_weight.dtype)

    def logits(self, features: Tensor) -> Tensor:
        """States [.., H] to logits [.., N]."""
        return self._linear(self.head.answers(features).to(self.own.dtype), self.own)


def vocabulary_of(head: Eagle3Head | FalconHead, target: Target) -> DraftVocabulary:
    """The tokens that a head drafts among, with logits of what it predicts."""
    prepacked = PrepackedWeights(target.prepacked.most)
    if isinstance(head, Eagle3Head):
        return OwnVocabulary(head, target, prepacked)
    return DraftVocabulary(head.draft_ids, target, prepacked)
