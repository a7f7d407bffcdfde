"""Sliding windows, in all or some layers, decode as the family's own `generate`."""

import pytest
import torch
from decoding import decode, plain_tokens, prompts
from random_families import GQA, check_family, random_model
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import chain
from specdraft.eval.families.probe import ALL, OTHER, window_mask
from specdraft.models.target import Target

# A scaled and tied embedding would repeat the last token.
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {
    "mistral": ("Mistral", {}, (True, True, True)),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (False, True, True)),
    "gemma3": ("Gemma3Text", {**MIXED, **GEMMA}, (True, False, True)),
    "phi3": ("Phi3", {}, (True, True, True)),
    "olmo3": ("Olmo3", MIXED, (True, False, True)),
    "starcoder2": ("Starcoder2", {}, (True, True, True)),
}


def windowed(name: str, window: int) -> Target:
    family, settings, _ = FAMILIES[name]
    return Target(random_model(family, **GQA, **settings, sliding_window=window), None, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_windows_of_layers_are_detected_from_their_masks(name):
    windows = PackedTarget(windowed(name, 7), 1, 64).pool.windows
    assert windows == tuple(7 if has else None for has in FAMILIES[name][2])


@pytest.mark.parametrize("size", range(1, 12))
def test_a_mask_is_classified_by_what_the_tokens_of_a_full_row_see(size):
    """A window or chunk as long as the row counts as none; shorter chunks are not supported."""
    capacity = 8
    window = sliding_window_causal_mask_function(size)
    assert window_mask(capacity, 2, 2, window).unique().tolist() == [
        ALL if size >= capacity else size
    ]
    chunk = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    known = ALL if size >= capacity else 1 if size == 1 else OTHER
    assert window_mask(capacity, 2, 2, chunk).unique().tolist() == [known]


def test_a_window_as_long_as_a_row_counts_as_none():
    assert PackedTarget(windowed("mistral", 64), 1, 64).pool.windows == (None, None, None)
    assert PackedTarget(windowed("mistral", 63), 1, 64).pool.windows == (63, 63, 63)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_decodes_as_the_model_generates(name):
    check_family(windowed(name, 9))


def test_a_window_shorter_than_a_draft_decodes_as_the_model_generates():
    check_family(windowed("qwen2", 2))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tests_catch_a_window_off_by_one(name):
    """Otherwise the test above would pass for any window."""
    target = windowed(name, 9)
    requests = [Request(prompt, 14) for prompt in prompts()[3:]]
    expected = [plain_tokens(target, request.prompt, 14) for request in requests]
    for shift in (-1, 1):
        decoder = Decoder(target, None, 1, 100)
        pool = decoder.packed.pool
        pool.windows = [window and window + shift for window in pool.windows]
        assert decode(decoder, requests) != expected


def test_a_windowed_layer_reads_no_more_than_its_window(monkeypatch):
    target = windowed("gemma3", 9)
    decoder, read = Decoder(target, None, 1, 200), {}
    slots = type(decoder.packed.pool).read

    def noted(pool, layer, row, first, stop):
        read[layer] = stop - first
        return slots(pool, layer, row, first, stop)

    monkeypatch.setattr(type(decoder.packed.pool), "read", noted)
    decode(decoder, [Request(prompts()[5] * 4, 14)])
    assert read == {0: 9, 1: 4 * len(prompts()[5]) + 13, 2: 9}


def test_features_of_inner_layers_respect_windows_too():
    target = windowed("gemma3", 3)
    ids, packed = torch.tensor(prompts()[4]), PackedTarget(target, 1, 100, (1, 2))
    wide = target.features(ids[None], layers=(1, 2))[0]
    found = packed.forward(ids, torch.arange(len(ids)), [packed.segment(0, chain(len(ids) - 1))])
    torch.testing.assert_close(found, wide, atol=1e-4, rtol=1e-4)
