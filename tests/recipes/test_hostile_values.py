"""Hostile values: each is refused quickly and briefly, or is valid for its key."""

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from specdraft.eval.methods.registry import problems
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import load_tree_paths

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
KEYS = [
    f"{section}.{item.name}"
    for section, kind in get_type_hints(Recipe).items()
    if section != "name"
    for item in dataclasses.fields(kind)
]
BOMB = "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}' if level else 'x' * 50] * 9)}]\n"
    for level in range(12)
)
HOSTILE = {
    "no date": "2020-13-45",
    "a date": "2020-01-01",
    "60 digits": "9" * 60,
    "-60 digits": "-" + "9" * 60,
    "5000 digits": "9" * 5000,
    "hexadecimal": "0x" + "f" * 2000,
    "too large": "1.0e+308",
    "infinite": ".inf",
    "tiny": "1.0e-308",
    "brackets": "[" * 10_000,
    "braces": "{a: " * 5_000,
    "nested": "[[[[[[[[[[1]]]]]]]]]]",
    "a bomb": "{" + BOMB.replace("\n", ", ") + "}",
    "itself": "&a [*a]",
    "NUL": '"a\\0b"',
    "a raw NUL": "a\0b",
    "half a pair": '"\\ud800"',
    "a raw half": "\ud800",
    "long": "x" * 100_000,
    "many": "[" + "1," * 1_000 + "]",
    "many keys": "{" + "".join(f"k{n}: 1, " for n in range(1_000)) + "}",
    "no key": "{[a]: 1}",
    "a tag": "!!bool maybe",
    "a list that is a number": "!!int [1]",
    "code": "!!python/object/apply:os.system [true]",
    "bytes": "!!binary aGVsbG8=",
    "a set": "!!set {a, b}",
    "two": "a\n---\nb",
}


def problem(*overrides: str, recipe: Path = RECIPE) -> str | None:
    """The message about a recipe, or None for a valid one; always short and fast."""
    began = time.process_time()
    try:
        load_recipe(recipe, list(overrides), check=problems)
    except RecipeError as error:
        message = str(error)
    else:
        message = None
    assert time.process_time() - began < 5, "it took too long"
    assert len(message or "") < 4000
    return message


@pytest.mark.parametrize("number", range(len(HOSTILE)), ids=[*HOSTILE])
def test_a_hostile_value_is_handled_briefly_at_any_key_and_refused_where_invalid(number: int):
    value = [*HOSTILE.values()][number]
    for key in [*KEYS[number % 9 :: 9], "name"]:
        problem(f"{key}={value}")  # it may be valid there, such as a text
    for key in ("data.limit", "train", "nonsense", "data.nonsense"):
        assert problem(f"{key}={value}"), key


def bounds(annotation: object) -> Iterator[object]:
    """The intervals in an annotation, at any depth."""
    yield from getattr(annotation, "__metadata__", ())
    for part in getattr(annotation, "__args__", ()):
        yield from bounds(part)


def numbers(annotation: object) -> Iterator[object]:
    if annotation in (int, float):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from numbers(part)


