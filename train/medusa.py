"""Train Medusa heads: conversations -> tokens -> features -> heads -> measured heads.

    accelerate launch train/medusa.py recipes/tiny_medusa.yaml [section.key=value ..]
    python train/medusa.py recipes/tiny_medusa.yaml --dry-run

Every stage continues where an earlier run stopped; the heads lie in `output.dir`/medusa.
"""

from specdraft.recipes.entry import entry

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import Recipe
from specdraft.train.heads import Kind, run_head


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    run_head("medusa", __doc__, check)


def check(kind: Kind, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe without Medusa heads, or that measures something else."""
    if not recipe.medusa.given:
        raise RecipeError(f"{recipe.name}: no Medusa heads; set medusa.heads, e.g. 4")
    if recipe.medusa.model is not None:
        raise RecipeError(
            f"medusa.model = {recipe.medusa.model}: they are trained already; measure them: python "
            "eval/bench.py, or set it to null"
        )
    if recipe.train.checkpointing:
        raise RecipeError(
            "train.checkpointing = True: Medusa heads have no decoder layers; set it to false"
        )
    kind.check_methods(recipe)


if __name__ == "__main__":
    main()
