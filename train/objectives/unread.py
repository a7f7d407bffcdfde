"""Settings that have no effect on the training at hand.

They are told, not refused: one recipe may serve several kinds, e.g. in the tables of eval/paper.py.
"""

from collections.abc import Iterator

from specdraft.recipes.schema import Recipe

# What heads of decoder layers read, and the value at which there is nothing to tell.
READ_BY_HEADS = {
    "train.rollout": 1,
    "train.alignments": "one",
    "loss.lk_weight": 0.0,
    "loss.depth_decay": 1.0,
    "loss.pace_smoothing": None,
}
NON_READERS = {"medusa": "Medusa heads", "student": "students"}


def unread_settings(recipe: Recipe) -> Iterator[str]:
    """Yield what of a recipe has no effect on the drafter it trains, a line for each reason."""
    sections, found = recipe.to_dict(), []
    if recipe.kind in NON_READERS:
        for key, usual in READ_BY_HEADS.items():
            section, name = key.split(".")
            if (value := sections[section][name]) != usual:
                found.append(f"{key}={value}")
    if found:
        yield f"{NON_READERS[recipe.kind]} do not read {', '.join(found)}"
    data = recipe.data
    if data.samples == 1 and data.temperature > 0:
        yield f"the first answer is greedy: data.temperature={data.temperature} is for others"
