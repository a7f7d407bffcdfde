"""What is measured: nodes of one row at each cached length, rows at a few numbers of nodes.

The grid is not full. What one term of the curve costs is seen where the others stand still:

    rows \\ nodes   1  2  4  8 12 16 24 ..  128
               1   x  x  x  x  x  x  x  x    x      behind each cached length
               2   x     o        x
               ..  x     o        x                 behind the shortest; one node, behind each
              32   x     o        x                 o: once more, of rows of two widths
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdraft.recipes.errors import RecipeError

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ROWS = (1, 2, 4, 8, 16, 32)
CACHED = (64, 256)
WIDTHS = (1, 2, 4, 8, 16)  # of drafts: chains side by side
REPEATS = 5  # of the small grid
SIDE = 16  # nodes at most, of several rows: more are verified for one row alone


@dataclass(frozen=True)
class Grid:
    """Numbers of nodes, of rows, of cached tokens and of chains, ascending, and how often all is
    measured."""

    nodes: tuple[int, ...] = NODES
    rows: tuple[int, ...] = ROWS
    cached: tuple[int, ...] = CACHED
    widths: tuple[int, ...] = WIDTHS
    repeats: int = 7

    @property
    def capacity(self) -> int:
        """Tokens that a row holds at most."""
        return max(map(self._room, self.cached))

    def _room(self, cached: int) -> int:
        """Tokens that the longest row needs room for, where rows have `cached` in the mean."""
        return max(cached + max(self.nodes), max(apart(cached, 2)) + self.side[-1])

    @property
    def side(self) -> tuple[int, ...]:
        """Numbers of nodes that several rows are measured at: three, from the least on."""
        small = [count for count in self.nodes if count <= SIDE] or [self.nodes[0]]
        return tuple(sorted({small[0], small[(len(small) - 1) // 2], small[-1]}))

    @classmethod
    def for_rows(cls, most: int) -> "Grid":
        """A small one, seconds of a small target: what choices between drafts of up to so many
        rows need, which end one after the other."""
        rows = (*(2**n for n in range((most - 1).bit_length())), most)
        return cls((1, 2, 4, 6, 8, 12, 16, 32, 64), rows, CACHED, (1, 4, 16), REPEATS)

    def within(self, context: int | None) -> "Grid":
        """The part of the grid that a target's context holds. Where it holds none of the cached
        lengths beside the most nodes, the longest that it does hold takes their place.

        Raises RecipeError where it holds no number of the nodes.
        """
        if context is None:
            return self
        nodes = tuple(count for count in self.nodes if count < context)
        if not nodes:
            raise RecipeError(
                f"--nodes {min(self.nodes)}: the target's context is {context}; ask for fewer"
            )
        inside = replace(self, nodes=nodes)
        cached = tuple(length for length in self.cached if inside._room(length) <= context)
        # Several rows are apart: the longest has half as many again, beside fewer nodes.
        room = min(context - max(nodes), 2 * (context - inside.side[-1]) // 3)
        return replace(inside, cached=cached or (max(room, 1),))

    def with_rows(self, most: int) -> "Grid":
        """The part with at most so many rows."""
        return replace(self, rows=tuple(count for count in self.rows if count <= most))

    @property
    def ragged(self) -> tuple[int, int] | None:
        """Nodes of a row in the mean and of the widest, where several rows are of two widths; None
        where the side is too short."""
        if len(self.side) < 3:
            return None
        _, nodes, widest = self.side
        return nodes, min(2 * nodes - 1, widest)

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Rows, nodes and cached tokens of each forward."""
        least, *more = self.rows
        for cached in self.cached:
            yield from ((least, nodes, cached) for nodes in self.nodes)
            yield from ((rows, self.side[0], cached) for rows in more)
        yield from ((rows, nodes, self.cached[0]) for rows in more for nodes in self.side[1:])


def apart(mean: int, rows: int) -> list[int]:
    """Numbers of tokens of several rows as far apart as prompts and answers are: a step takes what
    its longest row does. A row alone has the mean.

    >>> apart(8, 5), apart(8, 1)
    ([4, 6, 8, 10, 12], [8])
    """
    if rows == 1:
        return [mean]
    return [mean // 2 + number * mean // (rows - 1) for number in range(rows)]
