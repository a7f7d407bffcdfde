"""Which drafted tokens are accepted. Every rule here leaves the target's distribution unchanged.

Greedy walk: follow the child that equals the target's argmax. Shared-Gumbel walk: the target's
token at absolute position i is argmax(log p + G), with noise G a pure function of (request seed,
i); following the child that equals it, whatever the drafter did, gives exactly what plain seeded
sampling gives. `p` is the softmax of the logits after temperature, top-k and top-p, in this order
(that of transformers).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdraft.eval.tree import Topology


def walk(
    topology: Topology, tokens: Sequence[int], pick: Callable[[int], int]
) -> tuple[list[int], int]:
    """Follow the target's own tokens through a drafted tree.

    tokens: of all N nodes, the root included. pick(node): the target's token after that node.
    Returns the accepted nodes, the root first, and the bonus token.
    """
    path = [0]
    while True:
        wanted = pick(path[-1])
        match = (child for child in topology.children[path[-1]] if tokens[child] == wanted)
        child = next(match, None)
        if child is None:
            return path, wanted
        path.append(child)


def warp(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits [.., V] after temperature, top-k, top-p; what is cut is -inf."""
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        worst = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < worst, float("-inf"))
    if top_p < 1.0:
        # As transformers: from the least probable up, cut while the sum stays within 1 - top_p.
        ascending, order = logits.sort(dim=-1)
        cut = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        cut[..., -1] = False
        logits = logits.masked_fill(cut.scatter(-1, order, cut), float("-inf"))
    return logits


def gumbel(seed: int, positions: Tensor, size: int) -> Tensor:
    """Gumbel noise [.., V] for absolute positions [..], a pure function of (seed, position, id).

    A counter-based generator (the finaliser of splitmix64, Steele et al. 2014) instead of a
    stateful one: the same noise on any device, for any subset of positions, in any order.
    """
    ids = torch.arange(size, device=positions.device)
    # Mixed twice: once for (seed, position), once for the id, so that neighbours are unrelated.
    start = _mix(_mix(torch.full_like(positions, seed)) ^ positions)
    bits = _mix(start[..., None] ^ ids) >> 11 & (1 << 53) - 1
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mix(x: Tensor) -> Tensor:
    """splitmix64 on int64, whose arithmetic wraps; the shifts have to be made logical."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)


def sample(
    logits: Tensor, position: int, seed: int, temperature: float, top_k: int, top_p: float
) -> int:
    """Draw the token at an absolute position from logits [V] of the position before it."""
    scores = warp(logits, temperature, top_k, top_p)
    noise = gumbel(seed, torch.tensor(position, device=logits.device), len(logits))
    return int((scores.double() + noise).argmax())
