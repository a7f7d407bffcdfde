"""Prepacked weights: torch's products up to rounding, and the caller's model unchanged."""

import pytest
import torch
import torch.nn.functional as F
from decoding import check_as_plain
from random_families import GQA, MLP, check_family, random_model
from random_models import random_head, random_target
from random_seq2seq import asked, generated, random_seq2seq
from torch import nn

from specdraft.eval.custom_generate import Speculative
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.models.target import Target
from specdraft.models.weights import prepacked
from specdraft.models.weights.prepacked import (
    BLOCKS,
    COLUMNS,
    LAYOUTS,
    Packable,
    PrepackedLinear,
    PrepackedWeights,
    frozen_view,
    has_blocks,
    layouts_float32,
    prepacked_layer,
)
from specdraft.recipes.sections.target import TargetSection

DTYPES = [dtype for dtype in LAYOUTS if has_blocks(dtype)]


@pytest.fixture(params=["columns", "blocks"], autouse=True)
def always(request, monkeypatch):
    """Pack every product, as test models are small, in each layout."""
    if request.param == "blocks" and not DTYPES:
        pytest.skip("this torch arranges no weights in blocks on this CPU")
    layout = {"columns": COLUMNS, "blocks": BLOCKS}[request.param]
    monkeypatch.setattr(prepacked, "LAYOUTS", dict.fromkeys(LAYOUTS, (layout,)))
    monkeypatch.setattr(prepacked, "_LARGE", 0)


