"""A broken head is recognised by the first tensor that differs, and its cause is named."""

from contextlib import nullcontext

import pytest
import torch
from faults import FAULTS
from random_models import VOCAB, random_eagle3, random_head, random_target

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.serve.causes import first_cause
from specdraft.eval.serve.tracing import note, tracing

KINDS = {
    "eagle": {"block_size": 1, "fusion": "linear", "input_norm": False},
    "coupled": {"block_size": 3, "fusion": "linear", "reads": "both", "coupling": "recurrent"},
    "eagle3": {"feature_layers": (1,), "layer_norms": "each", "draft_vocab": 20},
}
PROMPT = torch.randint(VOCAB, (14,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def target():
    return random_target()


def trace_of(target, kind: str, fault=lambda drafter: nullcontext()):
    make = random_eagle3 if kind == "eagle3" else random_head
    head = make(target, **KINDS[kind])
    torch.manual_seed(2)
    with torch.no_grad():  # norms as if trained; as many keys as queries, to be swapped
        head.layers[0].mlp_norm.uniform_(0.5, 2.0)
    tree = StaticTree.chain(4, head.config.block_size)
    drafter = FalconDrafter(head, target, tree, 1, 64)
    drafter.row_pass = None  # faults are planted only in packed passes
    with fault(drafter), tracing(drafter.head) as trace:
        (done,) = Decoder(target, drafter, 1, 64).run([Request(PROMPT, 2)])
    note(trace, draft=torch.tensor(done.steps[1].tokens))
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_head_has_no_cause_to_report(target, kind):
    assert first_cause(target, PROMPT, trace_of(target, kind), trace_of(target, kind)) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_faults_cause_is_found_and_named(target, kind, name, monkeypatch):
    if kind == "eagle3" and name == "features before the norm":
        pytest.skip("EAGLE-3 reads layers, and no norm of the target")
    monkeypatch.setitem(KINDS[kind], "kv_heads", 4)
    fault, tensor, word = FAULTS[name]
    found = first_cause(target, PROMPT, trace_of(target, kind), trace_of(target, kind, fault))
    assert found["tensor"] == tensor
    assert word in f"{found['what']} {found['how']}"
