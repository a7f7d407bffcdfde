"""Which settings of two runs differ: a run goes on, or counts as made, only where none does."""

import dataclasses
from collections.abc import Collection

from specdraft.recipes.fields import plain
from specdraft.recipes.schema import Recipe


def differences(there: dict, here: dict, free: Collection[str]) -> dict[str, tuple]:
    """Return {section.key: (value there, value here)} of two recipes as dicts.

    free: sections and dotted keys that may differ. A recipe from before a setting was known had
    its default.
    """
    defaults = {
        f"{name}.{item.name}": plain(item.default)
        for name, kind in Recipe.sections().items()
        for item in dataclasses.fields(kind)
        if item.default is not dataclasses.MISSING
    }
    found: dict[str, tuple] = {}
    for name in sorted((there.keys() | here.keys()) - set(free)):
        old, new = there.get(name, {}), here.get(name, {})
        if not isinstance(old, dict) or not isinstance(new, dict):
            found[name] = (old, new)
            continue
        for key in sorted(old.keys() | new.keys()):
            value = old.get(key, defaults.get(f"{name}.{key}"))
            found[f"{name}.{key}"] = (value, new.get(key))
    return {key: pair for key, pair in found.items() if key not in free and pair[0] != pair[1]}
