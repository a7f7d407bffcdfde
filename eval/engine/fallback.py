"""A drafter that raises costs its drafts, not the output: its rows go on by plain decoding."""

import warnings
from collections.abc import Sequence

from specdraft.eval.engine.row import Row
from specdraft.recipes.errors import in_a_line


class Fallback:
    """`with fallback.of(rows): ..` around every call of a drafter.

    What is raised there ends drafting for these rows and goes no further; each of them says why,
    and the first time a warning does, too.
    """

    __slots__ = ("rows", "warned")

    def __init__(self):
        self.rows: Sequence[Row] = ()
        self.warned = False

    def of(self, rows: Sequence[Row]) -> "Fallback":
        """The context of a call on behalf of `rows`; contexts do not nest."""
        self.rows = rows
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace) -> bool:
        if not isinstance(error, Exception):  # nothing, or an interrupt
            return False
        reason = in_a_line(error, kind=True)
        for row in self.rows:
            row.is_drafting, row.fallback = False, reason
        if not self.warned:
            names = ", ".join(str(row.index) for row in self.rows)
            warnings.warn(
                f"the drafter raised {reason}; request {names} goes on by plain decoding, with the "
                "same output",
                RuntimeWarning,
                stacklevel=2,
            )
        self.warned = True
        return True
