"""Exported heads give the same outputs when loaded into small modules of each engine's layout.

The layouts follow what the engines' loaders read (vLLM: llama_eagle, medusa; SGLang: llama_eagle):
which tensors exist, their names and shapes.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import ROOT, run_here
from random_families import GQA, random_model
from random_models import random_head, random_target
from safetensors.torch import load_file
from test_medusa import naive_logits, random_heads
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdraft.eval.serve.layouts import served_head
from specdraft.models.published import load_head
from specdraft.models.sar.blocks import block_index
from specdraft.models.serving import Served, serve_eagle, serve_medusa
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, TargetError
from specdraft.recipes.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SCALES = {"feature_scale": 6.7}  # a random head has embed_scale 0.3


class EagleLayout(nn.Module):
    """EAGLE-1 as engines build it: fc, then Llama layers, the first without its input norm."""

    def __init__(self, config: LlamaConfig, bias: bool):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, number) for number in range(config.num_hidden_layers)
        )
        self.layers[0].input_layernorm = nn.Identity()
        self.config = config

    def forward(self, embeddings, features):
        x = self.fc(torch.cat((embeddings, features), -1))
        positions = torch.arange(x.shape[1])[None]
        rope = LlamaRotaryEmbedding(self.config)(x, positions)
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=rope)
        return x


class MedusaLayout(nn.Module):
    """Medusa as vLLM builds it from config.json."""

    def __init__(self, config: dict):
        super().__init__()
        width, vocab = config["hidden_size"], config["vocab_size"]
        bias = config.get("medusa_fc_bias", False)
        self.blocks = nn.ModuleList()
        for _ in range(config["num_heads"]):
            block = nn.Module()
            block.layers = nn.ModuleList(
                nn.Linear(width, width, bias) for _ in range(config["num_hidden_layers"])
            )
            self.blocks.append(block)
        if config.get("original_lm_head", False):
            self.lm_head = nn.Linear(width, vocab, bias=False)
        else:
            self.lm_heads = nn.ModuleList(nn.Linear(width, vocab, bias=False) for _ in self.blocks)

    def forward(self, features):
        logits = []
        for number, block in enumerate(self.blocks):
            x = features
            for layer in block.layers:
                x = x + nn.functional.silu(layer(x))
            logits.append((self.lm_heads[number] if hasattr(self, "lm_heads") else self.lm_head)(x))
        return logits


def load_exactly(module: nn.Module, folder: Path) -> nn.Module:
    """Load a file whose tensors are exactly those of the module."""
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == module.state_dict().keys()
    module.load_state_dict(tensors)
    return module.eval()


@pytest.fixture(scope="module")
def target():
    return random_target()


def eagle(target, **changes):
    head = random_head(target, 1, fusion="linear", **{"input_norm": False, **SCALES, **changes})
    with torch.no_grad():
        for parameter in head.parameters():  # or the export could lose the norms unseen
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "changes", [{}, {"layers": 2, "norm_eps": 1e-2}, {"rope_theta": 500.0, "feature_scale": 0.2}]
)
def test_an_exported_eagle_head_gives_the_same_features(target, tmp_path, engine, changes):
    head = eagle(target, **changes)
    serve_eagle(head, engine, 256).write(tmp_path / "served")
    content = json.loads((tmp_path / "served" / "config.json").read_text())
    names = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    assert content["architectures"] == [names[engine]]
    config = AutoConfig.from_pretrained(tmp_path / "served", attn_implementation="eager")
    assert config.max_position_embeddings == 256
    served = load_exactly(EagleLayout(config, bias=engine == "sglang"), tmp_path / "served")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(target.vocab_size, (2, 9), generator=generator)
    features, ahead = target.features(ids)[:, :-1].clone(), target.embed(ids[:, 1:])
    with torch.no_grad():
        ours = head(ahead, features, block_index(8, 1, 1).expand(2, -1))[0]
        theirs = served(ahead, features)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.std()))
    torch.testing.assert_close(
        target.logits(theirs), target.logits(ours), rtol=1e-3, atol=1e-3 * float(ours.std())
    )


def test_an_exported_head_reads_the_unscaled_embeddings_of_the_targets_file(tmp_path):
    """Gemma's embedding module scales them by sqrt(H), and our head reads the scaled ones."""
    random_model("Gemma", **GQA, head_dim=8).save_pretrained(tmp_path / "target")
    target = Target.of_model(AutoModelForCausalLM.from_pretrained(tmp_path / "target"))
    head = eagle(target)
    head.save_pretrained(tmp_path / "eagle")
    changes = [f"target.model={tmp_path / 'target'}", f"head.model={tmp_path / 'eagle'}"]
    recipe = load_recipe(RECIPES / "tiny_eagle.yaml", changes)
    served_head(recipe, "vllm").write(tmp_path / "served")
    config = AutoConfig.from_pretrained(tmp_path / "served", attn_implementation="eager")
    served = load_exactly(EagleLayout(config, bias=False), tmp_path / "served")
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    features, ahead = target.features(ids)[:, :-1].clone(), target.embed(ids[:, 1:])
    raw, blocks = target.embedding_weight[ids[:, 1:]], block_index(7, 1, 1)[None]
    with torch.no_grad():
        ours = head(ahead, features, blocks)[0]
        theirs = served(raw, features)
        again = load_head(tmp_path / "served", target)(ahead, features, blocks)[0]
    for found in (theirs, again):
        torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4 * float(ours.std()))


