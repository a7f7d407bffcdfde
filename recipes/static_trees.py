"""Static decoding trees: which ranks of each depth's distribution become nodes.

A path lists, for each depth, the rank of the token taken there (0: the most probable); every path
is one node, the root (the last committed token) is none. Falcon, section "custom-designed tree".
"""

from functools import cache
from pathlib import Path

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import LARGEST_TREE, MOST_LINES, InvalidRecipeError, nearest
from specdraft.recipes.yaml_file import read_mapping

DEEPEST_TREE = 64  # tokens of a path
KEYS = ("name", "block_size", "source", "paths", "fit")
AUTO, TREE = "auto", "tree.yaml"  # the tree beside a drafter's weights (recipes/fitted_tree.py)
TREES = Path(__file__).parent / "trees"  # the bundled ones


def known_trees() -> list[str]:
    """Return the names of the bundled trees."""
    return sorted(path.stem for path in TREES.glob("*.yaml"))


def load_tree_paths(name: str) -> list[tuple[int, ...]]:
    """Return the nodes of a bundled tree (its file stem) or of a tree file (a path).

    Returns: paths of ranks, parents before children.
    Raises: InvalidRecipeError if there is no such tree or if it is none.
    """
    path = tree_place(name)
    try:
        content = _content(path)
    except RecipeError as error:
        raise InvalidRecipeError([str(error)], "tree") from None
    problems = [
        f"unknown key {key:.80}; nearest is {nearest(key[:80], KEYS)}"
        for key in map(str, [*content][:MOST_LINES])
        if key not in KEYS
    ]
    size, paths = content.get("block_size", 1), content.get("paths")
    if type(size) is not int or size < 1:
        problems.append(f"block_size = {size!r:.40}: must be a whole number from 1")
    if isinstance(paths, list) and paths and all(map(_is_path, paths)):
        paths = [tuple(ranks) for ranks in paths]
        problems += tree_problems(paths)
    else:
        problems.append("paths must be a list of nodes, each a list of ranks: [[0], [1], [0, 0]]")
    if problems:
        raise InvalidRecipeError([f"{path.name}: {problem}" for problem in problems], "tree")
    return paths


def tree_block_size(name: str) -> int | None:
    """Return the block size of the heads that a tree, which is one, was made for; None: any."""
    return _content(tree_place(name)).get("block_size")


def tree_problems(paths: list[tuple[int, ...]]) -> list[str]:
    """Return what keeps `paths` from being a tree: one line for each offending node.

    Each node stands once, after its parent and after the sibling of the rank before its own, so
    that siblings are in draft order and no rank is skipped.
    """
    if len(paths) > LARGEST_TREE:
        return [f"{len(paths)} nodes, at most {LARGEST_TREE}; leave out the least probable"]
    if (depth := max(map(len, paths))) > DEEPEST_TREE:
        return [f"{depth} deep, at most {DEEPEST_TREE}; cut the longest paths"]
    problems = []
    everywhere, seen = set(paths), set()
    for node in paths:
        parent, elder = node[:-1], (*node[:-1], node[-1] - 1)
        if node in seen:
            problems.append(f"node {list(node)} is given twice")
        elif parent and parent not in seen:
            problem = "comes before its parent" if parent in everywhere else "lacks its parent"
            problems.append(f"node {list(node)} {problem} {list(parent)}")
        elif node[-1] > 0 and elder not in seen:
            problem = "comes before" if elder in everywhere else "skips"
            problems.append(f"node {list(node)} {problem} its sibling {list(elder)}")
        seen.add(node)
    return problems


def _content(path: Path) -> dict:
    return _bundled(path) if path.parent == TREES else read_mapping(path)


@cache
def _bundled(path: Path) -> dict:
    """A file that comes with the package: a process reads it once."""
    return read_mapping(path)


def tree_place(name: str) -> Path:
    """Return the file of a bundled tree, or of one that is given by its path.

    Raises InvalidRecipeError for a name that no bundled tree has.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    if name not in (known := known_trees()):
        guess = f"nearest is {nearest(name, known)} of {', '.join(known)}"
        raise InvalidRecipeError([f"unknown tree; {guess}"], "tree")
    return TREES / f"{name}.yaml"


def _is_path(ranks: object) -> bool:
    whole = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    return whole and min(ranks, default=-1) >= 0
