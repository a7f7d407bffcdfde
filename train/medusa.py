"""Train Medusa heads: conversations -> tokens -> features -> heads -> measured heads.

    accelerate launch train/medusa.py recipes/tiny_medusa.yaml [section.key=value ..]
    python train/medusa.py recipes/tiny_medusa.yaml --dry-run

Every stage continues where an earlier run stopped; the heads lie in `output.dir`/medusa.
"""

from functools import partial

from specdraft.data.feature_cache import FeatureCache
from specdraft.models.medusa import MedusaHeads
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, entry
from specdraft.recipes.schema import Recipe
from specdraft.train.ahead import TokensAhead
from specdraft.train.command import run
from specdraft.train.heads import Kind, train_head
from specdraft.train.shapes import TargetShape, medusa_config


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    kind = medusa_heads()
    run(__doc__, partial(train_head, kind), partial(check, kind))


def medusa_heads() -> Kind:
    """The kind of Medusa heads."""
    return Kind(
        field="medusa",
        method="medusa_tree",
        make=new_heads,
        objective=lambda recipe, ends, heads: TokensAhead(recipe, ends),
        load=partial(MedusaHeads.from_pretrained, strict=True),
    )


def check(kind: Kind, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe without Medusa heads, or that measures something else."""
    if not recipe.medusa.given:
        raise RecipeError(f"{recipe.name}: no Medusa heads; set medusa.heads, e.g. 4")
    if recipe.train.checkpointing:
        raise RecipeError(
            "train.checkpointing = True: Medusa heads have no decoder layers; set it to false"
        )
    kind.check_methods(recipe)


def new_heads(recipe: Recipe, target: Target, cache: FeatureCache) -> MedusaHeads:
    """Make the recipe's heads: they start as the target's own lm_head."""
    config = medusa_config(recipe, TargetShape.of(target.config), identity=target.identity())
    return MedusaHeads.of(config, target.lm_head_weight)


if __name__ == "__main__":
    main()
