"""What a family does to logits after lm_head: scale them (Cohere, Granite), cap them (Gemma 2).

    p(. | t_<=i) = softmax(finish(lm_head(f_i)))    finish(z) = c tanh(s z / c); without c, s z

Names and directions of the settings differ from family to family (a `logits_scaling` divides in
Granite and multiplies in HyperCLOVA X), so the model is asked: its own forward runs with stand-ins
for its layers and for its lm_head, which says known numbers.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdraft.models.families.encoder_decoder import base_of, is_encoder_decoder

_LARGE, _SMALL = 1e6, 2.0**-10  # where a cap is all there is, and where it is not felt
_ASKED = (_LARGE, -_LARGE, _SMALL, 0.0, *range(-64, 65, 8))


class Finish(NamedTuple):
    """What comes after lm_head, elementwise."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """lm_head's output [..] to logits [..]; the same tensor where there is nothing to do."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def back(self, slope: Tensor, logits: Tensor) -> Tensor:
        """Carry a slope in the finished logits [..] back to lm_head's output."""
        if self.scale != 1.0:
            slope = slope * self.scale
        return slope if self.cap is None else slope * (1.0 - (logits / self.cap).square())


PLAIN = Finish()


def finish_of(model: PreTrainedModel) -> Finish:
    """Ask a model, its weights or not, what it does after lm_head; PLAIN where it does not tell."""
    bases, asking = [model.base_model], {}
    if is_encoder_decoder(model.config):  # T5's is its own base model
        bases += [model.get_encoder(), base_of(model)]
        asking["decoder_input_ids"] = torch.zeros(1, 1, dtype=torch.long)
    stand_ins = {id(base): _Base() for base in bases}
    stand_ins[id(model.get_output_embeddings())] = _Head()
    view = copy.copy(model)  # its children are replaced in the copy alone
    view._modules = {n: stand_ins.get(id(part), part) for n, part in model._modules.items()}
    asked = torch.tensor(_ASKED)
    try:
        ids = torch.zeros(1, 1, dtype=torch.long)
        # Of the class: launchers hang a forward of their own on the object.
        said = type(model).forward(view, input_ids=ids, use_cache=False, **asking).logits
        said = said.flatten().float()
        large, small = float(said[0]) / _LARGE, float(said[2]) / _SMALL
        finish = Finish(large)
        if abs(large - small) > 1e-3 * abs(small):
            finish = Finish(1.0 if abs(small - 1.0) < 1e-3 else small, float(said[0]))
        torch.testing.assert_close(finish(asked), said, rtol=1e-3, atol=1e-6)
    except Exception:  # modelling code raises what it likes; the real logits are compared later
        return PLAIN
    return finish


class _Output(tuple):
    """One feature of one number, and None for whatever else an output may hold."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _Base(nn.Module):
    """Stands for all layers."""

    def forward(self, *_, **__) -> _Output:
        return _Output((torch.ones(1, 1, 1),))


class _Head(nn.Module):
    """Stands for lm_head: says what is asked, times the feature."""

    def forward(self, feature: Tensor) -> Tensor:
        return feature * torch.tensor(_ASKED)