@pytest.mark.parametrize("lm_heads", ["own", "shared"])
def test_exported_medusa_heads_give_the_same_logits(target, tmp_path, lm_heads):
    heads = random_heads(target, 3, 2, lm_heads)
    shared = target.lm_head_weight if lm_heads == "shared" else None
    serve_medusa(heads, "vllm", shared).write(tmp_path / "served")
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 2)
    assert config["truncated_vocab_size"] == config["vocab_size"] == target.vocab_size
    # vLLM renames every key with "num" and "heads" in it to num_heads: only one may exist.
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    served = load_exactly(MedusaLayout(config), tmp_path / "served")
    features = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(3))
    for h, logits in enumerate(served(features), start=1):
        expected = torch.stack([naive_logits(heads, target, f, h) for f in features])
        torch.testing.assert_close(logits, expected)


def test_heads_are_exported_in_the_requested_dtype(target, tmp_path):
    for served in (
        serve_eagle(eagle(target), "vllm", 64, torch.bfloat16),
        serve_medusa(random_heads(target), "vllm", dtype=torch.bfloat16),
    ):
        assert {tensor.dtype for tensor in served.tensors.values()} == {torch.bfloat16}
        assert served.config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 2}, "it drafts 2 tokens per pass"),
        ({"fusion": "lstm"}, "its fusion is 'lstm'"),
        ({"feature_layers": (1,)}, r"it reads layers \[1\] of the target"),
        ({"draft_vocab": 9}, "it drafts among 9 tokens.*head.draft_vocab=null"),
        ({"window": 9}, "it sees 9 tokens.*head.window=null"),
        ({"input_norm": True}, "normalises its input.*head.input_norm=false"),
    ],
)
def test_a_head_that_a_layout_cannot_express_is_refused_with_the_reason(target, changes, reason):
    settings = {"block_size": 1, "fusion": "linear", "input_norm": False} | changes
    with pytest.raises(HeadError, match=rf"no serving format: .*{reason}"):
        serve_eagle(random_head(target, **settings), "vllm", 64)


def test_medusa_heads_cannot_be_exported_to_sglang(target):
    with pytest.raises(HeadError, match="sglang loads no Medusa heads; engines that do: vllm"):
        serve_medusa(random_heads(target), "sglang")


def test_an_export_never_overwrites_and_leaves_nothing_half_written(target, tmp_path):
    served = serve_eagle(eagle(target), "vllm", 64)
    with pytest.raises(ValueError, match=r"expected torch\.Tensor"):  # after config.json
        Served(served.config, {"fc.weight": "no tensor"}).write(tmp_path / "served")
    assert not (tmp_path / "served").exists()
    served.write(tmp_path / "served")
    assert {path.name for path in tmp_path.iterdir()} == {"served"}
    assert len({path.stat().st_mode for path in (tmp_path / "served").iterdir()}) == 1
    with pytest.raises(HeadError, match="already exists; give another --out"):
        served.write(tmp_path / "served")


@pytest.mark.parametrize(
    ("kind", "told"), [("student", r"a draft LM.* as it is"), ("table", "it is")]
)
def test_drafters_that_need_no_export_are_refused_with_the_reason(tmp_path, kind, told):
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "config.json").write_text("{}")
    with pytest.raises(HeadError, match=told):
        served_head(load_recipe(RECIPES / "tiny_eagle.yaml", [f"output.dir={tmp_path}"]), "vllm")


@pytest.mark.parametrize(
    ("kind", "told"), [("student", "is a draft LM"), ("table", "is a Max-Gram table")]
)
def test_a_drafter_given_by_folder_is_not_replaced_by_the_runs_head(tmp_path, kind, told):
    for folder in (tmp_path / "eagle", tmp_path / kind):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        shutil.copy(RECIPES / "tiny_eagle.yaml", folder / "recipe.yaml")
    out = ("--engine", "vllm", "--out", str(tmp_path / "out"))
    done = run_here("eval/export.py", str(tmp_path / kind), *out, cwd=ROOT)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_head_in_an_engines_layout_is_not_exported_again(target, tmp_path):
    head = random_head(target, block_size=1, fusion="linear", input_norm=False)
    serve_eagle(head, "vllm", 64).write(tmp_path / "head")
    recipe = load_recipe(RECIPES / "tiny_eagle.yaml", [f"head.model={tmp_path / 'head'}"])
    with pytest.raises(HeadError, match="head is in the layout of an engine: load it there"):
        served_head(recipe, "sglang")


def test_the_head_of_a_run_is_found_and_checked(tmp_path):
    tiny, other = Target.load("tiny"), random_target()
    for name, make, served, told in (
        ("eagle", eagle, lambda head: serve_eagle(head, "vllm", tiny.context), "no trained head"),
        ("medusa", random_heads, lambda heads: serve_medusa(heads, "vllm"), "no trained Medusa"),
    ):
        run = load_recipe(RECIPES / f"tiny_{name}.yaml", [f"output.dir={tmp_path}"])
        with pytest.raises(HeadError, match=told):
            served_head(run, "vllm")
        head = make(tiny)
        head.save_pretrained(tmp_path / name)
        found, expected = served_head(run, "vllm"), served(head)
        assert found.config == expected.config
        torch.testing.assert_close(found.tensors, expected.tensors)
        make(other).save_pretrained(tmp_path / name)
        with pytest.raises(TargetError, match="trained for"):
            served_head(run, "vllm")
