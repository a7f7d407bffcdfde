"""Draft a static tree with Medusa heads, in one pass.

The feature of the last token that the target has read, f_n, gives one distribution per depth:
head h drafts t_{n+1+h} behind the last committed token t_{n+1}. It does not depend on the path, so
nodes of one depth share their distribution and, where tokens are drawn, the draw.

Shapes: R rows, D heads used (depth of the tree), H hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.eval.drafters.drawing import REJECTION_RULES, draw, draws_of
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.tree import Tree
from specdraft.models.medusa import MedusaHeads
from specdraft.models.target import Target


@dataclass
class Memory:
    """What one row drafts from."""

    request: Request
    read: int = 0  # tokens that the target has read
    feature: Tensor | None = None  # [H], of the last of them


class MedusaDrafter:
    """A `Drafter` around Medusa heads: all rows in one batch, no cache."""

    from_tokens = False

    def __init__(self, heads: MedusaHeads, target: Target, tree: StaticTree, rows: int = 1):
        heads.check_target(target.identity())
        tree.check_vocabulary(target)
        self.depth = tree.topology.depth
        if self.depth > heads.config.heads or len(tree.passes) > 1:
            raise ValueError(
                f"a tree {self.depth} deep, cut into {len(tree.passes)} passes, for "
                f"{heads.config.heads} Medusa heads; give one no deeper, with its depth as block "
                "size"
            )
        self.heads = heads.to(target.device).eval()
        self.target, self.tree = target, tree
        self.choices = tree.choices.to(target.device)
        self.depths = torch.arange(1, self.depth + 1, device=target.device)
        self.lm_heads = None
        if heads.lm_heads is not None:  # as precise as the target's own
            self.lm_heads = heads.lm_heads.detach()[: self.depth].to(target.dtype)
        self.memory: list[Memory | None] = [None] * rows
        self.forwards, self.seconds, self.max_nodes = 0, 0.0, len(tree.paths)
        self.rules = REJECTION_RULES if tree.topology.is_chain else REJECTION_RULES - {"block"}
        self._no_draft = Tree.empty(target.device)

    # -- the Drafter protocol --------------------------------------------------------------------

    def start(self, row: int, request: Request) -> None:
        self.memory[row] = Memory(request)

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        memory = self.memory[row]
        memory.read += len(features)
        memory.feature = features[-1]

    def move(self, row: int, to: int) -> None:
        self.memory[to] = self.memory[row]

    def draft(self, rows: list[int]) -> list[Tree]:
        """Draft the static tree for each row; an empty one before the first feature."""
        able = [row for row in rows if self.memory[row].feature is not None]
        trees = {}
        if able:
            scores = self.scores(torch.stack([self.memory[row].feature for row in able]))
            self.forwards += len(able)
            trees = {
                row: self._tree(self.memory[row], part)
                for row, part in zip(able, scores, strict=True)
            }
        return [trees.get(row, self._no_draft) for row in rows]

    # -- drafting --------------------------------------------------------------------------------

    def scores(self, features: Tensor) -> Tensor:
        """Logits of every depth behind features [R, H]: [R, D, V]."""
        with Stopwatch() as watch:
            hidden = self.heads.hidden(features.float(), self.depth)  # [D, R, H]
            hidden, own = hidden.to(self.target.dtype), self.lm_heads is not None
            scores = (
                self.target.finish(hidden @ self.lm_heads.mT) if own else self.target.logits(hidden)
            )
        self.seconds += watch.seconds
        return scores.transpose(0, 1)

    def _tree(self, memory: Memory, scores: Tensor) -> Tree:
        positions, width = memory.read + self.depths, self.tree.passes[0].rounds[0].width
        tokens, law = draw(scores, memory.request, positions, (memory.read,), width)
        drawn = draws_of(memory.request, () if law is None else (law,), self.tree.sources)
        return Tree(self.tree.topology, tokens.flatten()[self.choices], drawn)
