"""The optimiser a recipe names: AdamW, or Muon for matrices with AdamW for what is none.

Muon (Jordan et al., 2024) makes the momentum of a weight matrix orthogonal before it is taken as
the update, so that no direction of the matrix is left behind. In torch's form the update is scaled
as AdamW's are (arXiv 2502.16982): one learning rate serves both. Rows of a vocabulary or
of positions are no directions of a hidden space: embeddings and lm_heads are AdamW's, as are norms
and stacks of matrices. (Muon for each matrix of Medusa's stack brought its heads nothing.)
"""

from collections.abc import Callable

import torch
from torch import nn

from specdraft.recipes.sections.training import OptimSection
from specdraft.train.fit.muon import Float32Muon


def make_optimizer(
    drafter: nn.Module, optim: OptimSection, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimiser of what is trained of a drafter."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    common = {"lr": optim.lr, "weight_decay": optim.weight_decay}

    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        fused = device.type in ("cuda", "cpu")  # 2.4 ms of a million weights on a CPU, not 8.7
        return torch.optim.AdamW(parameters, betas=optim.betas, fused=fused, **common)

    if optim.name == "adamw":
        return adamw(trained)
    config = getattr(drafter, "config", None) or drafter.model.config.get_text_config()
    vocabulary = config.vocab_size
    heads = {id(one) for name, one in drafter.named_parameters() if "lm_head" in name}
    tables = {id(one.weight) for one in drafter.modules() if isinstance(one, nn.Embedding)}
    matrices = [
        one
        for one in trained
        if one.ndim == 2 and vocabulary not in one.shape and id(one) not in heads | tables
    ]
    chosen = {id(one) for one in matrices}
    others = [one for one in trained if id(one) not in chosen]
    parts = [adamw(others)] if others else []
    if matrices:
        muon = Float32Muon if device.type == "cpu" else torch.optim.Muon
        parts.append(muon(matrices, adjust_lr_fn="match_rms_adamw", **common))
    return Together(parts)


class Together(torch.optim.Optimizer):
    """Optimisers of different parameters that step as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
