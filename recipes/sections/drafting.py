"""How a student drafts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal

from specdraft.recipes.fields import Count, Fraction, Natural, Section

LARGEST_TREE = 4096  # nodes drafted by branching factors


@dataclass(frozen=True, kw_only=True)
class DraftingSection(Section):
    """How a student drafts: paths, trees and merged graphs (SSD, TSD, GSD: ACL Findings 2024),
    trees drawn without replacement (RSD, arXiv 2402.14160) and i.i.d. (SpecInfer, arXiv 2305.09781;
    SpecTr, arXiv 2310.15141). Every key names the methods that read it; sizes are in nodes."""

    gamma: Count = 5  # ssd, rsd_s, spectr: tokens of a path
    depth: Count = 10  # tsd, gsd: levels
    out_degree: Count = 4  # tsd, gsd: children of a node
    theta_prob: Fraction = 0.2  # ssd, tsd, gsd: a less probable token ends its path; 0: none does
    theta_sib: Fraction = 0.3  # tsd, gsd: so does one less probable than this share of its best
    sibling_pruning: Literal["leaf", "drop"] = "leaf"  # sibling; drop: it is not even added
    max_nodes: Count = 256  # tsd, gsd: nodes of a draft, copies not counted
    tau: Natural = 2  # gsd: tokens after which paths that agree share what follows
    max_copies: Natural = 100  # gsd: nodes copied before verification
    branching: tuple[Count, ...] = (2, 2, 2, 1, 1)  # rsd_c, specinfer: children by depth
    equal_siblings: Literal["merged", "apart"] = "merged"  # specinfer: share children, or have own
    beam_width: Count = 4  # rsd_s: nodes of a level
    chains: Count = 4  # spectr

    def conflicts(self) -> Iterator[str]:
        """A tree that is one, and of a size that a target can read."""
        nodes = sum(accumulate(self.branching, mul))
        if not nodes:
            yield self.complaint("branching", "give the children by depth, e.g. [2, 2, 1]")
        if nodes > LARGEST_TREE:
            yield self.complaint(
                "branching",
                f"makes {nodes} nodes, at most {LARGEST_TREE}; "
                "lower some factors or leave out the last",
            )
