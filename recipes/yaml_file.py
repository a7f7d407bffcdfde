"""Read YAML so that a mistake in it is told with its file and line, and no text costs much.

PyYAML's own loader recurses as deep as brackets nest, lets twelve lines of anchors stand for a
billion values, and raises what Python raises for a number or a date that is none.
"""

import re
from pathlib import Path
from typing import Any, TextIO

import yaml

from specdraft.recipes.errors import RecipeError, in_a_line

LONGEST_FILE, LONGEST_TEXT = 2**17, 2**13  # characters of a file, of a value on a command line
LONGEST_EXPANDED = 2**18  # characters with every anchor written out where it is used
LONGEST_SCALAR = 2**11  # characters of one value
DEEPEST = 16  # lists and mappings in one another
POWER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
# 0100, which YAML 1.1 makes 64, and 1:40, 100: of base 8 and 60. Nobody who writes them means that.
OLD_BASES = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)$")
SIGNS = frozenset("-+0123456789")  # that a number begins with


class _Loader(yaml.SafeLoader):
    """PyYAML's, with these bounds, and with a word about a key that is given twice.

    YAML 1.2 and people write 1e-3 for a number; YAML 1.1, which PyYAML reads, wants 1.0e-3.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [*known, ("tag:yaml.org,2002:float", POWER)] if first in SIGNS else known
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.length = 0
        self.lengths: dict[yaml.Node, int] = {}  # of each node, expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event, before = self.peek_event(), self.length
        self.depth += 1
        if self.depth > DEEPEST:
            raise _problem(event, f"nested more than {DEEPEST} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self.lengths:
                raise _problem(event, f"*{event.anchor} holds itself")
            self.length += self.lengths[node]
        else:
            size = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            if size > LONGEST_SCALAR:
                raise _problem(event, f"a value of more than {LONGEST_SCALAR} characters")
            self.length += 1 + size
            self.lengths[node] = self.length - before
        if self.length > LONGEST_EXPANDED:
            raise _problem(event, "the anchors stand for too many values; write fewer of them")
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in known:
                raise _problem(key, f"{key.value} is given twice")
            known.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind, lone = node.tag.rpartition(":")[2], isinstance(node, yaml.ScalarNode)
        if lone and kind in ("int", "float") and OLD_BASES.match(node.value):
            raise _problem(
                node, f"{node.value:.60} is no decimal number; put it in quotes to make it text"
            )
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # 2020-13-45, !!bool maybe
            raise _problem(
                node, f"{node.value!s:.60} is no {kind}; put it in quotes to make it text"
            ) from None


class _Dumper(yaml.SafeDumper):
    """PyYAML's, which quotes a text that `_Loader` would read as a number: the commit 12e4567."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump_yaml(value: Any, file: TextIO | None = None, **options: Any) -> str | None:
    """Write a value as YAML that is read back, here, as it was."""
    return yaml.dump(value, file, _Dumper, sort_keys=False, **options)


def _problem(place: yaml.Event | yaml.Node, what: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=place.start_mark)


def read_mapping(path: Path, blanks: bool = True) -> dict:
    """Return the mapping that a YAML file holds.

    blanks: with its keys that have nothing behind them, not even `null`.
    Raises: RecipeError if the file cannot be read, is no YAML, or holds something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            content = _load(file.read(LONGEST_FILE + 1), LONGEST_FILE, blanks)
    except (OSError, ValueError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else in_a_line(error)
        reason = error.strerror if isinstance(error, OSError) else reason
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: {explain(error)}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: must be a mapping of keys to values, not {content!r:.60}")
    return content


def read_value(text: str) -> Any:
    """Return what YAML makes of one value, such as `[a, b]`, `3.0e-5` or `null`.

    Raises: yaml.YAMLError, also for what is too long or too deep.
    """
    return _load(text, LONGEST_TEXT)


def _load(text: str, longest: int, blanks: bool = True) -> Any:
    if len(text) > longest:
        raise yaml.YAMLError(f"longer than {longest} characters")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if not blanks and isinstance(node, yaml.MappingNode):
            node.value = [pair for pair in node.value if pair[1].end_mark != pair[1].start_mark]
        return loader.construct_document(node) if node else None
    finally:
        loader.dispose()


def explain(error: yaml.YAMLError) -> str:
    """Say in one line what is wrong with a YAML text, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    # Some say only together what is wrong: "found duplicate anchor 'a'; ..", "second occurrence".
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    return f"{where}{', '.join(filter(None, parts)) or in_a_line(error)}"
