"""Train an EAGLE-3 head: conversations -> tokens -> features -> head -> measured head.

    accelerate launch train/eagle3.py recipes/tiny_eagle3.yaml [section.key=value ..]
    python train/eagle3.py recipes/qwen3_8b_eagle3.yaml --dry-run

EAGLE-3 (arXiv 2503.01840) reads layers of the target instead of its last feature, and learns tokens
alone, over its own outputs (`train.rollout` passes). eval/export.py writes it for an engine.
"""

from specdraft.recipes.entry import entry

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import Recipe
from specdraft.train.heads import Kind, run_head

# What its training has not got, by the key that asks for it, and the value that does not.
LEFT_OUT = {
    "loss.feature_weight": 0,
    "loss.feature_noise": 0,
    "loss.pace_smoothing": None,
    "glance.enabled": False,
}


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    run_head("eagle3", __doc__, check)


def check(kind: Kind, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe whose head or training is not EAGLE-3's."""
    kind.check_methods(recipe)
    for key, off in LEFT_OUT.items():
        section, _, name = key.partition(".")
        if (value := getattr(getattr(recipe, section), name)) != off:
            wanted = "null" if off is None else str(off).lower()
            raise RecipeError(f"{key} = {value}: EAGLE-3 is trained without; set {key}={wanted}")


if __name__ == "__main__":
    main()
