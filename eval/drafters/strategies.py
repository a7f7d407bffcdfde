"""The drafter of every method that drafts with a student, by the method's name."""

from specdraft.eval.drafters.beam import StochasticBeam
from specdraft.eval.drafters.branching import Branching
from specdraft.eval.drafters.gsd import GSD
from specdraft.eval.drafters.level import TSD
from specdraft.eval.drafters.lm import SSD, LMDrafter
from specdraft.models.target import Target
from specdraft.recipes.methods import STUDENT_METHODS
from specdraft.recipes.schema import DraftingSection


def make_strategy(
    name: str, drafting: DraftingSection, student: Target, rows: int, capacity: int
) -> LMDrafter:
    """Build the drafter of a method; ValueError for one that does not draft with a student."""
    place, gamma = (student, rows, capacity), drafting.gamma
    match name:
        case "ssd":
            return SSD(*place, gamma, drafting.theta_prob)
        case "tsd":
            return TSD(*place, **pruned(drafting))
        case "gsd":
            return GSD(*place, drafting.tau, drafting.max_copies, **pruned(drafting))
        case "rsd_c":
            return Branching(*place, drafting.branching)
        case "specinfer":
            return Branching(*place, drafting.branching, drafting.equal_siblings == "merged")
        case "rsd_s":
            return StochasticBeam(*place, gamma, drafting.beam_width)
        case "spectr":
            return Branching(*place, (drafting.chains, *[1] * (gamma - 1)))
    raise ValueError(f"{name} does not draft with a student; {', '.join(STUDENT_METHODS)} do")


def pruned(drafting: DraftingSection) -> dict:
    """What a recipe says of the trees that are pruned, as TSD and GSD take it."""
    return {
        "depth": drafting.depth,
        "out_degree": drafting.out_degree,
        "theta_prob": drafting.theta_prob,
        "theta_sib": drafting.theta_sib,
        "drop_siblings": drafting.sibling_pruning == "drop",
        "nodes": drafting.max_nodes,
    }
