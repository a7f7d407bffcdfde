"""Export a trained head for a serving engine: an EAGLE head for vLLM or SGLang, Medusa for vLLM.

    python eval/export.py recipes/tiny_eagle.yaml --engine vllm --out runs/tiny_eagle/vllm
    python eval/export.py recipes/tiny_eagle3.yaml --engine sglang --out runs/tiny_eagle3/sglang
    python eval/export.py recipes/tiny_medusa.yaml --engine vllm --out runs/tiny_medusa/vllm

Takes the head of `output.dir` and writes config.json and model.safetensors in target.dtype. Falcon
heads, Max-Gram tables and trees have no engine that loads them.
"""

from pathlib import Path

from transformers import AutoConfig

from specdraft.eval.drafters.registry import problems
from specdraft.models.eagle3 import load_eagle3
from specdraft.models.embeddings import DTYPES, TargetEmbeddings
from specdraft.models.falcon import load_head
from specdraft.models.medusa import load_medusa
from specdraft.models.serving import ENGINES, Served, serve_eagle, serve_eagle3, serve_medusa
from specdraft.models.target import context_length
from specdraft.models.target_files import identity_of, model_folder
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, load the head, write it as the engine wants it."""
    parser = recipe_parser(__doc__, "tiny_eagle")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    served = served_head(recipe, options.engine)
    served.write(options.out)
    size = sum(tensor.nbytes for tensor in served.tensors.values()) / 1e6
    tell(f"wrote {options.out}: {len(served.tensors)} tensors, {size:.1f} MB")


def served_head(recipe: Recipe, engine: str) -> Served:
    """Convert the trained head of a recipe. Raises HeadError, TargetError."""
    section, out = recipe.target, Path(recipe.output.dir)
    name, folder = (section.model, section.revision), model_folder(section.model, section.revision)
    whose, dtype = identity_of(*name, folder), DTYPES[section.dtype]
    if recipe.medusa.given:
        heads = load_medusa(out / "medusa", whose)
        shared = None
        if heads.lm_heads is None:
            shared = TargetEmbeddings.load(*name, section.dtype).lm_head_weight
        return serve_medusa(heads, engine, shared, dtype)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    settings = (engine, context_length(config), dtype)
    if recipe.head.fusion == "layers":
        return serve_eagle3(load_eagle3(out / "head", whose), *settings)
    return serve_eagle(load_head(out / "head", whose), *settings)


if __name__ == "__main__":
    main()
