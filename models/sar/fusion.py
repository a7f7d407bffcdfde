"""The fusion of a Falcon head: from pairs of token and feature to one vector per position.

A fusion reads sequences from left to right and may carry a state from position to position. Each
says how it goes on from the middle of what it has read: drafting resumes after the last accepted
token, and a rollout in training continues from the end of every block at once. A third one is a
class with `Fusion`'s methods, and its name in FUSIONS.

`nn.LSTM` returns the state at the end only. Ours keeps it at every position: a plain loop over time
with a hand-written backward (no graph per step, one matmul for the recurrent weight) gives that,
and on small drafts it is faster, too. Gate order: input, forget, output, cell. Its state is float32
whatever the autocast dtype is: it adds up over the whole sequence.

Shapes: S sequences, T time, D input width, H hidden, L layers.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models.weights.prepacked import Packable

State = tuple[Tensor, ...]  # before a position, each [L, S, H]; empty where nothing is carried


class Fusion(Protocol):
    """What a head asks of its fusion; made from the widths D and H."""

    KEPT: int  # floats that training keeps for backward per position, in units of H

    def start(self, sequences: int, device: torch.device) -> State:
        """Return the state before the first position, each [L, S, H]."""

    def __call__(self, inputs: Tensor, state: State = ()) -> tuple[Tensor, State]:
        """Read [S, T, D], from `state` or, where it is empty, from the start; return what is fused
        [S, T, H] and the state after every position, each [L, S, T, H]."""


class LinearFusion(nn.Linear, Packable):
    """One matrix, as in EAGLE-1; carries nothing."""

    KEPT = 1

    def __init__(self, inputs: int, hidden: int):
        super().__init__(inputs, hidden, bias=False)

    def start(self, sequences: int, device: torch.device) -> State:
        return ()

    def forward(self, inputs: Tensor, state: State = ()) -> tuple[Tensor, State]:
        return self.linear(inputs, self.weight, self.bias), ()

    def brought(self, ahead: Tensor) -> Tensor:
        """What tokens bring to it, [.., H] both: all that does not depend on the features."""
        return F.linear(ahead, self.weight[:, : ahead.shape[-1]], self.bias)

    def joins(self, brought: Tensor, features: Tensor) -> Tensor:
        """The same as the call, of N positions' features and what their tokens have `brought`,
        [N, H] each: what is fused [N, H]."""
        return torch.addmm(brought, features, self.weight[:, -features.shape[-1] :].T)


class BiasedFusion(LinearFusion):
    """The same with a bias, as EAGLE-1's published heads have it; none is trained here."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__(inputs, hidden)
        self.bias = nn.Parameter(torch.zeros(hidden))


def recur(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[list, list, list]:
    """h_t, c_t and what backward needs, of every t, from the input's share of the gates
    [T, S, 4H], the recurrent weight [4H, H] and the state [S, H] before t = 0."""
    size, weight_t = h.shape[-1], weight.t()
    hidden, cell, saved = [], [], []
    for step in gates.unbind():
        raw = torch.addmm(step, h, weight_t)
        i, f, o, g = raw.split(size, 1)
        raw[:, : 3 * size].sigmoid_()
        g.tanh_()
        c = torch.addcmul(f * c, i, g)
        squashed = c.tanh()
        h = o * squashed
        hidden.append(h)
        cell.append(c)
        saved.append((i, f, o, g, squashed))
    return hidden, cell, saved


class Recurrence(torch.autograd.Function):
    """`recur` with its backward; hidden and cell come as [T, S, H]."""

    @staticmethod
    def forward(ctx, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor):
        hidden, cell, ctx.steps = recur(gates, weight, h, c)
        before = (torch.stack([h, *hidden[:-1]]), torch.stack([c, *cell[:-1]]))
        ctx.save_for_backward(weight, *before)
        return torch.stack(hidden), torch.stack(cell)

    @staticmethod
    def backward(ctx, d_hidden: Tensor, d_cell: Tensor):
        weight, hidden, cell = ctx.saved_tensors
        d_gates = hidden.new_empty(*hidden.shape[:2], weight.shape[0])
        dh, dc = torch.zeros_like(hidden[0]), torch.zeros_like(cell[0])
        for t in range(len(hidden) - 1, -1, -1):
            i, f, o, g, squashed = ctx.steps[t]
            dh = dh + d_hidden[t]
            dc = dc + d_cell[t] + dh * o * (1 - squashed * squashed)
            di, df, do, dg = d_gates[t].chunk(4, 1)
            torch.mul(dc * g, i * (1 - i), out=di)
            torch.mul(dc * cell[t], f * (1 - f), out=df)
            torch.mul(dh * squashed, o * (1 - o), out=do)
            torch.mul(dc * i, 1 - g * g, out=dg)
            dh, dc = d_gates[t] @ weight, dc * f
        d_weight = d_gates.flatten(0, 1).t() @ hidden.flatten(0, 1)
        return d_gates, d_weight, dh, dc


class LSTM(nn.Module):
    """Layers of LSTM, two in the paper; carries hidden and cell state."""

    KEPT = 15  # per layer gates 4H, tanh of the cell H, states before 2H; H between the two

    def __init__(self, inputs: int, hidden: int, layers: int = 2):
        super().__init__()
        self.hidden = hidden
        self.input = nn.ModuleList(
            nn.Linear(inputs if n == 0 else hidden, 4 * hidden) for n in range(layers)
        )
        self.recurrent = nn.ParameterList(
            nn.Parameter(torch.empty(4 * hidden, hidden)) for _ in range(layers)
        )
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def start(self, sequences: int, device: torch.device) -> State:
        shape = (len(self.recurrent), sequences, self.hidden)
        zero = torch.zeros(shape, device=device, dtype=torch.float32)
        return zero, zero

    def forward(self, inputs: Tensor, state: State = ()) -> tuple[Tensor, State]:
        before_h, before_c = state or self.start(len(inputs), inputs.device)
        hidden, cell = [], []
        for n, (project, weight) in enumerate(zip(self.input, self.recurrent, strict=True)):
            gates = project(inputs).transpose(0, 1).to(weight.dtype)  # [T, S, 4H]
            if torch.is_grad_enabled():
                h, c = Recurrence.apply(gates, weight, before_h[n], before_c[n])
                inputs, c = h.transpose(0, 1), c.transpose(0, 1)
            else:
                h, c, _ = recur(gates, weight, before_h[n], before_c[n])
                inputs, c = torch.stack(h, 1), torch.stack(c, 1)
            hidden.append(inputs)
            cell.append(c)
        hidden, cell = torch.stack(hidden), torch.stack(cell)
        return hidden[-1], (hidden, cell)


FUSIONS: dict[str, type[Fusion]] = {
    "lstm": LSTM,
    "linear": LinearFusion,
    "biased": BiasedFusion,
}
