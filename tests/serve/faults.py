"""Eight faults planted in a drafter's computation, each a context manager that is open while it
drafts. They are what goes wrong when an engine serves a head that it was not made for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.models.target import Target

Change = Callable[[Tensor], Tensor]


@contextmanager
def changed_weight(parameter: nn.Parameter, change: Change) -> Iterator[None]:
    kept = parameter.data
    parameter.data = change(kept.clone())
    try:
        yield
    finally:
        parameter.data = kept


def without_norm(drafter: FalconDrafter):
    return changed_weight(drafter.head.layers[0].mlp_norm, torch.ones_like)


def transposed(drafter: FalconDrafter):
    """Swap the query and key weights."""
    layer = drafter.head.layers[0]
    width = layer.heads[0] * layer.dim

    def swap(weight: Tensor) -> Tensor:
        query, key, value = weight.split([width, width, len(weight) - 2 * width])
        return torch.cat((key, query, value))

    return changed_weight(layer.qkv.weight, swap)


def features_from(place: Callable[[Target, Tensor], Tensor]):
    """Features from another place in the target, computed from the tokens that were read."""

    def fault(drafter: FalconDrafter):
        observe = drafter.observe

        def other(row: int, tokens: list[int], features: Tensor) -> None:
            prompt = drafter.memory[row].request.prompt
            ids = torch.tensor([list(prompt)])[:, : len(tokens)]
            if drafter.feature_layers:  # EAGLE-3's layers, each one early
                states = drafter.target.model.base_model(ids, output_hidden_states=True)
                width = drafter.target.hidden_size
                read = [states.hidden_states[n - 1] for n in drafter.feature_layers]
                observe(row, tokens, torch.cat([features[:, :width], *(s[0] for s in read)], -1))
            else:
                observe(row, tokens, place(drafter.target, ids)[0])

        return patch.object(drafter, "observe", other)

    return fault


def one_layer_off(target: Target, ids: Tensor) -> Tensor:
    states = target.model.base_model(ids, output_hidden_states=True).hidden_states
    return target.model.base_model.norm(states[-2])


def before_the_norm(target: Target, ids: Tensor) -> Tensor:
    base, kept = target.model.base_model, []
    hook = base.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    base(ids)
    hook.remove()
    return kept[0]


def scaled_embeddings(drafter: FalconDrafter):
    embed = drafter.target.embed
    return patch.object(drafter.target, "embed", lambda ids: 2 * embed(ids))


def other_base(drafter: FalconDrafter):
    head = drafter.head
    with patch.object(head, "inverse_frequency", head.inverse_frequency**1.2):
        everywhere = torch.arange(drafter.pool.capacity)[None]
        rope = head.rope(everywhere)
    return patch.object(drafter, "rope_tables", rope)


def later_positions(drafter: FalconDrafter):
    place = drafter._rope_at
    return patch.object(drafter, "_rope_at", lambda at: place([n + 1 for n in at]))


def shifted_ids(drafter: FalconDrafter):
    tokens, size = drafter.vocabulary.tokens, drafter.target.vocab_size
    return patch.object(drafter.vocabulary, "tokens", lambda at: (tokens(at) + 1) % size)


# How each is found: the first tensor that differs, and a word of its message.
FAULTS = {
    "norm left out": (without_norm, "normed", "norm"),
    "features one layer off": (features_from(one_layer_off), "features", "after layer"),
    "features before the norm": (features_from(before_the_norm), "features", "before the final"),
    "embeddings scaled": (scaled_embeddings, "embeddings", "times 2"),
    "rotary base changed": (other_base, "rotary", "base"),
    "positions off by one": (later_positions, "positions", "positions"),
    "queries and keys changed": (transposed, "query", "q_proj"),
    "draft ids shifted": (shifted_ids, "draft", "ids"),
}
