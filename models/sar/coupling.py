"""How the slots of a block know each other: slot s hears which token slot s - 1 has drafted.

Without it the tokens of a block are chosen blind to each other. With h^_s a slot's output and x_s
the token drafted before it,

    markov      h_s = h^_s + D A e(x_s), A: H -> H/4: a low-rank bigram bias through the lm_head, as
                the Markov head of DSpark
    recurrent   h_0 = h^_0; z = [h^_s; h_(s-1); e(x_s)]; h_s = h^_s + D (silu(G z) * U z)

D is zero at the start, so that training begins without coupling. In training x_s is the true token:
that is the very condition when drafting, where only accepted prefixes matter.

What depends on x_s alone, D A e(x_s) or the last third of G z and U z, is what a slot `hears`.
Where few tokens may be drafted it is kept of each: a draft no longer reads a third of the cell.

Shapes: .. any, H hidden, W width of what is heard.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Coupling(Protocol):
    """What a head asks of it; made from H."""

    def __call__(self, hidden: Tensor, before: Tensor, token: Tensor) -> Tensor:
        """A slot's output, the coupled one of the slot before, and the embedding of the token
        drafted from that, each [.., H], at unit scale; returns what the slot predicts [.., H]."""

    def heard(self, token: Tensor) -> Tensor:
        """What a slot hears of the token before, [.., H] to [.., W]."""

    def hears(self, hidden: Tensor, before: Tensor, heard: Tensor) -> Tensor:
        """The same as the call, of N slots [N, H] and what is `heard` [N, W] of the tokens."""


class Markov(nn.Module):
    """A low-rank bias from the token alone."""

    def __init__(self, width: int):
        super().__init__()
        self.down = nn.Linear(width, max(1, width // 4), bias=False)
        self.up = nn.Linear(max(1, width // 4), width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor, before: Tensor, token: Tensor) -> Tensor:
        return hidden + self.heard(token)

    def heard(self, token: Tensor) -> Tensor:
        return self.up(self.down(token))

    def hears(self, hidden: Tensor, before: Tensor, heard: Tensor) -> Tensor:
        return hidden + heard


class Recurrent(nn.Module):
    """A gated cell that all slots share."""

    def __init__(self, width: int):
        super().__init__()
        self.gate_up = nn.Linear(3 * width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden: Tensor, before: Tensor, token: Tensor) -> Tensor:
        return hidden + self.down(_gated(self.gate_up(torch.cat((hidden, before, token), -1))))

    def heard(self, token: Tensor) -> Tensor:
        return F.linear(token, self.gate_up.weight[:, -token.shape[-1] :])

    def hears(self, hidden: Tensor, before: Tensor, heard: Tensor) -> Tensor:
        slots = self.gate_up.weight[:, : 2 * hidden.shape[-1]]
        gates = torch.addmm(heard, torch.cat((hidden, before), -1), slots.T)
        return hidden + self.down(_gated(gates))


def _gated(gates: Tensor) -> Tensor:
    gate, up = gates.chunk(2, -1)
    return F.silu(gate) * up


COUPLINGS: dict[str, type[Coupling] | None] = {
    "none": None,
    "markov": Markov,
    "recurrent": Recurrent,
}
