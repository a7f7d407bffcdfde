"""Export a trained head for a serving engine: an EAGLE head for vLLM or SGLang, Medusa for vLLM.

    python eval/export.py recipes/tiny_eagle.yaml --engine vllm --out runs/tiny_eagle/vllm
    python eval/export.py recipes/tiny_eagle3.yaml --engine sglang --out runs/tiny_eagle3/sglang
    python eval/export.py recipes/tiny_medusa.yaml --engine vllm --out runs/tiny_medusa/vllm

Takes the head of `output.dir` and writes config.json and model.safetensors in target.dtype. Falcon
heads and Max-Gram tables have no such layout: vLLM loads them as they are (eval/serve/README.md).
"""

from specdraft.recipes.entry import entry

from pathlib import Path

from specdraft.eval.methods.registry import problems
from specdraft.eval.serve.layouts import check_layout, served_head
from specdraft.models.publish import kind_named
from specdraft.models.serving import ENGINES
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.find import CONFIG
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, load the head, write it as the engine wants it."""
    parser = recipe_parser(__doc__, "tiny_eagle")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    named = Path(options.recipe)
    if (named / CONFIG).is_file() and not recipe.head.model:  # a drafter, perhaps beside a head
        check_layout(named, kind_named(options.recipe, recipe))
    served = served_head(recipe, options.engine)
    served.write(options.out)
    size = sum(tensor.nbytes for tensor in served.tensors.values()) / 1e6
    tell(f"wrote {options.out}: {len(served.tensors)} tensors, {size:.1f} MB")


if __name__ == "__main__":
    main()
