"""How drafts are made: by a student, by Max-Gram, by a cascade of both."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

from specdraft.recipes.fields import (
    LARGEST_TREE,
    LONGEST_CONTEXT,
    Draft,
    Factor,
    Fraction,
    Interval,
    Natural,
    Section,
)

Nodes = Annotated[int, Interval(1, LARGEST_TREE)]
Copies = Annotated[int, Interval(0, LARGEST_TREE)]
Drafted = Annotated[int, Interval(0, 256)]  # tokens; 0: none


def check_nodes(section: Section, key: str, nodes: int, way_out: str) -> Iterator[str]:
    """Yield what is wrong where a key makes drafts of more nodes than a target reads at once."""
    if nodes > LARGEST_TREE:
        what = f"makes {nodes} nodes, at most {LARGEST_TREE}; {way_out}"
        yield section.complaint(key, what)


@dataclass(frozen=True, kw_only=True)
class DraftingSection(Section):
    """How a student drafts: paths, trees and merged graphs (SSD, TSD, GSD: ACL Findings 2024),
    trees drawn without replacement (RSD, arXiv 2402.14160) and i.i.d. (SpecInfer, arXiv 2305.09781;
    SpecTr, arXiv 2310.15141). Every key names the methods that read it; sizes are in nodes."""

    gamma: Draft = 5  # ssd, rsd_s, spectr, hf_assisted: tokens of a path
    depth: Draft = 10  # tsd, gsd, ssd_dynamic: levels
    out_degree: Draft = 4  # tsd, gsd, ssd_dynamic: children of a node
    theta_prob: Fraction = 0.2  # ssd, tsd, gsd: a less probable token ends its path; 0: none does
    theta_sib: Fraction = 0.3  # tsd, gsd: so does one below this share of its best sibling
    sibling_pruning: Literal["leaf", "drop"] = "leaf"  # tsd, gsd: drop: it is not even added
    max_nodes: Nodes = 256  # tsd, gsd: nodes of a draft, copies not counted
    tau: Natural = 2  # gsd: tokens after which paths that agree share what follows
    max_copies: Copies = 100  # gsd: nodes copied before verification
    branching: tuple[Draft, ...] = (2, 2, 2, 1, 1)  # rsd_c, specinfer: children by depth
    equal_siblings: Literal["merged", "apart"] = "merged"  # specinfer: share children, or have own
    beam_width: Draft = 4  # rsd_s: nodes of a level
    chains: Draft = 4  # spectr

    def conflicts(self) -> Iterator[str]:
        """Yield a tree without branches, and drafts of more nodes than a target reads."""
        if not self.branching:
            yield self.complaint("branching", "give the children by depth, e.g. [2, 2, 1]")
        yield from check_nodes(
            self,
            "branching",
            sum(accumulate(self.branching, lambda a, b: min(a * b, 10**9))),
            "lower some factors or leave out the last",
        )
        for key in ("beam_width", "chains"):
            nodes = self.gamma * getattr(self, key)
            yield from check_nodes(self, key, nodes, "lower it or drafting.gamma")


@dataclass(frozen=True, kw_only=True)
class MaxgramSection(Section):
    """Max-Gram (CS Drafting, arXiv 2312.11462): copy what followed the longest suffix
    of the context, then go on by a bigram table."""

    n: Draft = 10  # tokens drafted: copied, then by bigrams
    min_match: Annotated[int, Interval(1, 16)] = 1  # shortest suffix copied from
    continuation: Literal["first", "recent", "frequent"] = "first"  # occurrence that is copied
    # Continuations drafted side by side, as a tree; falcon_maxgram: deepest paths that go on.
    branches: Draft = 1
    corpus: Literal["tokens", "stream"] = "tokens"  # counted: the token cache, or texts as read
    pairs: Literal["answers", "all"] = "answers"  # bigrams that end in an answer, or every one
    # Tokens of the longest contexts that are counted, for ngram_dynamic and falcon_ngram.
    context: Annotated[int, Interval(1, LONGEST_CONTEXT)] = 6
    table: str | None = None  # folder to draft with; null: output.dir/table

    def conflicts(self) -> Iterator[str]:
        """Yield drafts of more nodes than a target reads."""
        yield from check_nodes(self, "branches", self.n * self.branches, "lower it or maxgram.n")


@dataclass(frozen=True, kw_only=True)
class CascadeSection(Section):
    """Drafters from the largest to the smallest: students, then Max-Gram (CS Drafting, arXiv
    2312.11462, Algorithm 1). Row i of `k` belongs to reviewer i (0: the target): how many tokens
    each drafter contributes to what it reviews."""

    k: tuple[tuple[Drafted, ...], ...] = ((4, 2), (0, 10))  # upper triangular
    leniency: Factor = 1.0  # l, of reviews among students
    # Tokens of a repeated suffix behind which Max-Gram drafts alone, maxgram.n; null: never.
    copy_match: Annotated[int, Interval(1, 16)] | None = None
    students: tuple[str, ...] | None = None  # folders or Hub ids; null: the recipe's own student

    @property
    def size(self) -> int:
        """How many students the cascade has."""
        return 1 if self.students is None else len(self.students)

    def conflicts(self) -> Iterator[str]:
        """Yield what keeps K from being square, upper triangular and of the right size, and a
        cascade in which no student drafts."""
        k, side = self.k, self.size + 1
        below = [(i, j) for i in range(len(k)) for j in range(min(i, len(k[i]))) if k[i][j]]
        if not self.size:
            needed = "name at least one student, or null for the recipe's own"
            yield self.complaint("students", needed)
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
