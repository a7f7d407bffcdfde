"""Read a YAML file so that a mistake in it is told with its file and line."""

from pathlib import Path
from typing import Any

import yaml

from specdraft.recipes.errors import RecipeError


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys and says nothing; this says it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next(index for index, key in enumerate(keys) if key in keys[:index])
            mark = node.value[twice][0].start_mark
            raise yaml.MarkedYAMLError(problem=f"{keys[twice]} is given twice", problem_mark=mark)
        return mapping


def read_mapping(path: Path) -> dict:
    """Return the mapping that a YAML file holds.

    Raises: RecipeError if the file cannot be read, is no YAML, or holds something else.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: {explain(error)}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: must be a mapping of keys to values, not {content!r:.60}")
    return content


def explain(error: yaml.YAMLError) -> str:
    """Say in one line what is wrong with a YAML text, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}{getattr(error, 'problem', None) or error}"


def scalar(text: str) -> Any:
    """Return what YAML makes of one value, such as `[a, b]`, `3.0e-5` or `null`."""
    return yaml.safe_load(text)
