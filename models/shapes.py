"""The shape of a target, from its config or a table, and the drafter that goes with it."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.families.encoder_decoder import decoder_depth
from specdraft.models.feature_layers import check_layers as check_feature_layers
from specdraft.models.medusa import MedusaConfig
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import RecipeError, TargetError, in_a_line
from specdraft.recipes.schema import Recipe, StudentSection
from specdraft.recipes.sections.target import BUNDLED

BYTES = {"float32": 4, "bfloat16": 2}
# Float32 weights, gradients, two moments of AdamW, and DDP's copy of the gradients.
BYTES_PER_PARAMETER = 4 + 4 + 8 + 4
OTHER_STUDENTS = "take a student of the target's family, or student.layers or student.keep_layers"
_DECODER_MLPS = ("d_ff", "decoder_ffn_dim")  # where T5 and BART write how wide they are
Config = TypeVar("Config", FalconConfig, Eagle3Config)
LOGITS_BYTES = 4 * 4 * (1 << 25)  # the loss's chunk on a GPU: p, p^, their logarithms


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target that a head, a cache and a plan depend on."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False  # embedding and lm_head are one matrix
    head_dim: int | None = None  # None: hidden_size / heads

    @classmethod
    def of(cls, config: PretrainedConfig) -> "TargetShape":
        """Read the shape from a config of transformers; of a multimodal one, that of its text part.

        Without attention (Mamba 2) its heads are those that a drafter takes: of 64 channels.
        """
        config = config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope.get("full_attention") or rope  # Gemma 3 and OLMo 3 have one per kind of layer
        attends = hasattr(config, "num_attention_heads")
        heads = config.num_attention_heads if attends else max(config.hidden_size // 64, 1)
        dim = (attends and getattr(config, "head_dim", None)) or config.hidden_size // heads
        mlps = (getattr(config, key, None) for key in ("intermediate_size", *_DECODER_MLPS))
        return cls(
            hidden_size=config.hidden_size,
            layers=decoder_depth(config)[1],
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            intermediate_size=next(filter(None, mlps), 4 * config.hidden_size),
            vocab_size=config.vocab_size,
            rope_theta=rope.get("rope_theta", 10000.0),
            norm_eps=getattr(config, "rms_norm_eps", 1e-5),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            head_dim=None if dim * heads == config.hidden_size else dim,
        )

    @property
    def attention(self) -> tuple[int, int]:
        """Width of all queries, and of all keys."""
        dim = self.head_dim or self.hidden_size // self.heads
        return self.heads * dim, self.kv_heads * dim

    @property
    def cached_numbers(self) -> int:
        """Keys and values of a token in all layers."""
        return 2 * self.layers * self.attention[1]

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of a decoder layer, as Llama names them."""
        width, inner, (query, key) = self.hidden_size, self.intermediate_size, self.attention
        attention = {"q_proj": (width, query), "k_proj": (width, key)}
        attention |= {"v_proj": (width, key), "o_proj": (query, width)}
        mlp = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        return attention | mlp

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding and lm_head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer with a gated MLP."""
        return sum(a * b for a, b in self.linear_layers.values()) + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden_size


# For plans made where the Hub is out of reach; from each model's config.json.
KNOWN = {
    "lmsys/vicuna-7b-v1.5": TargetShape(4096, 32, 32, 32, 11008, 32000),
    "lmsys/vicuna-13b-v1.5": TargetShape(5120, 40, 40, 40, 13824, 32000),
    "meta-llama/Llama-2-7b-chat-hf": TargetShape(4096, 32, 32, 32, 11008, 32000),
    "meta-llama/Llama-2-13b-chat-hf": TargetShape(5120, 40, 40, 40, 13824, 32000),
    "meta-llama/Llama-2-70b-chat-hf": TargetShape(8192, 80, 64, 8, 28672, 32000),
    "TinyLlama/TinyLlama_v1.1": TargetShape(2048, 22, 32, 4, 5632, 32000),
    "meta-llama/Llama-3.1-8B-Instruct": TargetShape(4096, 32, 32, 8, 14336, 128256, 5e5),
    "Qwen/Qwen3-8B": TargetShape(4096, 36, 32, 8, 12288, 151936, 1e6, 1e-6),
    "Qwen/Qwen2.5-7B-Instruct": TargetShape(3584, 28, 28, 4, 18944, 152064, 1e6, 1e-6),
}


def target_shape(recipe: Recipe) -> tuple[TargetShape, str]:
    """Return the shape of the recipe's target and where it was read, without its weights.

    A local config comes first, then the table, then the Hub. Raises TargetError when none knows.
    """
    target = recipe.target
    return model_shape("target.model", target.model, target.revision, target.trust_remote_code)


def model_shape(
    key: str, name: str, revision: str | None, trust_remote_code: bool = False
) -> tuple[TargetShape, str]:
    """Return the shape of the model that a recipe's key names; see `target_shape`."""
    where = str(bundled_target_dir()) if name == BUNDLED else name
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=True, **options)
    except Exception:  # whatever is wrong with a config that is here
        if name in KNOWN:
            return KNOWN[name], "built-in table"
        try:
            config = AutoConfig.from_pretrained(where, **options)
        except Exception as error:
            raise TargetError(
                f"{key}: no config of {name} here and the Hub did not give it "
                f"({in_a_line(error)}); give an existing folder or a Hub id (owner/name)"
            ) from error
    return TargetShape.of(config), "config.json"


