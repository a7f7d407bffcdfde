"""Heads by folder or Hub id: ours, and those of others in the layouts that serving engines load.

EAGLE-1 as EAGLE, vLLM and SGLang have it, EAGLE-3 as SpecForge, vLLM and SGLang have it, and as
speculators does (the same tensors, another config); models/serving.py has the names. Whatever else
such a head does is refused: read by halves, it would draft without a word and never be accepted.

Shapes: H hidden, V vocabulary, N tokens drafted among.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.embeddings import embed_scale_of
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.hub import fetch, is_hub_id
from specdraft.models.saved import CONFIG
from specdraft.models.serving import AUX_LAYERS, eagle3_tensors, eagle_tensors
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, RecipeError, in_a_line
from specdraft.recipes.fields import shown
from specdraft.recipes.find import (
    KINDS,
    OLD_HEAD,
    drafter_folder,
    drafters_of,
    kind_of,
    read_config,
)

EAGLE_NAMES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
# What is not read, by the key that says so, and its value where there is nothing of it.
UNREAD = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "quantization_config": None,
}


def find_drafter(source: str | Path, revision: str | None = None) -> tuple[str, str | Path]:
    """Return the kind of a drafter, as recipes/find.py calls it, and its folder or Hub id.

    source: of the drafter, or the folder of a run that has one. Raises HeadError where there is
    none, or several, HubError when the Hub does not give it.
    """
    folder = fetch(source, revision)
    if not (folder / CONFIG).is_file():
        kind = kind_there(folder)
        return kind, drafter_folder(folder, kind)
    kind = kind_of(read_config(folder))
    files = any(folder.glob("*.safetensors"))
    if kind == "student" and files and "fc.weight" in Weights(folder, {}):
        kind = "eagle"  # in the layout of an engine, whose config is that of a model
    return kind, source if is_hub_id(source) else folder


def kind_there(run: Path) -> str:
    """Return the kind of the one drafter that a run has. Raises HeadError for none, or several."""
    found = drafters_of(run)
    if not found:
        raise HeadError(f"no drafter in {run} ({', '.join(KINDS)}); train one")
    if len(found) > 1:
        named = f"name one: {run / found[0]}"
        raise HeadError(f"several drafters in {run}, {', '.join(found)}; {named}")
    return kind_of(read_config(run / OLD_HEAD)) if found == [OLD_HEAD] else found[0]


def load_head(
    source: str | Path, target: Target, revision: str | None = None
) -> FalconHead | Eagle3Head:
    """Load a head for a target: one of ours, or a published one, ready to draft.

    Raises HeadError where there is none, it is damaged, or it is not read here; HubError when the
    Hub does not give it; TargetError when it is another target's.
    """
    folder = fetch(source, revision)
    config = _config(folder)
    if config.get("architecture") == "eagle3":
        return Eagle3Head.load_for(folder, target.identity())
    if "architectures" not in config:
        return FalconHead.load_for(folder, target.identity())
    try:
        head = _published(folder, config, target).eval()
    # Of a value that is no such thing: text for a mapping, a number beyond floats, ids of nothing.
    except (HeadError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise HeadError(f"the head at {folder} cannot be read: {in_a_line(error)}") from error
    head.folder = folder
    return head


def is_published(folder: Path) -> bool:
    """Whether a head is in the layout that engines load."""
    return "architectures" in _config(folder)


def _config(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where it is none: whoever loads a head of ours tells."""
    try:
        config = read_config(folder)
    except RecipeError:
        return {}
    # Speculators have what the others have one level down.
    layer = config.get("transformer_layer_config")
    return {"norm_before_residual": True, **layer, **config} if isinstance(layer, dict) else config


def _published(folder: Path, config: dict[str, Any], target: Target) -> FalconHead | Eagle3Head:
    name = shown(config["architectures"]).strip("[]'")
    if name not in EAGLE_NAMES + EAGLE3_NAMES:
        known = ", ".join(EAGLE_NAMES + EAGLE3_NAMES)
        raise HeadError(f"its layout is {name}; known layouts: {known}")
    for key, plain in UNREAD.items():
        if config.get(key) not in (None, plain):
            raise HeadError(f"{key} = {shown(config[key])}: only heads with {shown(plain)} load")
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    sizes |= {"target_hidden_size": target.hidden_size} if "target_hidden_size" in config else {}
    for key, size in sizes.items():
        if config.get(key) != size:
            raise HeadError(
                f"{key} = {shown(config.get(key))}, and {target.name} has {size}: it was made for "
                "another target"
            )
    # EAGLE's own authors call both kinds LlamaForCausalLM.
    if name in EAGLE3_NAMES or "midlayer.hidden_norm.weight" in Weights(folder, {}):
        return _eagle3(config, Weights(folder, {"layers.0.": "midlayer."}), target)
    return _eagle(config, Weights(folder, {}), target)


def _eagle(config: dict[str, Any], weights: "Weights", target: Target) -> FalconHead:
    """An EAGLE-1 head; it works at the target's own scales."""
    sizes, rope = _sizes(config), _rope(config)
    apart = config.get("head_dim") or sizes["hidden_size"] // sizes["heads"]
    if rope["rope_type"] != "default" or apart * sizes["heads"] != sizes["hidden_size"]:
        raise HeadError(
            f"rope_type = {rope['rope_type']}, head_dim = {apart}: an EAGLE-1 head loads with "
            f"rope_type default and head_dim {sizes['hidden_size'] // sizes['heads']}"
        )
    ours = FalconConfig(
        **sizes,
        block_size=1,
        fusion="biased" if "fc.bias" in weights else "linear",
        layers=config.get("num_hidden_layers", 1),
        input_norm=False,
        rope_theta=rope["rope_theta"],
        embed_scale=embed_scale_of(target.embedding),  # it reads embeddings as they lie in the file
    )
    weights.check_shared(target, {"embed_tokens.weight", "lm_head.weight"})
    return weights.fill(FalconHead, ours, eagle_tensors)


