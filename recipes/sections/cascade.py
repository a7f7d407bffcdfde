"""A cascade of drafters."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from specdraft.recipes.fields import Factor, Interval, Section

Drafted = Annotated[int, Interval(0, 256)]  # tokens; 0: none


@dataclass(frozen=True, kw_only=True)
class CascadeSection(Section):
    """Drafters from the largest to the smallest: students, then Max-Gram (CS Drafting, arXiv
    2312.11462, Algorithm 1). Row i of `k` belongs to reviewer i (0: the target): how many tokens
    each drafter contributes to what it reviews."""

    k: tuple[tuple[Drafted, ...], ...] = ((4, 2), (0, 10))  # upper triangular
    leniency: Factor = 1.0  # l, of reviews among students
    students: tuple[str, ...] | None = None  # folders or Hub ids; null: the recipe's own student

    @property
    def size(self) -> int:
        """How many students the cascade has."""
        return 1 if self.students is None else len(self.students)

    def conflicts(self) -> Iterator[str]:
        """A square, upper triangular K of the right size, with a student that has work to do."""
        k, side = self.k, self.size + 1
        below = [(i, j) for i in range(len(k)) for j in range(min(i, len(k[i]))) if k[i][j]]
        if not self.size:
            yield self.complaint(
                "students", "name at least one student, or null for the recipe's own"
            )
        elif [len(row) for row in k] != [side] * side:
            yield self.complaint(
                "k",
                f"must be {side} x {side}: rows of the target and of {self.size} student(s), "
                "columns of the students and of Max-Gram; see cascade.students",
            )
        elif below:
            i, j = below[0]
            yield self.complaint(
                "k",
                f"must be upper triangular, but row {i}, column {j} is {k[i][j]}: a drafter "
                "reviews only what smaller ones propose; set it to 0",
            )
        elif not any(k[0][:-1]):
            yield self.complaint(
                "k",
                "no student drafts: row 0 must be above 0 before its last column (method maxgram "
                "is Max-Gram alone)",
            )
