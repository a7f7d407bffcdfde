"""A recipe from its YAML file and the command line, and back to YAML.

    recipe = load_recipe("recipes/tiny.yaml", ["optim.lr=1.0e-3", "data.sources=[../a.jsonl]"])
    recipe = load_recipe("recipes/tiny.yaml", ["head=you/a-head"])  # head.model, target.model, ..
    recipe = load_recipe("recipes/tiny_cascade.yaml", ["runs/tiny_cascade/fitted_cascade.yaml"])
    dump(recipe, "runs/tiny/recipe.yaml")

YAML maps 1:1 to the sections of `schema.Recipe`; every mistake of a recipe is reported at once.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import (
    LONGEST_VALUE,
    MOST_LINES,
    InvalidRecipeError,
    Section,
    nearest,
    shortened,
    shown,
)
from specdraft.recipes.find import find_recipe
from specdraft.recipes.schema import Recipe, conflicts
from specdraft.recipes.yaml_file import dump_yaml, explain, read_mapping, read_value

# What is wrong with a recipe beyond its sections, one line each, by the sections that are sound.
Check = Callable[[Mapping[str, Section]], list[str]]


def load_recipe(
    path: str | Path, overrides: list[str] | None = None, check: Check = lambda _: []
) -> Recipe:
    """Read a recipe, apply overrides and validate the whole. An override is section.key=value or
    the YAML file of a part of a recipe; later ones win.

    path: of its file, or whatever else `find_recipe` understands.
    check: of what other floors know, e.g. the methods (eval/methods/registry.py).
    Raises: RecipeError that lists every problem.
    """
    path, named = find_recipe(path)
    tree, problems = read_mapping(path), []
    for section, values in named.items():
        there = tree.get(section)
        tree[section] = {**(there if isinstance(there, dict) else {}), **values}
    for override in overrides or []:
        try:
            _override(tree, override)
        except RecipeError as error:
            problems.append(str(error))
    try:
        recipe = from_dict({"name": path.stem, **tree}, check)
    except InvalidRecipeError as error:
        problems += error.problems
    if problems:
        raise InvalidRecipeError(problems, str(path))
    return recipe


def from_dict(tree: dict[str, Any], check: Check = lambda _: []) -> Recipe:
    """Build a recipe from nested dicts, as `Recipe.to_dict` returns them.

    Raises: InvalidRecipeError with every problem of every section.
    """
    sections = Recipe.sections()
    unknown = [str(key) for key in tree if key != "name" and key not in sections]
    problems = [*map(_unknown, unknown[:MOST_LINES])]
    built: dict[str, Section] = {}
    for section, kind in sections.items():
        try:
            built[section] = _build(section, kind, tree.get(section))
        except InvalidRecipeError as error:
            problems += error.problems
    problems += check(built)
    if problems:
        raise InvalidRecipeError([*problems, *conflicts({"name": tree.get("name"), **built})])
    return Recipe(name=tree.get("name"), **built)


def dump(recipe: Recipe, path: str | Path) -> None:
    """Write the resolved recipe as YAML that `load_recipe` reads back to an equal one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        dump_yaml(recipe.to_dict(), file, allow_unicode=True, width=100)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _build(section: str, kind: type[Section], values: Any) -> Section:
    """Build one section; a key it does not know does not hide what else is wrong with it."""
    values = {} if values is None else values
    if not isinstance(values, dict):
        allowed = f"must be a mapping of keys to values ({', '.join(_keys_of(kind))})"
        raise InvalidRecipeError([f"{section} = {shown(values)}: {allowed}"])
    fields = {item.name: item for item in dataclasses.fields(kind)}
    unknown = [f"{section}.{key}" for key in values if key not in fields]
    problems = [*map(_unknown, unknown[:MOST_LINES])]
    needed = {name for name, item in fields.items() if item.default is dataclasses.MISSING}
    try:
        if missing := needed - values.keys():
            raise InvalidRecipeError(f"{section}.{name} is missing" for name in sorted(missing))
        built = kind(**{key: value for key, value in values.items() if key in fields})
    except InvalidRecipeError as error:
        problems += error.problems
    if problems:
        raise InvalidRecipeError(problems)
    return built


def _override(tree: dict, override: str) -> None:
    """Write one `section.key=value`, or a part of a recipe, into the tree. Raises RecipeError."""
    if override.endswith(".yaml") and "=" not in override:
        # A section with nothing in it says nothing; one that is null, that its defaults hold.
        for section, values in read_mapping(Path(override), blanks=False).items():
            there = tree.get(section) or {}
            both = isinstance(values, dict) and isinstance(there, dict)
            tree[section] = {**there, **values} if both else values
        return
    key, equals, text = override.partition("=")
    section, dot, leaf = key.strip().partition(".")
    if not equals:
        example = "write it as key=value, e.g. optim.lr=1.0e-4"
        raise RecipeError(f"override {shown(override)}: {example}")
    try:
        value = read_value(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {shown(override)}: {explain(error)}") from None
    there = tree.get(section) or {}
    if not dot:
        kind = Recipe.sections().get(section)
        named = (
            isinstance(value, str) and isinstance(there, dict) and kind and hasattr(kind, "model")
        )
        tree[section] = {**there, "model": value} if named else value
    elif isinstance(there, dict):
        tree[section] = {**there, leaf: value}


def _unknown(key: str) -> str:
    """Say which known key an unknown one is nearest to, in its own section where it has one."""
    key, sections = shortened(key, LONGEST_VALUE), Recipe.sections()
    section, _, leaf = key.rpartition(".")
    # A right key in the wrong section: the likeliest mistake, and one that spelling cannot find.
    elsewhere = [name for name, kind in sections.items() if leaf in _keys_of(kind)]
    if elsewhere:
        guess = f"{elsewhere[0]}.{leaf}"
    elif section in sections:
        keys = _keys_of(sections[section])
        guess = f"{section}.{nearest(leaf, keys)} ({section} has {', '.join(keys)})"
    else:
        names = ["name", *sections]
        guess = f"{nearest(key.partition('.')[0], names)} (a recipe has {', '.join(names)})"
    return f"{key} is an unknown key; nearest is {guess}"


def _keys_of(kind: type[Section]) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]
