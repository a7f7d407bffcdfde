"""A single row's pass, as one function, equals the packed pass in features and drafts, also when
compiled."""

import math
import shutil
from functools import partial

import pytest
import torch
from decoding import decode, plain_tokens, prompts
from random_models import random_eagle3, random_head, random_target

from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.pass_options import PassOptions
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.passes import row as row_pass
from specdraft.models.passes.row import WEIGHED, reads_alone, weighed
from specdraft.models.weights import prepacked

COUPLED = {"fusion": "linear", "coupling": "recurrent"}
COMPILED = PassOptions(compiles=True)
HEADS = {
    "both": (3, {**COUPLED, "reads": "both"}),
    "newest": (2, {"fusion": "linear", "reads": "newest", "coupling": "markov"}),
    "layers": (2, {**COUPLED, "reads": "both", "layers": 2, "feature_layers": (1,)}),
    "own": (3, {**COUPLED, "draft_vocab": 17}),
    "uncoupled": (2, {"fusion": "linear", "reads": "both"}),
    "eagle": (1, {"fusion": "linear", "input_norm": False}),
}
every_head = pytest.mark.parametrize("name", HEADS)
NARROW = [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]

CHAIN = [(0,) * length for length in range(1, 6)]


@pytest.fixture(scope="module")
def target():
    return random_target()


def head_of(target, name):
    block_size, changes = HEADS[name]
    return random_head(target, block_size, **changes)


def drafts(drafter, target, apart: bool):
    """Trees after a text that grows by one to five tokens, and the cache of the last pass;
    `apart` uses packed passes."""
    if apart:
        drafter.row_pass = None
    text = torch.randint(target.vocab_size, (40,), generator=torch.Generator().manual_seed(3))
    features = target.features(text[None], layers=drafter.feature_layers)[0]
    drafter.start(0, Request(text[:9].tolist(), 30))
    found, place = [], 0
    for count in (8, 1, 4, 2, 5, 3):
        ahead = text[place + 1 : place + 1 + count].tolist()
        drafter.observe(0, ahead, features[place : place + count])
        place += count
        (tree,) = drafter.draft([0])
        found.append((tree.topology.parents, tree.tokens.tolist()))
    keys, values = drafter.pool.read(0, 0, 0, drafter.pool.lengths[0])
    return found, torch.cat((keys, values)).clone()


@every_head
@pytest.mark.parametrize("kind", ["chain", "narrow", "dynamic"])
@torch.inference_mode()
def test_a_row_alone_drafts_what_packed_passes_draft(target, name, kind):
    head = head_of(target, name)
    tree = StaticTree(
        NARROW if kind == "narrow" else [(0,) * n for n in range(1, 6)], HEADS[name][0]
    )
    make = partial(FalconDrafter, head, target, tree, 1, 64)
    if kind == "dynamic":
        make = partial(DynamicFalcon, head, target, None, 1, 64, width=1)
    alone = make()
    assert alone.row_pass is not None
    (trees, cache), (expected, packed) = drafts(alone, target, False), drafts(make(), target, True)
    assert trees == expected
    assert max(len(tokens) for _, tokens in trees) > 2
    torch.testing.assert_close(cache, packed, atol=1e-5, rtol=1e-4)
    assert alone.forwards > 0


@every_head
@torch.inference_mode()
def test_a_block_has_the_same_features_as_in_packed_passes(target, name):
    block_size, head = HEADS[name][0], head_of(target, name)
    make = partial(FalconDrafter, head, target, StaticTree.chain(2 * block_size, block_size), 1, 64)
    text, drawn = [3, 1, 4, 1, 5, 9, 2, 6], []
    for drafter in (make(), make()):
        features = target.features(torch.tensor([text]), layers=drafter.feature_layers)[0]
        drafter.start(0, Request(text[:1], 9))
        drafter.observe(0, [*text[1:], 7], features)
        drawn.append(drafter)
    block = drawn[0].read_alone(0)
    slots, state = drawn[1]._read([0])
    packed, tokens = drawn[1].choose([0], drawn[1].passes[0], slots, {})
    torch.testing.assert_close(block.hidden[None], packed, atol=1e-5, rtol=1e-4)
    second = drawn[0].go_on_alone(0, block, block_size)
    slots, _ = drawn[1]._extend([0], drawn[1].passes[1], tokens, packed, state)
    packed, _ = drawn[1].choose([0], drawn[1].passes[1], slots, {})
    torch.testing.assert_close(second.hidden[None], packed, atol=1e-5, rtol=1e-4)
    assert block.chances is None


@every_head
@torch.inference_mode()
def test_the_precomputed_coupling_of_draftable_tokens_equals_the_heads(target, name):
    head = head_of(target, name)
    own = FalconDrafter(head, target, StaticTree.chain(3, HEADS[name][0]), 1, 64).row_pass
    if head.coupling is None:
        assert own.heard is None
        return
    places = torch.tensor([0, 16, 5])
    hidden, before = torch.randn(2, 3, target.hidden_size).unbind()
    tokens = places if own.ids is None else own.ids[places]
    torch.testing.assert_close(
        own.couple(hidden, before, places), head.couple(hidden, before, target.embed(tokens))
    )


@every_head
@torch.inference_mode()
def test_the_precomputed_fusion_part_of_every_token_equals_the_heads(target, name):
    head = head_of(target, name)
    own = FalconDrafter(head, target, StaticTree.chain(3, HEADS[name][0]), 1, 64).row_pass
    tokens, features = torch.tensor([3, 0, 11]), torch.randn(3, target.hidden_size)
    fused, _ = head.fuse(head.pairs(target.embed(tokens), features)[None])
    torch.testing.assert_close(own.fuse(tokens, features), fused[0])
    assert own.brought.shape == (target.vocab_size, target.hidden_size)


