"""How a student drafts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

from specdraft.recipes.fields import (
    LARGEST_TREE,
    Draft,
    Fraction,
    Interval,
    Natural,
    Section,
)

Nodes = Annotated[int, Interval(1, LARGEST_TREE)]
Copies = Annotated[int, Interval(0, LARGEST_TREE)]


@dataclass(frozen=True, kw_only=True)
class DraftingSection(Section):
    """How a student drafts: paths, trees and merged graphs (SSD, TSD, GSD: ACL Findings 2024),
    trees drawn without replacement (RSD, arXiv 2402.14160) and i.i.d. (SpecInfer, arXiv 2305.09781;
    SpecTr, arXiv 2310.15141). Every key names the methods that read it; sizes are in nodes."""

    gamma: Draft = 5  # ssd, rsd_s, spectr: tokens of a path
    depth: Draft = 10  # tsd, gsd: levels
    out_degree: Draft = 4  # tsd, gsd: children of a node
    theta_prob: Fraction = 0.2  # ssd, tsd, gsd: a less probable token ends its path; 0: none does
    theta_sib: Fraction = 0.3  # tsd, gsd: so does one less probable than this share of its best
    sibling_pruning: Literal["leaf", "drop"] = "leaf"  # sibling; drop: it is not even added
    max_nodes: Nodes = 256  # tsd, gsd: nodes of a draft, copies not counted
    tau: Natural = 2  # gsd: tokens after which paths that agree share what follows
    max_copies: Copies = 100  # gsd: nodes copied before verification
    branching: tuple[Draft, ...] = (2, 2, 2, 1, 1)  # rsd_c, specinfer: children by depth
    equal_siblings: Literal["merged", "apart"] = "merged"  # specinfer: share children, or have own
    beam_width: Draft = 4  # rsd_s: nodes of a level
    chains: Draft = 4  # spectr

    def conflicts(self) -> Iterator[str]:
        """A tree that is one, and of a size that a target can read."""
        if not self.branching:
            yield self.complaint("branching", "give the children by depth, e.g. [2, 2, 1]")
        yield from self.check_nodes(
            "branching",
            sum(accumulate(self.branching, lambda a, b: min(a * b, 10**9))),
            "lower some factors or leave out the last",
        )
        for key in ("beam_width", "chains"):
            nodes = self.gamma * getattr(self, key)
            yield from self.check_nodes(key, nodes, "lower it or drafting.gamma")
