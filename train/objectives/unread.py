"""Settings of training that only other kinds of drafters read.

They are told, not refused: one recipe may serve several kinds, e.g. in the tables of eval/paper.py.
"""

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


def unread_settings(recipe: Recipe) -> str | None:
    """Return what of a recipe has no effect on the drafter it trains; None: nothing."""
    if recipe.kind not in NON_READERS:
        return None
    sections, found = recipe.to_dict(), []
    for key, usual in READ_BY_HEADS.items():
        section, name = key.split(".")
        if (value := sections[section][name]) != usual:
            found.append(f"{key}={value}")
    return f"{NON_READERS[recipe.kind]} do not read {', '.join(found)}" if found else None