@torch.inference_mode()
def test_tables_over_tokens_that_are_too_large_are_not_kept(target, monkeypatch):
    head = head_of(target, "both")
    make = partial(FalconDrafter, head, target, StaticTree.chain(6, 3), 1, 64)
    kept, _ = drafts(make(), target, False)
    for most, brought in ((2, True), (1, False)):  # the coupling's table is twice as large
        most *= 4 * target.vocab_size * target.hidden_size
        monkeypatch.setattr(row_pass, "KEPT", most - 1)
        without = make()
        assert without.row_pass.heard is None
        assert (without.row_pass.brought is not None) == brought
        assert drafts(without, target, False)[0] == kept


@pytest.mark.parametrize("vocabulary", [5, 40])
def test_probabilities_are_normalised_over_the_best_tokens(vocabulary):
    scores = torch.randn(3, 2, vocabulary, generator=torch.Generator().manual_seed(1))
    chances, tokens = weighed(scores, 4, 2.0)
    assert chances.shape == tokens.shape == (3, 2, 4)
    rows = (part.flatten(0, 1) for part in (scores, chances, tokens))
    for own, found, chosen in zip(*rows, strict=True):
        ranked = sorted(own.tolist(), reverse=True)[:WEIGHED]
        whole = sum(math.exp(2 * score) for score in ranked)
        assert own[chosen].tolist() == ranked[:4]
        assert found.tolist() == pytest.approx([math.exp(2 * s) / whole for s in ranked[:4]])


def test_heads_and_rows_that_the_function_does_not_support_stay_packed(target):
    heads = [
        random_head(target, 2),  # has an LSTM's state
        random_head(target, 2, fusion="linear", layers=2),  # layer 2's keys depend on layer 1
        random_head(target, 3, **COUPLED, reads="both", window=4),
    ]
    assert not any(reads_alone(head, target) for head in heads)
    assert not reads_alone(random_eagle3(random_target(layers=4)), random_target(layers=4))
    drafter = FalconDrafter(head_of(target, "both"), target, StaticTree.chain(3, 3), 2, 64)
    drafter.start(0, Request([1], 4, temperature=1.0))
    drafter.start(1, Request([1], 4))
    assert not drafter.goes_alone([0])
    assert drafter.goes_alone([1])
    assert not drafter.goes_alone([0, 1])


def test_a_tree_is_narrow_when_only_the_most_probable_nodes_have_children():
    assert StaticTree(NARROW, 2).is_narrow
    assert StaticTree.chain(5, 2).is_narrow
    assert not StaticTree([(0,), (1,), (1, 0)], 2).is_narrow


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.filterwarnings("error::UserWarning")  # of what was not compiled
@pytest.mark.parametrize("kind", ["chain", "dynamic"])
def test_compiled_passes_draft_the_same(target, kind):
    head = head_of(target, "both")
    if kind == "chain":
        make = partial(FalconDrafter, head, target, StaticTree.chain(6, 3), 1, 128)
    else:
        make = partial(DynamicFalcon, head, target, None, 1, 128, width=1)
    with torch.inference_mode():
        compiled, _ = drafts(drafter := make(options=COMPILED), target, False)
        expected, _ = drafts(make(), target, False)
    assert compiled == expected
    requests = [Request(prompt, 17) for prompt in prompts(3)]
    said = decode(Decoder(target, drafter, 1, 128), requests, accepts=False)
    assert said == [plain_tokens(target, request.prompt, 17) for request in requests]


@pytest.fixture
def graphs_as_captured(monkeypatch):
    """Graphs are captured, and run as they are: to write their code takes half a minute each."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("graphs_as_captured")
@pytest.mark.filterwarnings("error::UserWarning")
@torch.inference_mode()
def test_the_recompile_limit_of_one_function_does_not_limit_the_number_of_heads(target):
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("eagle", "uncoupled"):
            tree = StaticTree.chain(4, HEADS[name][0])
            drafter = FalconDrafter(head_of(target, name), target, tree, 1, 64, options=COMPILED)
            assert drafter.row_pass._graphs, f"{name} is not compiled"


@pytest.mark.usefixtures("graphs_as_captured")
@pytest.mark.filterwarnings("error::UserWarning")
@torch.inference_mode()
def test_a_wide_head_is_compiled_too(target, monkeypatch):
    """Its matrices would all be prepacked if it were not compiled."""
    monkeypatch.setattr(prepacked, "_LARGE", 0)
    monkeypatch.setitem(prepacked.LAYOUTS, torch.float32, (prepacked.BLOCKS,))
    torch._dynamo.reset()
    drafter = DynamicFalcon(head_of(target, "layers"), target, None, 1, 64, options=COMPILED)
    assert drafts(drafter, target, False)[0]
    assert drafter.row_pass._graphs


def test_without_a_c_compiler_a_warning_is_given_and_drafts_stay_the_same(target, monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/no/such/compiler",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    torch._dynamo.reset()
    head = head_of(target, "newest")
    make = partial(FalconDrafter, head, target, StaticTree.chain(4, 2), 1, 64)
    with torch.inference_mode():
        with pytest.warns(UserWarning, match=r"eval\.compile: drafts as before: .*compiler"):
            found, _ = drafts(make(options=COMPILED), target, False)
        assert found == drafts(make(), target, False)[0]
