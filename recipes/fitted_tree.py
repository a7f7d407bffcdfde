"""The tree that lies beside a drafter's weights, TREE, and what it says of its fit.

It is a tree file as any other (recipes/static_trees.py), with one key more, `fit`: whose weights it
was fitted to, on which machine, and every tree that was tried there, the chosen one first.
`eval.tree: auto` means this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import (
    Count,
    Draft,
    Few,
    InvalidRecipeError,
    Positive,
    Section,
    shown,
)
from specdraft.recipes.static_trees import AUTO, TREE
from specdraft.recipes.yaml_file import read_mapping

FIT = "fit one: python eval/fit.py RECIPE"


def size_of(nodes: int, depth: int) -> str:
    """The size of a tree, in words."""
    return f"{nodes} node{'s' * (nodes > 1)} to depth {depth}"


@dataclass(frozen=True, kw_only=True)
class Trial(Section):
    """A tree that was decoded with: what it is, and how many times as fast as plain decoding."""

    nodes: Count
    depth: Draft
    passes: Draft  # of the head
    tokens: Positive  # of a step, as expected
    expected: Positive  # x plain
    measured: Positive

    def __str__(self) -> str:
        passes = f"{self.passes} pass{'es' * (self.passes > 1)}"
        return f"{size_of(self.nodes, self.depth)} in {passes}"


@dataclass(frozen=True, kw_only=True)
class Fit(Section):
    """What a tree was fitted to, and what was tried; the first of the trials is the tree."""

    weights: str  # hash of the drafter's
    machine: dict[str, str]
    rows: Few  # decoded at once
    trials: tuple[dict[str, int | float], ...]

    def conflicts(self) -> Iterator[str]:
        """Yield a fit without trials, and trials that cannot be read."""
        if not self.trials:
            yield self.complaint("trials", "must have one at least")
        try:
            self.tried()
        except (TypeError, InvalidRecipeError) as error:
            yield self.complaint("trials", str(error))

    def tried(self) -> list[Trial]:
        """The trials, the tree's own first."""
        return [Trial(**trial) for trial in self.trials]

    @property
    def place(self) -> str:
        """Where it was fitted, in words."""
        return self.machine.get("gpu") or self.machine.get("cpu") or "a machine without a name"


def read_fit(file: Path) -> Fit | None:
    """What a tree file says of its fit; None where it was made by hand.

    Raises InvalidRecipeError for what is no fit.
    """
    values = read_mapping(file).get("fit")
    if values is None:
        return None
    try:
        return Fit(**values)
    except InvalidRecipeError as error:
        raise InvalidRecipeError(error.problems, str(file)) from None
    except TypeError:
        known = ", ".join(Fit.__annotations__)
        raise InvalidRecipeError([f"fit = {shown(values)}: must have {known}"], str(file)) from None


def fitted_tree(folder: Path | None, weights: str) -> Path:
    """Return the tree file beside the weights in a folder (None: they have none).

    Raises RecipeError where there is none, or one that was fitted to weights with another hash.
    """
    if folder is None or not (file := folder / TREE).is_file():
        where = "beside weights that were never saved" if folder is None else f"in {folder}"
        raise RecipeError(f"eval.tree = {AUTO}: no {TREE} {where}; {FIT}, or name a tree")
    fit = read_fit(file)
    if fit and fit.weights != weights:
        raise RecipeError(
            f"eval.tree = {AUTO}: {file} was fitted to other weights than lie beside it; {FIT}, or "
            f"take it as it is: eval.tree={file}"
        )
    return file
