"""What a run has trained that drafts static trees, and how right it is in texts.

Shapes: D depths, W ranks.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specdraft.eval.costing.replay import Ranks
from specdraft.eval.costing.tree_growth import Texts, medusa_rank_traces, rank_traces, shares_of
from specdraft.eval.methods.setup import tree_method
from specdraft.eval.methods.trained import KINDS, Trained
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.medusa import MedusaHeads
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe

DEEPEST = 16  # depths of a head's drafts that are looked at


@dataclass(frozen=True)
class TreeDrafter:
    """What a run has trained that drafts static trees."""

    method: str  # that decodes with its trees
    trained: Trained
    block_size: int  # depths of a pass
    coupled: bool  # whether every node with children has a distribution of its own
    deepest: int  # depths that are looked at
    drafted: int | None = None  # size of its draft vocabulary; None: the target's

    @classmethod
    def of_run(cls, recipe: Recipe, target: Target) -> "TreeDrafter":
        """The recipe's Medusa heads, or its head. Raises HeadError where nothing is trained."""
        kind, run = "medusa" if recipe.medusa.given else "head", Path(recipe.output.dir)
        part = KINDS[kind].load(recipe, target, run)
        trained = Trained(**{kind: part})
        if kind == "medusa":
            return cls("medusa_tree", trained, part.config.heads, False, part.config.heads)
        config = part.config
        method = tree_method(config)
        coupled = config.coupling != "none"
        return cls(method, trained, config.block_size, coupled, DEEPEST, config.draft_vocab)

    @property
    def part(self) -> FalconHead | Eagle3Head | MedusaHeads:
        """The network."""
        return self.trained.head or self.trained.medusa

    def right(self, target: Target, texts: Texts) -> tuple[Ranks, Tensor]:
        """How right its drafts are in texts: the rank of each true token in a draft before it, and
        the shares [D, W] of the ranks by depth."""
        ranks_of = rank_traces if self.trained.head else medusa_rank_traces
        traces = ranks_of(self.part, target, texts, self.deepest)
        return Ranks(texts, traces), shares_of(traces, texts, self.drafted)
