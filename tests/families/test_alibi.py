"""ALiBi decodes as the family's own `generate`: the bias follows positions, not cache slots."""

import pytest
import torch
from decoding import Foreseeing, decode, plain_tokens, prompts
from random_families import check_family, random_model
from random_models import HIDDEN

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.request import Request
from specdraft.models.target import Target

FAMILIES = {
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 3}),
    "bloom-6": (
        "Bloom",
        {"n_head": 6, "n_layer": 3, "hidden_size": 24, "seed": 6},
    ),  # not a power of two
    "mpt": ("Mpt", {"d_model": HIDDEN, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}),
}


def leaning(name: str) -> Target:
    family, settings = FAMILIES[name]
    model = random_model(family, **settings, tie_word_embeddings=False)
    with torch.no_grad():  # MPT's config has no initializer range
        for parameter in model.base_model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return Target(model, None, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_alibi_decodes_as_the_model_generates(name):
    check_family(leaning(name))


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_the_tests_catch_a_bias_by_cache_slots(name, monkeypatch):
    """Several nodes of a tree share a position."""
    target = leaning(name)
    expected = [plain_tokens(target, prompt, 14) for prompt in prompts()]
    answers = {tuple(p): answer for p, answer in zip(prompts(), expected, strict=True)}
    requests = [Request(prompt, 14) for prompt in prompts()]
    place = PackedTarget.forward

    def by_slots(packed, ids, positions, segments):
        found = [n for segment in segments for n in range(segment.start, segment.stop)]
        return place(packed, ids, torch.tensor(found), segments)

    monkeypatch.setattr(PackedTarget, "forward", by_slots)
    assert decode(Decoder(target, Foreseeing(answers), 2, 100), requests) != expected


def test_the_callers_attention_is_not_replaced():
    target = leaning("bloom")
    PackedTarget(target, 1, 64)
    assert "forward" not in vars(target.model.transformer.h[0].self_attention)
