"""What the slots of a block read: the queries of a semi-autoregressive head's decoder layers.

A block of K positions drafts K tokens, one per slot; its last position is the newest, behind which
drafting goes on. Left to its own input, slot 0 predicts the first token from what is K - 1 tokens
old. With y the fused inputs of a block, whose last is y_end, a query u_s and an output h_s are

    own      u_s = y_s                                        h_s = layers(u_s), as in Falcon
    both     u_s = y_end + W_s [y_s; y_end]                   h_s = layers(u_s)
    newest   u = y_end, one query for the whole block         h_s = layers(u) + W_s layers(u)

W_s is zero at the start, and W_0 of `newest` always. With `own`, keys and values of a layer are
of its queries; else of the fused inputs y, so that what is cached depends on no block's alignment.

Shapes: .. any, K block size, Q queries of a block (K or 1), H hidden.
"""

import torch
from torch import Tensor, nn

from specdraft.models.weights.prepacked import Packable


class Own(nn.Module, Packable):
    """Each slot reads its own input: Falcon's head."""

    def __init__(self, width: int, block_size: int):
        super().__init__()
        self.reach = block_size  # Q: how many of a block's newest inputs become queries

    def queries(self, fused: Tensor) -> Tensor:
        """Fused inputs of a block [.., K, H], or the last Q of them, to queries [.., Q, H]."""
        return fused

    def slots(self, hidden: Tensor) -> Tensor:
        """What the layers make of the queries [.., Q, H] to an output for each slot [.., K, H]."""
        return hidden


class Both(Own):
    """Each slot reads its own input and the newest."""

    def __init__(self, width: int, block_size: int):
        super().__init__(width, block_size)
        # The matrices of all slots, one below the other: one matrix for an optimiser.
        self.weight = nn.Parameter(torch.zeros(block_size * width, 2 * width))

    def queries(self, fused: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, fused.shape[-2:])  # [K, H, 2H]
        newest = fused[..., -1:, :]
        pairs = torch.cat((fused, newest.expand_as(fused)), -1).flatten(0, -3)  # [.., K, 2H]
        mixed = pairs.transpose(0, 1) @ weight.mT  # [K, .., H]: a slot, a matrix
        return newest + mixed.transpose(0, 1).view_as(fused)


class Newest(Own):
    """One query reads the newest input for all slots: the cheapest pass there is."""

    def __init__(self, width: int, block_size: int):
        super().__init__(width, 1)
        self.weight = nn.Parameter(torch.zeros((block_size - 1) * width, width))

    def queries(self, fused: Tensor) -> Tensor:
        return fused[..., -1:, :]

    def slots(self, hidden: Tensor) -> Tensor:
        moved = self.linear(hidden, self.weight)  # [.., 1, (K - 1) * H]
        later = hidden + moved.unflatten(-1, (-1, hidden.shape[-1])).squeeze(-3)
        return torch.cat((hidden, later), -2)


READINGS: dict[str, type[Own]] = {"own": Own, "both": Both, "newest": Newest}