def student_shape(recipe: Recipe, target: TargetShape) -> TargetShape:
    """Return the shape of the recipe's student, without its weights.

    Raises RecipeError for layers the target does not have or heads that do not fit, TargetError for
    another vocabulary than the target's or a model that nobody knows.
    """
    student = recipe.student
    if student.keep_layers is not None:
        check_layers(student.keep_layers, target.layers, recipe.target.model)
        return replace(target, layers=len(student.keep_layers))
    if student.model is not None:
        shape, _ = model_shape("student.model", student.model, student.revision)
        check_vocabulary(student.model, shape.vocab_size, recipe.target.model, target.vocab_size)
        return shape
    return own_shape(student, target)


def own_shape(section: StudentSection, target: TargetShape) -> TargetShape:
    """Return the shape of a student of its own; what the section leaves open is the target's.

    Raises RecipeError where attention heads do not fit the width.
    """
    hidden, heads = section.hidden or target.hidden_size, section.heads or target.heads
    kv_heads = section.kv_heads or section.heads or target.kv_heads
    if hidden % heads or heads % kv_heads or hidden // heads % 2:
        raise RecipeError(
            f"student.heads = {heads}, student.kv_heads = {kv_heads}: heads must divide "
            f"student.hidden ({hidden}) into even parts and be a multiple of kv_heads"
        )
    return replace(
        target,
        hidden_size=hidden,
        layers=section.layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=section.intermediate or target.intermediate_size,
        tied=False,
        head_dim=None,
    )


def llama_config(
    shape: TargetShape, context: int, like: PretrainedConfig | None = None
) -> LlamaConfig:
    """Return the config of a Llama of a shape; like: whose special tokens are its own, too."""
    special = ("bos_token_id", "eos_token_id", "pad_token_id") if like else ()
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        **{name: getattr(like, name) for name in special},
    )


def check_layers(keep: tuple[int, ...], count: int, name: str) -> None:
    """Raise RecipeError for layers beyond the target's `count`."""
    if max(keep) >= count:
        raise RecipeError(f"student.keep_layers = {list(keep)}: {name} has layers 0 to {count - 1}")


def check_vocabulary(student: str, size: int, target: str, target_size: int) -> None:
    """Raise TargetError where a student has more tokens than its target, or fewer."""
    if size != target_size:
        raise TargetError(
            f"the student {student} and the target {target} have vocabularies of {size} and "
            f"{target_size}; {OTHER_STUDENTS}"
        )


def head_config(
    recipe: Recipe, shape: TargetShape, *, identity: dict | None = None, **scales: float
) -> FalconConfig:
    """Return the config of the recipe's head: what it leaves open is as in the target.

    scales: the config's embed_scale and feature_scale, where they are known. Raises RecipeError
    when its attention heads do not fit the target's width, or its draft vocabulary the target's;
    TargetError for layers that the target does not have.
    """
    same = ("block_size", "fusion", "reads", "coupling", "layers", "input_norm")
    own = {key: getattr(recipe.head, key) for key in same} | {"rope_theta": shape.rope_theta}
    return _of_head(FalconConfig, recipe, shape, identity, **own, **scales)


def eagle3_config(
    recipe: Recipe, shape: TargetShape, *, identity: dict | None = None
) -> Eagle3Config:
    """Return the config of the recipe's EAGLE-3 head: what it leaves open is as in the target.

    Raises RecipeError when its attention heads or its draft vocabulary do not fit the target, and
    TargetError for layers that the target does not have.
    """
    head, heads = recipe.head, recipe.head.heads or shape.heads
    if (dim := shape.hidden_size // heads) < 2 or dim % 2:
        even = f"hidden_size ({shape.hidden_size}) // heads must be even and above 0, not {dim}"
        raise RecipeError(f"head.heads = {heads}: {even}")
    own = {
        "head_dim": dim,
        "rope": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "layer_norms": "each" if head.normed else "none",
        "norm_output": head.normed,
    }
    return _of_head(Eagle3Config, recipe, shape, identity, **own)


def _of_head(
    kind: type[Config], recipe: Recipe, shape: TargetShape, identity: dict | None, **own: Any
) -> Config:
    """Return the config of a kind of head: what both have in common, and its own."""
    head, layers = recipe.head, recipe.data.feature_layers
    check_feature_layers(layers, shape.layers, recipe.target.model)
    try:
        return kind(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            feature_layers=layers,
            heads=head.heads or shape.heads,
            kv_heads=head.kv_heads or head.heads or shape.kv_heads,
            intermediate_size=head.intermediate or shape.intermediate_size,
            norm_eps=shape.norm_eps,
            window=head.window,
            draft_vocab=head.draft_vocab,
            target=identity or {},
            **own,
        )
    except ValueError as error:
        raise RecipeError(f"head.{error}") from error


def any_head(recipe: Recipe, shape: TargetShape) -> FalconHead | Eagle3Head:
    """Return the recipe's head with weights as they are made. Raises as its config does."""
    if recipe.head.fusion == "layers":
        return Eagle3Head(eagle3_config(recipe, shape))
    return FalconHead(head_config(recipe, shape))


def medusa_config(
    recipe: Recipe, shape: TargetShape, *, identity: dict | None = None
) -> MedusaConfig:
    """Return the config of the recipe's Medusa heads."""
    medusa, sizes = recipe.medusa, (shape.hidden_size, shape.vocab_size)
    return MedusaConfig(*sizes, medusa.heads, medusa.layers, medusa.lm_heads, identity or {})
