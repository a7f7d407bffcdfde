"""Train an EAGLE-1 head: conversations -> tokens -> features -> head -> measured head.

    accelerate launch train/eagle.py recipes/tiny_eagle.yaml [section.key=value ..]
    python train/eagle.py recipes/vicuna7b_eagle.yaml --dry-run

EAGLE-1 (arXiv 2401.15077) is the Falcon head with one token per pass and a linear layer for the
LSTM; with k = 1 there is nothing to glance at. `python eval/export.py` writes it for an engine.
"""

from specdraft.recipes.entry import entry

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import Recipe
from specdraft.train.heads import Kind, run_head


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    run_head("eagle", __doc__, check)


def check(kind: Kind, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe whose head is not EAGLE-1's."""
    for key, wanted in (("block_size", 1), ("fusion", "linear")):
        value = getattr(recipe.head, key)
        if value != wanted:
            raise RecipeError(
                f"head.{key} = {value}: EAGLE-1 has head.{key}={wanted}; set it, or train a "
                "Falcon head: train/falcon.py"
            )
    kind.check_methods(recipe)


if __name__ == "__main__":
    main()
