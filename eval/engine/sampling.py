"""Drawing tokens: the target's warped distribution, and noise that only depends on counters.

All noise is counter-based (splitmix64, Steele et al. 2014): a pure function of a request's seed and
of where it is used, so that a request's output depends on neither its neighbours nor the device.
Two families that never share a number: `gumbel` noise per absolute position and token id, behind
plain seeded sampling and the shared-Gumbel walk, and under a seed of its own (`derive_seed`) behind
drafts that are drawn; `SeededChance`, behind the acceptance rules that reject.
"""

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1
MANY_LOGITS = 1 << 13  # logits
# Without it, `uniform(seed, position, id)` would be the number inside `gumbel`. Digits of pi.
CHANCE_SALT = 0x243F6A8885A308D3


def most_probable(logits: Tensor) -> Tensor:
    """The first largest of logits [.., V]: ids [..]."""
    # Of many, NumPy's on a CPU takes a tenth of the time of torch 2.13; to get there takes as long
    # as torch with few.
    if (
        logits.numel() > MANY_LOGITS
        and logits.device.type == "cpu"
        and logits.dtype == torch.float32
    ):
        return torch.from_numpy(np.asarray(logits.numpy().argmax(-1)))  # of [V]: a number
    return logits.argmax(-1)


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


def gumbel(seed: int, positions: Tensor, ids: Tensor | int) -> Tensor:
    """Gumbel noise [.., N] for absolute positions [..] and token ids [N], or all below a number: a
    pure function of (seed, position, id).

    The same noise on any device, for any subset of positions and ids, in any order.
    """
    if isinstance(ids, int):
        ids = torch.arange(ids, device=positions.device)
    # Mixed twice: once for (seed, position), once for the id, so that neighbours are unrelated.
    mixed = _mix_int(seed & MASK)
    start = _mix(positions ^ (mixed - (mixed >> 63 << 64)))  # as a signed number
    bits = _mix(start[..., None] ^ ids) >> 11 & (1 << 53) - 1
    # The last number would be rounded to 1, whose noise is infinite: NaN where a logit is -inf.
    level = ((bits.double() + 0.5) * 2.0**-53).clamp_(max=1 - 2.0**-53)
    return -(-level.log()).log()


def perturbed(
    logits: Tensor, position: int, seed: int, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Warped logits [V] and the noise of an absolute position: the largest is the token drawn."""
    scores = warp(logits, temperature, top_k, top_p)
    noise = gumbel(seed, torch.tensor(position, device=logits.device), len(logits))
    return scores.double() + noise


def sample(
    logits: Tensor, position: int, seed: int, temperature: float, top_k: int, top_p: float
) -> int:
    """Draw the token at an absolute position from logits [V] of the position before it."""
    return int(perturbed(logits, position, seed, temperature, top_k, top_p).argmax())


class SeededChance:
    """Choices for one step of one request: each call draws fresh noise of its own.

    The noise of a call is a pure function of (seed, start, number of the call). `start` is the
    number of committed tokens, so that every step sees fresh noise.
    """

    def __init__(self, seed: int, start: int):
        self.counters = (seed, 0, start)  # 0: drafters have another stream of `_state`
        self.calls = 0

    def choice(self, probs: Tensor) -> int:
        """Draw an index of `probs` [V] by inverse CDF, in float64; it need not sum to one.

        Never an index of probability zero; ValueError when there is no other.
        """
        # On the support alone, rounding of the cumulative sum cannot hit an impossible token.
        support = probs.nonzero().flatten()
        if not len(support):
            raise ValueError(f"nothing to choose from: all {len(probs)} probabilities are zero")
        ceilings = probs[support].double().cumsum(0)
        index = int(torch.searchsorted(ceilings, ceilings[-1] * self._uniform(), right=True))
        return int(support[min(index, len(support) - 1)])

    def accept(self, prob: float) -> bool:
        """Return true with probability `prob`: never at 0, always at 1."""
        return self._uniform() < prob

    def _uniform(self) -> float:
        self.calls += 1
        return uniform(*self.counters, self.calls)


def uniform(seed: int, *counters: int) -> float:
    """A number strictly between 0 and 1, a pure function of (seed, counters)."""
    return ((_state(seed, counters) >> 12) + 0.5) * 2.0**-52


def derive_seed(seed: int, *counters: int) -> int:
    """A seed for `gumbel` noise of its own, a pure function of (seed, counters)."""
    return _state(seed, counters) - (1 << 63)  # as a signed number


def _state(seed: int, counters: tuple[int, ...]) -> int:
    state = _mix_int(seed ^ CHANCE_SALT)
    for counter in counters:
        state = _mix_int(state ^ counter)
    return state


def _mix_int(x: int) -> int:
    """splitmix64 on a Python int, modulo 2**64: what `_mix` does, without a tensor."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def _mix(x: Tensor) -> Tensor:
    """splitmix64 on int64, whose arithmetic wraps; the shifts have to be made logical."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)
