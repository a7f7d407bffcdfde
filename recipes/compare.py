"""Which settings of two runs differ: a run goes on, or counts as made, only where none does."""

import json
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from specdraft.recipes.schema import Recipe


def differences(there: dict, here: dict, free: Collection[str]) -> dict[str, tuple]:
    """Return {section.key: (value there, value here)} of two recipes as dicts.

    free: sections and dotted keys that may differ. A recipe from before a setting was known had
    its default.
    """
    known = _defaults()
    found: dict[str, tuple] = {}
    for name in sorted((there.keys() | here.keys()) - set(free)):
        old, new = there.get(name, {}), here.get(name, {})
        if not isinstance(old, dict) or not isinstance(new, dict):
            found[name] = (old, new)
            continue
        for key in sorted(old.keys() | new.keys()):
            value = old.get(key, known.get(name, {}).get(key))
            if f"{name}.{key}" not in free:
                found[f"{name}.{key}"] = (value, new.get(key))
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}


def _defaults() -> dict[str, dict[str, Any]]:
    """Of every section, the settings that have a default, as JSON has them."""
    sections = {name: kind for name, kind in get_type_hints(Recipe).items() if is_dataclass(kind)}
    return {
        name: {
            field.name: json.loads(json.dumps(field.default))
            for field in fields(kind)
            if field.default is not MISSING
        }
        for name, kind in sections.items()
    }
