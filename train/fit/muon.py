"""Muon whose products are as precise as the weights.

torch's multiplies in bfloat16. A CPU without units for it does that in software, several times as
slowly: a step of recipes/tiny_eagle.yaml takes half the time this way (AVX2, one thread).
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor


class Float32Muon(torch.optim.Muon):
    """torch's Muon, its state and its settings, with updates scaled as AdamW's ("match_rms_adamw")
    and products in float32."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict) -> None:
        gradient, state, lr = weight.grad, self.state[weight], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        update = orthogonal(ahead.float(), *how)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update, alpha=-0.2 * lr * sqrt(max(weight.shape)))


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7
) -> Tensor:
    """Return a matrix [A, B] with the singular vectors of another and singular values near 1.

    A step of the Newton-Schulz iteration turns each singular value s into a s + b s^3 + c s^5,
    given the coefficients a, b and c; from (0, 1] a few steps bring it near 1 (Jordan et al., 2024,
    "Muon: An optimizer for hidden layers in neural networks").
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)  # of Frobenius: no singular value is above 1
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x
