"""The vLLM proposer without vLLM: called as vLLM calls it, on a model with the same methods."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import plain_tokens
from huggingface_hub import constants
from random_models import random_head
from served_engine import SmallEngine
from torch import nn

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.methods.trained import Trained
from specdraft.eval.serve import for_vllm
from specdraft.eval.serve.for_vllm import Proposer, Seen, row_bytes
from specdraft.eval.serve.rows import RowStep, ServedRows
from specdraft.eval.serve.served_model import ServedModel
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.serving import serve_eagle
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import TargetError

LENGTH, HIDDEN = 10, 128
COUPLED = {"block_size": 3, "fusion": "linear", "reads": "both", "coupling": "recurrent"}


class Model(nn.Module):
    """A target with the attribute names of vLLM's models."""

    def __init__(self, target: Target):
        super().__init__()
        self.lm_head = target.lm_head
        self.embed_input_ids, self.compute_logits = target.embed, target.logits


class LayeredModel(Model):
    """The same with a model that returns inner layers."""

    shown: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.shown = layers


@pytest.fixture(scope="module")
def target():
    return Target.load("tiny")


def config_of(target: Target, options: dict, **changes) -> SimpleNamespace:
    sizes = {"get_vocab_size": lambda: target.vocab_size}
    sizes |= {"get_hidden_size": lambda: target.hidden_size}
    sizes |= {"get_total_num_hidden_layers": lambda: target.config.num_hidden_layers}
    served = {"model": str(bundled_target_dir()), "revision": None, "dtype": torch.float32}
    served["trust_remote_code"] = False
    parts = {
        "model_config": SimpleNamespace(**served, **sizes, max_model_len=64),
        "speculative_config": SimpleNamespace(num_speculative_tokens=5),
        "scheduler_config": SimpleNamespace(max_num_seqs=3),
        "compilation_config": SimpleNamespace(cudagraph_mode=None),
        "parallel_config": SimpleNamespace(world_size=1),
        "additional_config": {"specdraft": options},
    }
    return SimpleNamespace(**parts | changes)


