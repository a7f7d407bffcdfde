"""Targets of a shape, with random weights: what one costs is known before it is downloaded.

A shape is a name below, or the config.json of any causal LM. What it needs is summed up on the meta
device, and said to be too much before anything is allocated.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

from specdraft.eval.costing.room import bytes_of, check_room, row_bytes
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.embeddings import DTYPES
from specdraft.models.falcon import FalconHead
from specdraft.models.shapes import KNOWN, TargetShape, any_head, llama_config
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import RecipeError, in_a_line
from specdraft.recipes.fields import nearest
from specdraft.recipes.schema import Recipe

# Llama 3.2, Llama 2: from each model's config.json.
SHAPES = {
    "llama1b": TargetShape(2048, 16, 32, 8, 8192, 128256, 5e5, tied=True),
    "llama7b": KNOWN["meta-llama/Llama-2-7b-chat-hf"],
    "llama13b": KNOWN["meta-llama/Llama-2-13b-chat-hf"],
    "llama70b": KNOWN["meta-llama/Llama-2-70b-chat-hf"],
}
# A student beside any of them, as in recipes/vicuna7b_distill.yaml: JackFram/llama-68m.
STUDENT = TargetShape(768, 2, 12, 12, 3072, 32000)
CONTEXTS = {"llama1b": 131072}  # tokens; of the others
CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    """A name or a path as a user gave it, and the config that it stands for."""

    name: str
    config: PretrainedConfig


def find_shape(name: str) -> Shape:
    """Return a shape by its name, or by a path: a config.json or a folder with one.

    Raises RecipeError for a name that nobody knows, and a file that is no causal LM's config.
    """
    if shape := SHAPES.get(name):
        return Shape(name, llama_config(shape, CONTEXTS.get(name, CONTEXT)))
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise RecipeError(
            f"--shape {name:.200}: neither a file nor a shape; known: {', '.join(SHAPES)} (nearest "
            f"is {nearest(name[:100], SHAPES)}), or the path of a config.json"
        )
    own = file.resolve().parent.name if file.name == "config.json" else file.stem  # of ".", too
    return Shape(own, read_config(file))


def read_config(file: Path) -> PretrainedConfig:
    """Read a config.json; RecipeError where it is no causal LM's."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values.pop("quantization_config", None)  # weights are random, and as target.dtype says
        values.pop("pad_token_id", None)  # whose embedding would be zero, and so its features
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    except KeyError as error:
        raise RecipeError(f"--shape {file}: no config of a model; it has no {error}") from error
    except Exception as error:  # transformers raises what it likes for values that are none
        raise RecipeError(f"--shape {file}: cannot be read: {in_a_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise RecipeError(
            f"--shape {file}: {config.model_type} is no causal LM; give the config.json of one"
        )
    return config


@dataclass(frozen=True)
class Skeleton:
    """A target and a head of the recipe's for it, whose tensors are nowhere yet."""

    shape: Shape
    model: nn.Module  # on the meta device
    head: FalconHead | Eagle3Head

    @property
    def parameters(self) -> int:
        """Parameters of the target."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def bytes(self) -> int:
        """Bytes of the weights of both."""
        return bytes_of(self.model) + bytes_of(self.head)


def sketch(shape: Shape, recipe: Recipe) -> Skeleton:
    """Put a target together without its weights. Raises RecipeError where its sizes, or the
    recipe's head beside it, do not fit together."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape.config, dtype=DTYPES[recipe.target.dtype]
            )
    except Exception as error:  # whatever a family makes of sizes that do not fit
        raise RecipeError(f"--shape {shape.name}: {in_a_line(error)}") from error
    with torch.device("meta"):
        head = any_head(recipe, TargetShape.of(shape.config.get_text_config()))
    return Skeleton(shape, model, head)


def build(
    skeleton: Skeleton, recipe: Recipe, capacity: int, device: torch.device
) -> tuple[Target, FalconHead | Eagle3Head]:
    """Draw the weights of a target and of a head, on the device.

    Raises RecipeError, before anything is allocated, where they and a cache for one row of
    `capacity` tokens have no room there.
    """
    name, config, dtype = skeleton.shape.name, skeleton.shape.config, recipe.target.dtype
    cache = row_bytes(TargetShape.of(config.get_text_config()), capacity, dtype)
    prepacked = PrepackedWeights(recipe.target.prepack_gib * 2**30)
    copies = min(skeleton.bytes, int(prepacked.most)) if device.type == "cpu" else 0
    check_room(f"--shape {name}, {dtype}", skeleton.bytes + copies + cache, device)
    torch.manual_seed(recipe.train.seed)
    target = Target.random(config, name, DTYPES[dtype], device, prepacked)
    with torch.device(device):
        head = any_head(recipe, TargetShape.of(config.get_text_config())).eval()
    return target, head
