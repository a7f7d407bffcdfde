"""The trained head of a recipe in the layout that an engine loads (models/serving.py)."""

from pathlib import Path

from transformers import AutoConfig

from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.embeddings import (
    DTYPES,
    TargetEmbeddings,
    embed_scale_of,
    model_without_weights,
)
from specdraft.models.falcon import FalconHead
from specdraft.models.hub import fetch
from specdraft.models.medusa import MedusaHeads
from specdraft.models.published import is_published
from specdraft.models.serving import Served, serve_eagle, serve_eagle3, serve_medusa
from specdraft.models.target import context_length
from specdraft.models.target_files import model_folder
from specdraft.models.weights.identity import identity_of
from specdraft.recipes.errors import HeadError
from specdraft.recipes.find import drafter_of, kinds_of
from specdraft.recipes.schema import Recipe

# Kinds of drafters that engines have no layout for, and what they do with them.
NO_LAYOUT = {
    "student": "a draft LM, which engines load as it is",
    "table": "a Max-Gram table, which is plugged into vLLM as it is",
}


def check_layout(folder: Path, kind: str) -> None:
    """Raise HeadError for a drafter of a kind that engines have no layout for."""
    if kind in NO_LAYOUT:
        raise HeadError(f"{folder} is {NO_LAYOUT[kind]}: eval/serve/README.md")


def served_head(recipe: Recipe, engine: str) -> Served:
    """Convert the trained head of a recipe. Raises HeadError, TargetError."""
    section = recipe.target
    name, folder = (section.model, section.revision), model_folder(section.model, section.revision)
    whose, dtype = identity_of(*name, folder), DTYPES[section.dtype]
    if recipe.medusa.given:
        heads = MedusaHeads.load_for(drafter_of(recipe, "medusa"), whose)
        shared = None
        if heads.lm_heads is None:
            shared = TargetEmbeddings.load(*name, section.dtype).lm_head_weight
        return serve_medusa(heads, engine, shared, dtype)
    source, out = drafter_of(recipe, "head"), Path(recipe.output.dir)
    others = [kind for kind in kinds_of(out) if kind in NO_LAYOUT]
    if others and not recipe.head.model and not source.is_dir():
        check_layout(out / others[0], others[0])
    if is_published(fetch(source)):
        raise HeadError(f"{source} is in the layout of an engine: load it there as it is")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    settings = (engine, context_length(config), dtype)
    if recipe.head.fusion == "layers":
        return serve_eagle3(Eagle3Head.load_for(source, whose), *settings)
    empty = model_without_weights(folder, dtype, section.trust_remote_code)
    scale = embed_scale_of(empty.get_input_embeddings())
    return serve_eagle(FalconHead.load_for(source, whose), *settings, scale)
