"""Static trees: the bundled ones are valid and have the stated sizes; invalid ones are refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.static_trees import known_trees, load_tree_paths, tree_problems

RECIPES = Path(__file__).parents[2] / "recipes"


def complaint(name: str) -> str:
    """Return the message about a tree that must be refused."""
    with pytest.raises(RecipeError) as caught:
        load_tree_paths(name)
    return str(caught.value)


@pytest.mark.parametrize("name", known_trees())
def test_every_bundled_tree_is_valid_and_sorted(name: str):
    paths = load_tree_paths(name)
    content = yaml.safe_load((RECIPES / "trees" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert content["name"] == name
    assert content["source"]
    assert int(re.search(r"_k(\d)", name)[1]) == content["block_size"]
    assert tree_problems(paths) == []
    assert paths == sorted(paths, key=lambda path: (len(path), path))


def test_the_published_trees_have_the_published_sizes():
    sizes = {name: len(load_tree_paths(name)) for name in known_trees() if "falcon" in name}
    assert sizes == {
        "falcon_k2_depth8_wide": 165,
        "falcon_k2_depth8_narrow": 118,
        "falcon_k2_depth4": 75,
    }
    by_depth = [len(path) for path in load_tree_paths("falcon_k2_depth8_wide")]
    assert [by_depth.count(depth) for depth in range(1, 9)] == [20, 15, 19, 23, 21, 23, 21, 23]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_tiny_trees_are_small_and_deep_enough(k: int):
    paths = load_tree_paths(f"tiny_k{k}")
    assert len(paths) <= 25
    assert 6 <= max(map(len, paths)) <= 8


def test_the_published_trees_equal_their_source():
    source = Path(__file__).parents[2].parent / "shared" / "trees.json"
    if not source.is_file():
        pytest.skip("no trees.json beside the checkout to compare with")
    for name, paths in json.loads(source.read_text())["trees"].items():
        assert set(load_tree_paths(name)) == {tuple(path) for path in paths}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("[[0], [0]]", "node [0] is given twice"),
        ("[[0, 0], [0]]", "node [0, 0] comes before its parent [0]"),
        ("[[0], [1, 0]]", "node [1, 0] lacks its parent [1]"),
        ("[[0], [2]]", "node [2] skips its sibling [1]"),
        ("[[1], [0]]", "node [1] comes before its sibling [0]"),
        ("[]", "paths must be a list of nodes"),
        ("[0, 1]", "paths must be a list of nodes"),
        ("[[]]", "paths must be a list of nodes"),
        ("[[true]]", "paths must be a list of nodes"),
        ("[[-1]]", "paths must be a list of nodes"),
        ("3", "paths must be a list of nodes"),
    ],
)
def test_an_invalid_tree_file_is_refused(paths: str, expected: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\npaths: {paths}\n", encoding="utf-8")
    assert f"mine.yaml: {expected}" in complaint(str(file))


def test_a_users_own_tree_file_is_read_and_its_keys_are_checked(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("paths: [[0], [1], [0, 0]]\n", encoding="utf-8")
    assert load_tree_paths(str(file)) == [(0,), (1,), (0, 0)]
    file.write_text("path: [[0]]\n", encoding="utf-8")
    assert "unknown key path; nearest is paths" in complaint(str(file))
