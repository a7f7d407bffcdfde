"""Watch a head draft: one answer, accepted tokens in green.

    python eval/generate.py recipes/tiny.yaml --prompt "Tell a story about a fox." [key=value ..]

Uses the trained head of `output.dir`; sampling follows eval.temperature, top_k, top_p and seed.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specdraft.data.prompts import question_prompt
from specdraft.eval.decoder import Decoder, Request
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.show import STYLES, pieces
from specdraft.eval.static import StaticTree
from specdraft.models.falcon import load_head
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import load_tree_paths


@entry
def main() -> None:
    """Parse, load recipe, target and head, and answer one prompt."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--prompt", required=True, help="what the user says")
    options = parser.parse_intermixed_args()
    answer(load_recipe(options.recipe, options.overrides), options.prompt)


def answer(recipe: Recipe, question: str) -> None:
    """Answer one question, printing every step's tokens as they come."""
    target = Target.of_recipe(recipe.target)
    head = load_head(Path(recipe.output.dir) / "head", target.identity())
    settings, prompt = recipe.eval, question_prompt(recipe, target.tokenizer, question).input_ids
    tree = StaticTree(load_tree_paths(settings.tree), head.config.block_size)
    capacity = len(prompt) + settings.max_new_tokens + len(tree.paths)
    decoder = Decoder(target, FalconDrafter(head, target, tree, 1, capacity), 1, capacity)
    request = Request(
        prompt,
        settings.max_new_tokens,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.seed,
        settings.acceptance,
    )
    console, began = Console(highlight=False), time.perf_counter()
    tokens, steps, shown = [], [], 0
    for update in decoder.stream([request]):
        if update.completion and update.completion.error:
            raise update.completion.error
        tokens, steps = tokens + update.tokens, steps + update.steps
        runs = pieces(target.tokenizer, tokens, steps)
        console.print(Text.assemble(*((t, STYLES[kind]) for t, kind in runs[shown:])), end="")
        shown = len(runs)
    seconds, ratio = time.perf_counter() - began, len(tokens) / len(steps)
    console.print(
        f"\n[cyan]{len(tokens)} tokens in {len(steps)} steps: {ratio:.2f} a step, "
        f"{len(tokens) / seconds:.0f} tokens/s[/cyan]"
    )


if __name__ == "__main__":
    main()