class Calls:
    """Turns the steps of a small engine into vLLM's calls, and records them."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.made = proposer, []

    def __len__(self) -> int:
        return len(self.proposer.rows)

    def step(self, rows: list[RowStep]) -> list[list[int]]:
        counts = [len(row.tokens) for row in rows]
        table = np.full((len(rows) + 2, 64), -1, dtype=np.int32)
        for number, row in enumerate(rows):
            table[number, : counts[number]] = row.tokens
        noise = torch.ones(2, rows[0].features.shape[1])  # positions of rejected drafts
        parts = [torch.cat((r.features, noise)) if r.sampled else r.features for r in rows]
        places = [
            torch.arange(row.start, row.start + len(p)) for row, p in zip(rows, parts, strict=True)
        ]
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        # vLLM's model returns its last features and a list of layers, the lowest first.
        layers = self.proposer.layers
        last, *inner = torch.cat(parts).split(HIDDEN, -1)
        lowest_first = [inner[layers.index(layer)] for layer in sorted(layers)]
        features = self.proposer.wide(last, lowest_first)
        self.proposer.seen = Seen(features, torch.cat(places), starts)
        fresh = [row.known[row.start + len(row.features) :].tolist() for row in rows]
        sampled = [own if row.sampled else [] for own, row in zip(fresh, rows, strict=True)]
        self.made.append(counts)
        numbers = np.array([*counts, 0, 0])
        return self.proposer.propose(sampled, numbers, table)


class Kept:
    """Records the drafts."""

    def __init__(self, rows: Calls | ServedRows):
        self.rows, self.drafts = rows, []

    def __len__(self) -> int:
        return len(self.rows)

    def step(self, rows: list[RowStep]) -> list[list[int]]:
        self.drafts.append(self.rows.step(rows))
        return self.drafts[-1]


@pytest.mark.parametrize("method", ["falcon_chain", "prompt_lookup", "ssd", "cascade"])
def test_outputs_are_plain_decodings_and_drafts_keep_the_requested_length(target, method, tmp_path):
    options = {"method": method}
    if method == "falcon_chain":
        random_head(target, **COUPLED).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        options["head"] = str(tmp_path)
        assert config["block_size"] == 3
    if method == "ssd":
        options["student"] = str(bundled_target_dir())
    if method == "cascade":
        options |= {"cascade": [str(bundled_target_dir())], "table": str(tmp_path)}
        ones = torch.ones(target.vocab_size, dtype=torch.long)
        table = MaxGramTable.of_counts(MaxGramConfig(target.vocab_size), ones, ones, ones)
        table.save_pretrained(tmp_path)
    proposer = Proposer(config_of(target, options))
    proposer.load_model(Model(target))
    engine = SmallEngine(target, Calls(proposer), chunk=6, batch=4, seed=2)
    prompts = [list(range(n, n + 12)) * 2 for n in (5, 40, 70, 90)]
    found = engine.run(prompts, LENGTH)
    for number, tokens in found.items():
        assert tokens == prompts[number] + plain_tokens(target, prompts[number], LENGTH)
    assert max(map(len, engine.rows.made)) == 4  # one more than the slots


def test_rows_without_room_in_the_students_cache_get_no_drafts(target, monkeypatch):
    tiny = str(bundled_target_dir())
    row = row_bytes(Trained(student=target), 64)
    pool = PackedTarget(target, 1, 64).pool
    assert row == sum(part.nbytes for layer in pool.layers for part in layer) // pool.capacity * 64
    monkeypatch.setattr(for_vllm, "MEMORY", 2 * row)
    proposer = Proposer(config_of(target, {"method": "ssd", "student": tiny}))
    proposer.load_model(Model(target))
    engine = SmallEngine(target, Calls(proposer), chunk=6, batch=3, seed=2)
    prompts = [list(range(n, n + 12)) for n in (5, 40, 70)]
    found = engine.run(prompts, LENGTH)
    for number, tokens in found.items():
        assert tokens == prompts[number] + plain_tokens(target, prompts[number], LENGTH)
    assert len(proposer.rows) <= 2
    monkeypatch.setattr(for_vllm, "MEMORY", row - 1)
    with pytest.raises(TargetError, match="a row of 64 tokens takes ssd more than"):
        Proposer(config_of(target, {"method": "ssd", "student": tiny})).load_model(Model(target))


@pytest.mark.parametrize("holds_embedding", [False, True])
def test_a_head_in_an_engines_layout_can_be_plugged_in(target, tmp_path, holds_embedding):
    head = random_head(target, block_size=1, fusion="linear", input_norm=False)
    served = serve_eagle(head, "vllm", 64)
    if holds_embedding:  # as in the heads of EAGLE's authors
        served.tensors["embed_tokens.weight"] = target.embedding_weight.clone()
    served.write(tmp_path / "head")
    options = {"method": "eagle_chain", "head": str(tmp_path / "head")}
    proposer = Proposer(config_of(target, options))
    proposer.load_model(Model(target))
    prompt = list(range(5, 17))
    found = SmallEngine(target, Calls(proposer), chunk=6, batch=4, seed=2).run([prompt], LENGTH)
    assert found[0] == prompt + plain_tokens(target, prompt, LENGTH)


def test_a_targets_weights_are_read_from_its_revision(target, tmp_path, monkeypatch):
    repo = tmp_path / "models--you--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "v2").write_text("b" * 40)
    shutil.copytree(bundled_target_dir(), repo / "snapshots" / ("b" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = config_of(target, {"method": "prompt_lookup"})
    config.model_config.model, config.model_config.revision = "you/tiny", "v2"
    assert ServedModel(Model(target), config).identity()["weights"] == target.identity()["weights"]


def test_layers_are_put_in_the_heads_order_and_drafts_equal_our_own(target, tmp_path):
    layers = (6, 3)
    head = random_head(target, **COUPLED, feature_layers=layers)
    head.save_pretrained(tmp_path)
    proposer, model = Proposer(config_of(target, {"head": str(tmp_path)})), LayeredModel(target)
    proposer.load_model(model)
    assert model.shown == (3, 6)
    drafter = FalconDrafter(head, target, StaticTree.chain(5, 3), 3, 64)
    prompts = [list(range(n, n + 12)) * 2 for n in (5, 40, 70)]
    drafts = []
    for rows in (Calls(proposer), ServedRows(drafter, 3)):
        kept = Kept(rows)
        SmallEngine(target, kept, chunk=6, batch=3, seed=2, layers=layers).run(prompts, LENGTH)
        drafts.append(kept.drafts)
    assert drafts[0] == drafts[1]
    assert len({tuple(draft) for step in drafts[0] for draft in step}) > 10


@pytest.mark.parametrize(
    ("model", "layers", "words"),
    [(Model, (3,), "Model .* shows its last"), (LayeredModel, (99,), "has 12 decoder layers")],
)
def test_layers_that_the_model_does_not_show_are_refused(target, tmp_path, model, layers, words):
    random_head(target, feature_layers=layers).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=words):
        Proposer(config_of(target, {"head": str(tmp_path)})).load_model(model(target))


def test_cuda_graphs_and_several_processes_are_refused_while_loading(target, tmp_path):
    random_head(target).save_pretrained(tmp_path)
    options = {"head": str(tmp_path)}
    graphs = SimpleNamespace(name="FULL", has_full_cudagraphs=lambda: True)
    refused = {
        "PIECEWISE": {"compilation_config": SimpleNamespace(cudagraph_mode=graphs)},
        "several processes": {"parallel_config": SimpleNamespace(world_size=2)},
    }
    for words, changes in refused.items():
        with pytest.raises(TargetError, match=words):
            Proposer(config_of(target, options, **changes)).load_model(Model(target))


def test_a_head_of_another_target_is_refused_naming_both_targets(target, tmp_path):
    identity = target.identity() | {"name": "you/other", "weights": "ab" * 32}
    head = random_head(target)
    object.__setattr__(head.config, "target", identity)
    head.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"trained for you/other .* not for .*tiny"):
        Proposer(config_of(target, {"head": str(tmp_path)})).load_model(Model(target))
