"""A head that starts as a layer of its target: it equals that layer at the head's scale, and trains
from there. Layers that cannot be used are refused before anything runs."""

import json

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from commands import run_here
from random_families import random_model
from random_models import random_target
from shallow import shallow_target

from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, TargetError
from specdraft.train.start_layer import RIDGE, check_start_layer, start_from_layer


class Rows(list):
    """Tokens as a feature cache gives them."""

    def __init__(self, rows):
        super().__init__({"input_ids": ids} for ids in rows)
        self.lengths = [len(ids) for ids in rows]


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(layers=4)
    with torch.no_grad():
        for layer in target.base.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    return target


@pytest.fixture(scope="module")
def rows() -> Rows:
    generator = torch.Generator().manual_seed(3)
    return Rows([torch.randint(23, (length,), generator=generator) for length in (9, 30, 17, 24)])


def config_for(target: Target, **changes) -> FalconConfig:
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 32, "fusion": "linear"}
    shape |= {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    return FalconConfig(**shape | {"embed_scale": 0.3} | changes)


def started(target: Target, rows: Rows, first: int, **changes) -> FalconHead:
    head = FalconHead(config_for(target, **changes)).eval()
    start_from_layer(head, target, rows, first)
    return head


def causal(layer: int, query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def states(target: Target, ids: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of all layers, [1, T, H] each, embeddings first."""
    return target.base(ids[None], output_hidden_states=True).hidden_states


def spread(target: Target, rows: Rows, layer: int) -> float:
    written = torch.cat([states(target, row["input_ids"])[layer][0, 1:] for row in rows])
    return written.square().mean().sqrt().item()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_started_heads_layers_compute_what_the_targets_layers_compute(target, rows, layers):
    head, ids = started(target, rows, 2, layers=layers), rows[1]["input_ids"]
    known, scale = states(target, ids), 1 / spread(target, rows, 1)
    with torch.no_grad():
        said = head.decode(scale * known[1], head.rope(torch.arange(len(ids))[None]), causal)
    torch.testing.assert_close(said, scale * known[1 + layers], rtol=1e-3, atol=1e-3)


def test_the_fusion_is_the_ridge_regression_to_the_layers_input(target, rows):
    head, read, wanted = started(target, rows, 3), [], []
    for row in rows:
        ids = row["input_ids"]
        features = target.features(ids[None])[0]
        read.append(head.inputs(target.embed(ids[1:]), features[:-1]))
        wanted.append(states(target, ids)[2][0, 1:] / spread(target, rows, 2))
    read, wanted = torch.cat(read).double(), torch.cat(wanted).double()
    # The ridge as extra rows: one per input dimension, with target 0.
    more = (RIDGE * len(read)) ** 0.5 * torch.eye(read.shape[1], dtype=torch.float64)
    nearest = torch.linalg.lstsq(
        torch.cat((read, more)), torch.cat((wanted, torch.zeros(len(more), wanted.shape[1])))
    ).solution
    torch.testing.assert_close(head.fuse.weight.double(), nearest.T, rtol=1e-4, atol=1e-5)


def test_final_norm_weights_only_rescale_what_a_head_computes(rows):
    """They lie between a layer's output and the feature, so they change only the sign and scale of
    a head's states."""
    plain, scaled = random_target(layers=3), random_target(layers=3)
    with torch.no_grad():
        scaled.base.norm.weight.mul_(-4.0)
    one = started(plain, rows, 2)
    other = started(scaled, rows, 2, feature_scale=4.0)
    ids = rows[2]["input_ids"]
    rope, queries = one.rope(torch.arange(len(ids))[None]), states(plain, ids)[1]
    with torch.no_grad():
        said, also = one.decode(queries, rope, causal), other.decode(-queries, rope, causal)
    torch.testing.assert_close(also, -said, rtol=1e-4, atol=1e-5)


def test_eagles_first_layer_has_the_layers_norm_weights_in_its_matrix(target, rows):
    changes = {"block_size": 1, "input_norm": False}
    head = started(target, rows, 3, **changes)
    ids, layer = rows[0]["input_ids"], target.base.layers[2]
    read = F.rms_norm(states(target, ids)[2][0], (16,))
    queries = head.layers[0].qkv(read)[:, :16]
    with torch.no_grad():
        wanted = layer.self_attn.q_proj(layer.input_layernorm.weight * read)
    torch.testing.assert_close(queries, wanted, rtol=1e-4, atol=1e-5)


def test_a_run_with_a_start_layer_has_a_lower_loss_throughout(tmp_path):
    target, losses = shallow_target(tmp_path / "target"), {}
    for layer in ("null", "2"):
        small = ["train.steps=24", "train.batch_size=4", "train.threads=1", "data.limit=64"]
        small += ["train.eval_every=null", "train.save_every=null", "eval.limit=1"]
        small += ["eval.max_new_tokens=2", "eval.tree=tiny_k3", "eval.methods=[plain]"]
        small += [f"target.model={target}", "data.feature_layers=[1]"]
        places = [f"output.dir={tmp_path / layer}", f"data.cache_dir={tmp_path / 'cache'}"]
        own = [f"head.start_layer={layer}", "train.log_every=4", "optim.lr=1.0e-3"]
        done = run_here("train/falcon.py", "recipes/tiny.yaml", *small, *places, *own)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / layer / "log.jsonl").read_text().splitlines())
        losses[layer] = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses["2"]) == len(losses["null"]) >= 6
    assert all(own < other for own, other in zip(losses["2"], losses["null"], strict=True))


@pytest.mark.parametrize(("first", "layers"), [(1, 1), (5, 1), (4, 2)])
def test_a_missing_start_layer_is_refused(target, first, layers):
    with pytest.raises(RecipeError, match=f"head.start_layer = {first}: .* has 4 decoder layers"):
        check_start_layer(first, config_for(target, layers=layers), target)
    check_start_layer(4, config_for(target), target)


@pytest.mark.parametrize("family", ["Gemma", "Qwen2", "Qwen3", "GPTNeoX", "Phi3", "Olmo2"])
def test_start_layers_of_other_families_are_refused_by_name(family):
    model = random_model(family, num_key_value_heads=2, head_dim=4, intermediate_size=32)
    with pytest.raises(RecipeError, match=r"a head's layer is Llama's, and \w+Layer of other is"):
        check_start_layer(2, config_for(random_target()), Target(model, None, "other"))


def test_an_offloaded_target_is_refused():
    elsewhere = random_target(layers=3)
    cpu_offload(elsewhere.model, "cpu")
    with pytest.raises(TargetError, match=r"= 2: copies a layer of random-0, and target"):
        check_start_layer(2, config_for(elsewhere), Target(elsewhere.model, None, "random-0"))


def test_a_target_loaded_without_its_layers_is_refused(target):
    bare = Target(target.model, None, "bare", no_layers="its layers are elsewhere")
    with pytest.raises(TargetError, match="bare: its layers are elsewhere"):
        check_start_layer(2, config_for(target), bare)
