"""How much a prediction counts by its depth in the draft that it is part of.

A late token of a draft counts only where all before it are accepted. With k tokens per pass, pass r
(from 0) and offset s in a block make depth d = r * k + s + 1 of the draft begun r blocks before:

    pass 0   [ 1 2 ]                        k = 2, the draft that began at the first block
    pass 1         [ 3 4 ]
    pass 2               [ 5 6 ]

A fixed decay gives it gamma^(d - 1). D-PACE (arXiv 2605.18810, eq. 7 and 8) gives it what it adds
to the accepted length: with a_j = (1 - c) * q(t_j) + c, q as it is now, the expected length of a
draft is sum_m prod_{j <= m} a_j, whose slope in log a_d is the sum over m >= d alone. Weights are
divided by their mean over the row, so that they depend on no other row, however a step is cut.

Shapes: R passes, B rows, L input positions, N counted positions, k block size, D = R * k depths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.recipes.sections.objectives import LossSection
from specdraft.train.objectives.chunked import Weigh


@dataclass(frozen=True)
class Drafts:
    """Where the predictions of a micro-batch lie in their drafts."""

    rows: Tensor  # [N]
    positions: Tensor  # [N], input positions
    offsets: Tensor  # [N], their places within their blocks, which are whole: 0..k-1
    known: Tensor  # [N] bool, the true token is one that can be drafted
    block_size: int
    shape: torch.Size  # B, L

    def weighing(self, loss: LossSection) -> Weigh | None:
        """Return how a recipe weighs these predictions; None where all count the same."""
        if loss.pace_smoothing is not None:
            return lambda parts: self.expected(
                (-parts["hard"]).exp() * self.known, loss.pace_smoothing
            )
        if loss.depth_decay < 1:
            return lambda parts: self.decayed(loss.depth_decay, parts["hard"])
        return None

    def decayed(self, decay: float, like: Tensor) -> Tensor:
        """Return the weights of a fixed decay in (0, 1], as many as those of `like`, [R, N]."""
        depths = self._depths(len(like)).to(like.dtype)
        return self._of_mean_one(decay**depths)

    def expected(self, accepted: Tensor, smoothing: float) -> Tensor:
        """Return the weights of the expected length, [R, N].

        accepted: chance of each prediction's token [R, N]. A position without a loss (not of an
        answer, or revealed to the head) ends no draft and adds nothing to one.
        """
        reach = len(accepted) * self.block_size  # D, the room for drafts that begin or end outside
        place = self.rows, self.positions + reach
        chances = accepted.new_ones(len(accepted), self.shape[0], self.shape[1] + 2 * reach)
        chances[:, *place] = accepted + smoothing * (1.0 - accepted)
        counted = torch.zeros_like(chances[0]).index_put_(place, accepted.new_ones(()))
        depths, own = torch.arange(reach, device=accepted.device), self._depths(len(accepted))
        row = self.rows.unsqueeze(-1)
        path = (self.positions + reach - own).unsqueeze(-1) + depths  # [R, N, D]
        lengths = chances[depths // self.block_size, row, path].cumprod(-1) * counted[row, path]
        added = lengths.flip(-1).cumsum(-1).flip(-1)
        return self._of_mean_one(added.gather(-1, own.unsqueeze(-1)).squeeze(-1))

    def _depths(self, passes: int) -> Tensor:
        """The depth of each prediction, from 0: [R, N]."""
        numbers = torch.arange(passes, device=self.offsets.device).unsqueeze(1)
        return numbers * self.block_size + self.offsets

    def _of_mean_one(self, weights: Tensor) -> Tensor:
        """Divide by the mean over each row's predictions."""
        table = weights.new_zeros(self.shape)  # no atomic sums: these are the same every time
        table[self.rows, self.positions] = weights.mean(0)
        means = table.sum(1) / self.rows.bincount(minlength=self.shape[0]).clamp(min=1)
        return weights / means.clamp(min=torch.finfo(weights.dtype).tiny)[self.rows]