@pytest.mark.parametrize("dtype", DTYPES or [torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (2, 5, 24), (100, 24)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_torchs(dtype, shape, biased):
    store, generator = PrepackedWeights(), torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if biased else None
    x = torch.randn(shape, generator=generator).to(dtype)
    apart = torch.stack((x, x), -1)[..., 0]  # the same numbers, not contiguous
    with torch.inference_mode():
        expected = F.linear(x, weight, bias)
        tolerance = 1e-5 if dtype is torch.float32 else 4e-2
        for given in (x, apart):
            product = store.linear(given, weight, bias)
            torch.testing.assert_close(product, expected, atol=tolerance, rtol=tolerance)
    assert store.size == 40 * 24 * weight.element_size()  # it was packed


def test_a_weight_that_changed_is_packed_again():
    store, weight, x = PrepackedWeights(), torch.ones(8, 8), torch.ones(3, 8)
    with torch.no_grad():
        assert store.linear(x, weight).eq(8).all()
        weight.mul_(2)
        assert store.linear(x, weight).eq(16).all()
        weight.data = torch.full((8, 8), 3.0)
        assert store.linear(x, weight).eq(24).all()
    assert store.size == 8 * 8 * 4


def test_slices_of_a_weight_are_packed_separately():
    store, weight = PrepackedWeights(), torch.nn.Parameter(torch.randn(12, 8), False)
    x = torch.randn(3, 8)
    for _ in range(2):
        with torch.inference_mode():
            for part in (*weight.split((4, 8)), weight):
                torch.testing.assert_close(store.linear(x, part), x @ part.T)
        with torch.no_grad():
            weight.mul_(2)
    assert store.size == 2 * 12 * 8 * 4  # each row in a slice and in the whole


def test_weights_on_other_devices_are_left_to_torch():
    store, weight = PrepackedWeights(), torch.ones(8, 8, device="meta")
    with torch.inference_mode():
        assert store.linear(torch.ones(3, 8, device="meta"), weight).shape == (3, 8)
    assert store.size == 0


def test_products_that_need_gradients_are_left_to_torch():
    target, store = random_target(), PrepackedWeights()
    features = torch.randn(5, target.hidden_size, requires_grad=True)
    target.logits(features).sum().backward()
    assert features.grad.abs().sum() > 0
    x = torch.ones(2, 8, requires_grad=True)
    store.linear(x, torch.ones(8, 8)).sum().backward()
    assert x.grad.eq(8).all()
    assert store.size == 0


def test_packed_weights_stay_within_their_memory_limit():
    store, first, second = PrepackedWeights(8 * 8 * 4), torch.ones(8, 8), torch.ones(8, 8)
    with torch.inference_mode():
        for weight in (first, second, first, second):
            assert store.linear(torch.ones(3, 8), weight).eq(8).all()
    assert store.size == store.most


def test_the_recipe_sets_the_memory_limit():
    for most in (0.0, 0.5):
        target = Target.of_recipe(TargetSection(prepack_gib=most), "cpu")
        with torch.inference_mode():
            target.logits(torch.randn(4000, target.hidden_size))
        assert target.prepacked.most == most * 2**30
        assert (target.prepacked.size > 0) == (most > 0)


def test_layers_that_cannot_be_packed_are_left_unchanged(monkeypatch):
    store, linear = PrepackedWeights(), nn.Linear(8, 8).requires_grad_(False)

    class Other(nn.Linear):
        pass

    for module in (nn.Linear(8, 8), Other(8, 8).requires_grad_(False), nn.LayerNorm(8)):
        assert prepacked_layer(module, store) is module
    assert prepacked_layer(linear.double(), store) is linear
    monkeypatch.setattr(prepacked, "LAYOUTS", {})
    view = prepacked_layer(linear.float(), store)
    with torch.inference_mode():
        x = torch.ones(100_000, 8)
        assert torch.equal(view(x), linear(x))
    assert store.size == 0


def test_the_model_keeps_its_layers_and_the_packed_copy_shares_its_tensors():
    target = random_target()
    packed = PackedTarget(target, 1, 64)
    assert not any(isinstance(m, PrepackedLinear) for m in target.model.modules())
    layers = [m for m in packed.base.modules() if isinstance(m, PrepackedLinear)]
    known = {id(parameter) for parameter in target.model.parameters()}
    assert len(layers) > 4
    assert {id(layer.weight) for layer in [*layers, target.lm_head]} <= known


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", GQA),
        ("Qwen2", {**GQA, "tie_word_embeddings": True}),
        ("Phi", {**GQA, "partial_rotary_factor": 0.5}),  # a bias everywhere
        ("GPTNeoX", MLP),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_with_packed_weights_decode_as_generate(family, settings):
    target = Target(random_model(family, **settings), None, family)
    check_family(target)
    assert target.prepacked.size > 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafted", [None, 12])
def test_drafting_with_packed_weights_changes_no_output(rows, drafted):
    target = random_target()
    head = random_head(target, 2, draft_vocab=drafted)
    if drafted:
        head.draft_ids.copy_(torch.arange(0, 2 * drafted, 2))
    drafter = FalconDrafter(head, target, StaticTree.chain(4, 2), rows, 128)
    check_as_plain(target, drafter, rows)
    assert target.prepacked.size > 0


@pytest.mark.parametrize("how", ["counted", "fused", "data"])
def test_weights_written_between_generate_calls_take_effect(how):
    model, fast, ids = random_target().model, Speculative(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    options = {"input_ids": ids, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**options, custom_generate=fast), model.generate(**options))
    before = model.generate(**options)
    if how == "data":
        model.lm_head.weight.data.copy_(model.lm_head.weight.data.roll(1, 0))
    else:  # torch's fused optimizers do not bump versions
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=how == "fused")
        model.requires_grad_(True)(ids, labels=ids).loss.backward()
        optimizer.step()
    kept = model.generate(**options, custom_generate=fast)
    assert torch.equal(kept, model.generate(**options))
    assert not torch.equal(kept, before)


def test_encoder_decoders_with_packed_weights_decode_as_generate():
    target = random_seq2seq("flan-t5")
    sources = [[5, 9, 2, 7], [3, 3, 8, 1, 6, 4, 2]]
    decoder = Decoder(target, None, 2, 64)
    done = sorted(decoder.run(asked(target, sources)), key=lambda one: one.index)
    assert [one.tokens for one in done] == [generated(target, one, 12) for one in sources]
    assert target.prepacked.size > 0


def test_a_product_is_packed_only_if_it_pays(monkeypatch):
    layout = COLUMNS._replace(products=900, tokens=2, numbers=64, below=2000)
    monkeypatch.setattr(prepacked, "LAYOUTS", {torch.float32: (layout,)})
    for shape, tokens, packed in [
        ((4, 8), 99, False),
        ((8, 8), 14, False),  # 896 multiplications
        ((8, 8), 15, True),
        ((64, 16), 1, False),
        ((64, 16), 2, True),
        ((64, 32), 99, False),
    ]:
        store, weight = PrepackedWeights(), torch.ones(shape)
        with torch.inference_mode():
            store.linear(torch.ones(tokens, shape[1]), weight)
        assert (store.size > 0) == packed, (shape, tokens)


def test_the_layout_depends_on_the_processor(monkeypatch):
    for name, instructions, shape, tokens, layout in [
        ("Intel Xeon", "AVX512", (344, 128), 5, None),
        ("Intel Xeon", "AVX512", (344, 128), 6, COLUMNS),
        ("Intel Xeon", "AVX512", (4096, 1024), 3, None),
        ("Intel Xeon", "AVX512", (4096, 1024), 4, BLOCKS),
        ("AMD EPYC", "AVX512", (344, 128), 16, BLOCKS),
        ("AMD EPYC", "AVX2", (344, 128), 99, None),
        ("AMD EPYC", "AVX2", (4096, 1024), 2, BLOCKS),
        ("", "DEFAULT", (344, 128), 16, BLOCKS),  # an unknown processor
    ]:
        own = layouts_float32(name, instructions)
        monkeypatch.setattr(prepacked, "LAYOUTS", {torch.float32: own})
        monkeypatch.setattr(prepacked, "has_blocks", lambda _: True)
        weight = torch.ones(shape)
        found = prepacked.layout_of(weight)
        worth = found and tokens * shape[1] >= found.least(weight)
        assert (found.pack if worth else None) is (layout and layout.pack), (name, shape, tokens)


def test_without_support_for_blocks_that_layout_is_not_used(monkeypatch):
    monkeypatch.setattr(prepacked, "has_blocks", lambda _: False)
    weight = torch.ones(8, 8)
    layouts = {COLUMNS: COLUMNS, BLOCKS: None}
    for layout, left in layouts.items():
        monkeypatch.setattr(prepacked, "LAYOUTS", {torch.float32: (layout,)})
        assert prepacked.layout_of(weight) is left


@pytest.mark.parametrize("reads", ["own", "newest"])
def test_all_matrices_of_a_heads_view_are_packed(reads):
    target = random_target()
    head = random_head(target, 2, reads=reads, fusion="linear", feature_layers=(1,))
    view, blocks = frozen_view(head), torch.arange(6)[None] // 2
    ahead, layer = torch.randn(2, 1, 6, target.hidden_size)
    with torch.inference_mode():
        inputs = ahead, torch.cat((ahead.flip(1), layer), -1), blocks
        torch.testing.assert_close(view(*inputs), head(*inputs))
    packable = (one for one in view.modules() if isinstance(one, Packable))
    (store,) = {one.linear.__self__ for one in packable if [*one.parameters()]}
    matrices = [one.numel() for one in view.parameters() if one.dim() == 2]
    assert store.size == 4 * sum(matrices)


def test_a_heads_view_follows_changes_of_its_weights():
    head = random_head(random_target(), 2)
    view, x = frozen_view(head), torch.randn(4, head.config.hidden_size)
    for _ in range(2):
        with torch.inference_mode():
            own = head.layers[0].out(x)
            torch.testing.assert_close(view.layers[0].out(x), own)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(1.5)
    assert not any(one.requires_grad for one in view.parameters())
    assert all(one.requires_grad for one in head.parameters())
