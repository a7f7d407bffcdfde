"""A user's own model, decoded as a target of ours for as long as it stays as it is.

The model is not touched: a copy of its structure shares its tensors. The copy, its decoder and the
drafter are kept from call to call, until the model's tensors move or its modules change.
"""

import weakref
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.families.support import position_limit
from specdraft.eval.generation.generate_call import GenerateCall
from specdraft.models.target import Target

MakeDrafter = Callable[[Target, int, int], Drafter | None]  # of a target, rows and capacity
# Slots of a row: a conversation that goes on needs a new drafter once in so many tokens.
BLOCK = 256
# Of a module: what torch keeps there, and whether it trains, which a copy does not.
IGNORED = {*vars(nn.Module())}


class BorrowedModel:
    """A copy of a model's structure over the model's own tensors, and a decoder over that."""

    def __init__(self, model: PreTrainedModel, make_drafter: MakeDrafter):
        self._model, self._state = weakref.ref(model), _state(model)
        self.target, self.make_drafter = Target.of_model(model), make_drafter
        self._decoder: Decoder | None = None
        self._capacity = 0

    def is_of(self, model: PreTrainedModel) -> bool:
        same = self._model() is model and self._state == _state(model)
        return same and not self.target.prepacked.have_missed_a_change()

    def decoder(self, call: GenerateCall) -> Decoder:
        """A decoder with a row for every request of a call; the last one, where it is enough."""
        rows = len(call.requests)
        needed = max(len(request.prompt) + request.max_new_tokens for request in call.requests)
        if self._decoder is None or len(self._decoder.rows) < rows or self._capacity < needed:
            capacity = -(-needed // BLOCK) * BLOCK
            drafter = self.make_drafter(self.target, rows, capacity)
            spare = drafter.max_nodes if drafter else 0
            if (limit := position_limit(self.target)) is not None:
                if needed <= limit < needed + spare:  # no positions for drafts: plain, this once
                    return Decoder(self.target, None, rows, needed)
                capacity = max(needed, min(capacity, limit - spare))
            self._decoder = Decoder(self.target, drafter, rows, capacity + spare)
            self._capacity = capacity  # not before: what is refused leaves all as it was
        return self._decoder


def _state(model: PreTrainedModel) -> list:
    """What a copy of a model's structure would have to be made again for: where its tensors lie,
    and what its modules do with them (an adapter is disabled or merged, a hook comes or goes)."""
    found: list = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    found.append(repr(model.config.to_dict()))  # which layers read as they run
    for module in model.modules():
        own = vars(module)
        found += ([*own["_forward_hooks"]], [*own["_forward_pre_hooks"]])
        found += ((k, repr(v)) for k, v in own.items() if k not in IGNORED and _is_plain(v))
    return found


def _is_plain(value: object) -> bool:
    """Whether a value is a setting: of numbers, text and what holds them."""
    if isinstance(value, dict | list | tuple | set):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str)