@pytest.mark.parametrize("section", [name for name in get_type_hints(Recipe) if name != "name"])
def test_every_number_has_finite_bounds(section: str):
    kind = get_type_hints(Recipe)[section]
    for key, annotation in get_type_hints(kind, include_extras=True).items():
        found = list(bounds(annotation))
        assert len(found) == len(list(numbers(annotation))), f"{section}.{key} has no bounds"
        assert all(math.isfinite(interval.low + interval.high) for interval in found)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("eval.threads=100000", "eval.threads = 100000: must be >= 1 and <= 1000"),
        ("train.threads=100000", "must be >= 1 and <= 1000"),
        ("eval.seed=9223372036854775808", "must be >= 0 and <= 2147483647"),
        ("train.seed=9223372036854775808", "must be >= 0 and <= 2147483647"),
        ("eval.max_new_tokens=1000000000", "must be >= 1 and <= 10000000"),
        ("eval.lookup_copy=1000000", "must be >= 1 and <= 256"),
        ("data.batch_rows=1000000", "must be >= 1 and <= 1000"),
        ("data.samples=1000000", "must be >= 1 and <= 8192"),
        ("eval.temperature=1.0e-300", "must be 0, or >= 0.01 and <= 100"),
        ("eval.temperature=1.0e+300", "must be 0, or >= 0.01 and <= 100"),
        ("optim.lr=1.0e+308", "must be > 0 and <= 1000000"),
        ("head.layers=100000", "must be >= 1 and <= 1000"),
        ("drafting.gamma=200", None),
        ("drafting.chains=200", None),
        (f"drafting.branching={[9] * 2000}", ", 9]: makes "),
        ("maxgram.branches=200", None),
        (f"eval.methods=[{', '.join(f'm{n}' for n in range(999))}]", "entry 0 ('m0') must be one"),
        (f"data.limit={'9' * 60}", "data.limit = 9999"),
        ("data.limit=2020-13-45", "line 1: 2020-13-45 is no timestamp; put it in quotes"),
        ('output.dir="a\\0b"', "must be text without NUL and without lone surrogates"),
        ('data.sources=["a\\0b"]', "entry 0 ('a\\x00b') must be text without NUL"),
        ("target.device_map={x: 100000}", "must be >= 0 and <= 1023"),
        (f"data.limit={'[' * 5000}", "nested more than 16 deep"),
    ],
)
def test_a_hostile_value_is_refused_with_what_is_allowed(override: str, expected: str | None):
    message = problem(override)
    assert message is None if expected is None else expected in message


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (["drafting.chains=256", "drafting.gamma=17"], 4352),
        (["drafting.beam_width=256", "drafting.gamma=17"], 4352),
        (["maxgram.branches=256", "maxgram.n=17"], 4352),
    ],
)
def test_drafts_larger_than_a_target_can_read_at_once_are_refused(overrides: list[str], nodes: int):
    assert f"makes {nodes} nodes, at most 4096; lower it or" in problem(*overrides)


def test_a_yaml_bomb_is_refused_before_it_is_expanded(tmp_path: Path):
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB + "data: {sources: *a11}\n", encoding="utf-8")
    assert "the anchors stand for too many values" in problem(recipe=path)
    path.write_text("data: &a {sources: [tiny]}\ntrain: {steps: 1, other: *a}\n")
    assert "train.other is an unknown key" in problem(recipe=path)


def test_an_override_changes_only_one_of_two_sections_that_share_an_anchor(tmp_path: Path):
    path = tmp_path / "shared.yaml"
    path.write_text(
        "data: {sources: [tiny]}\ntrain: {steps: 1}\nhead: &a {layers: 2}\nmedusa: *a\n"
    )
    recipe = load_recipe(path, ["head.layers=3"])
    assert (recipe.head.layers, recipe.medusa.layers) == (3, 2)


def test_a_recipe_name_that_no_file_can_have_is_refused():
    for name in ("a\0b.yaml", "a\0b/c.yaml", "x" * 5000 + ".yaml", "y/" * 3000 + "z"):
        assert "no recipe at" in problem(recipe=Path(name))
        assert problem(f"eval.tree={name}")


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    for text in (
        "\0",
        "x" * 10**6,
        "[" * 10**5,
        "a: b: c",
        "&a [*a]",
        "!!bool x",
        "{1: 2, [3]: 4}",
    ):
        path.write_text(text, encoding="utf-8")
        assert problem(recipe=path)
    path.write_text("".join(f"key{n}: 1\n" for n in range(1000)))
    assert problem(recipe=path).endswith("and 2 more")  # data and train are missing


def test_a_message_about_a_long_value_is_shortened():
    with pytest.raises(RecipeError) as caught:
        from_dict({"name": "x" * 10**6, "data": {"sources": [None] * 10**5, "limit": "y" * 10**6}})
    assert len(str(caught.value)) < 2000
    assert "more characters .." in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([[rank] for rank in range(5_000)], "5000 nodes, at most 4096"),
        ([[0] * depth for depth in range(1, 70)], "69 deep, at most 64"),
        ([[0], [10**30]], "skips its sibling"),
    ],
)
def test_a_tree_too_large_for_any_target_is_refused(paths: list, expected: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"paths: {paths}\n")
    with pytest.raises(RecipeError, match=expected):
        load_tree_paths(str(file))