def _eagle3(config: dict[str, Any], weights: "Weights", target: Target) -> Eagle3Head:
    """An EAGLE-3 head."""
    if config.get("num_hidden_layers", 1) != 1:
        raise HeadError(f"num_hidden_layers = {shown(config['num_hidden_layers'])}: only 1 loads")
    sizes, size, drafted = _sizes(config), config["vocab_size"], config.get("draft_vocab_size")
    ids = None
    if "d2t" in weights:
        ids = weights.draft_ids(size)
    elif drafted not in (None, size):
        raise HeadError(
            f"draft_vocab_size = {shown(drafted)} of {size} tokens, and no d2t says which they are"
        )
    norms = {"fc_norm": "each", "norm_before_fc": "joint"}
    ours = Eagle3Config(
        **sizes,
        feature_layers=_layers(config, target),
        head_dim=config.get("head_dim") or sizes["hidden_size"] // sizes["heads"],
        rope=_rope(config),
        layer_norms=next((name for key, name in norms.items() if config.get(key)), "none"),
        norm_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        draft_vocab=None if ids is None else len(ids),
    )
    weights.check_shared(target, {"embed_tokens.weight"})
    head = weights.fill(Eagle3Head, ours, eagle3_tensors, {"d2t", "t2d"})
    if ids is not None:
        head.draft_ids[:], order = ids.sort()
        with torch.no_grad():
            head.lm_head.copy_(head.lm_head[order])
    return head


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """What both kinds of heads have in common, by our names."""
    for key in ("num_attention_heads", "intermediate_size"):
        if key not in config:
            raise HeadError(f"{CONFIG} has no {key}")
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config["intermediate_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),  # transformers' Llama without it
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotation, as transformers 5 has it or those before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def _layers(config: dict[str, Any], target: Target) -> tuple[int, ...]:
    """The layers of the target that an EAGLE-3 head reads, counted as ours.

    vLLM's key counts as we do, SGLang's from 0, as its trainer does. Without either both read the
    second, the middle one and the last but three.
    """
    own = config.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise HeadError("use_aux_hidden_state = False: only heads that read layers load")
    if config.get(AUX_LAYERS):
        return tuple(config[AUX_LAYERS])
    if own.get(AUX_LAYERS):
        return tuple(layer + 1 for layer in own[AUX_LAYERS])
    count = target.config.get_text_config().num_hidden_layers
    return 2, count // 2, count - 3


class Weights(dict[str, Tensor]):
    """The tensors of a folder's safetensors files by name, mapped: none is read before its use."""

    def __init__(self, folder: Path, renamed: dict[str, str]):
        """renamed: beginnings of names in a file, beside `model.`, which is cut, by ours."""
        super().__init__()
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise HeadError("it has no *.safetensors; no other weights are read")
        for path in files:
            try:
                tensors = load_file(path)
            except (SafetensorError, OSError) as error:
                raise HeadError(f"{path.name}: {in_a_line(error)}") from error
            for key, tensor in tensors.items():
                name = key.removeprefix("model.")
                for old, new in renamed.items():
                    name = new + name.removeprefix(old) if name.startswith(old) else name
                self[name] = tensor

    def fill(
        self,
        kind: type,  # of head
        config: FalconConfig | Eagle3Config,
        tensors: Callable[[Any], dict[str, Tensor]],
        beside: frozenset[str] | set[str] = frozenset(),  # names that are read elsewhere
    ) -> Any:
        """Make a head and set all of its `tensors`. Raises HeadError for tensors that are missing,
        that nobody reads, or of another shape, before any of the head's is made."""
        with torch.device("meta"):
            wanted = {name: list(part.shape) for name, part in tensors(kind(config)).items()}
        there = self.keys() - beside - {"embed_tokens.weight"}
        if "lm_head.weight" not in wanted:
            there -= {"lm_head.weight"}
        for what, names in (("lacks", wanted.keys() - there), ("also has", there - wanted.keys())):
            if names:
                few = ", ".join(sorted(names)[:4]) + (" .." if len(names) > 4 else "")
                raise HeadError(f"for its layout it {what} {few}")
        for name, shape in wanted.items():
            if (found := list(self[name].shape)) != shape:
                raise HeadError(f"{name} is {found}, and must be {shape} by {CONFIG}")
        head = kind(config)
        with torch.no_grad():
            for name, part in tensors(head).items():
                part.copy_(self[name])
                if not torch.isfinite(part).all():
                    raise HeadError(f"{name} has values that are no finite numbers")
        return head

    def draft_ids(self, size: int) -> Tensor:
        """The ids [N] that d2t makes: how far each is beyond its place."""
        shift = self["d2t"]
        ids = shift.long() + torch.arange(len(shift))
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise HeadError(f"d2t must make {len(ids)} different ids below {size}")
        if "t2d" in self:
            marked = self["t2d"].bool().nonzero().flatten()
            if not torch.equal(marked, ids.sort().values):
                raise HeadError("d2t and t2d name different tokens")
        return ids

    def check_shared(self, target: Target, names: set[str]) -> None:
        """Raise HeadError where a matrix of the target that lies beside the head is not its own."""
        own = {"embed_tokens.weight": "embedding_weight", "lm_head.weight": "lm_head_weight"}
        for name in sorted(names & self.keys()):
            theirs, ours = self[name], getattr(target, own[name]).cpu()
            coarse = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(theirs.to(coarse), ours.to(coarse)):
                raise HeadError(f"its {name} must equal that of {target.name}, and does not")
