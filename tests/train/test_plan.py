"""Plans need no network, and the 7B head works as given: nothing depends on tiny sizes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import run_here
from test_loop import SCALE, ToyRows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    Mamba2Config,
    Olmo3Config,
    Qwen3Config,
)

from specdraft.data.store.storage import Storage
from specdraft.data.store.token_builder import build_tokens
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.falcon import FalconHead
from specdraft.models.sar.blocks import block_index
from specdraft.models.shapes import KNOWN, TargetShape, eagle3_config, head_config, target_shape
from specdraft.models.student import make_student
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import RecipeError, TargetError
from specdraft.recipes.load import load_recipe
from specdraft.train.draft_cost import compared
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.loop import fit
from specdraft.train.heads import head_kind
from specdraft.train.objectives.csgd import CoupledGlancing
from specdraft.train.objectives.training_time_test import TrainingTimeTest
from specdraft.train.plan import head_memory, known_sizes, make_plan, measured_flops
from specdraft.train.plan_lines import format_bytes, format_seconds, plan_lines

RECIPES = Path(__file__).parents[2] / "recipes"


def load(name, *overrides):
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


def test_the_7b_plan_has_the_sizes_of_the_paper():
    recipe = load("vicuna7b_paper")
    plan = make_plan(recipe, ranks=8)
    assert plan.head_layers == pytest.approx(2.7, abs=0.1)
    assert plan.target.parameters == pytest.approx(6.74e9, rel=0.01)
    assert plan.rows == 68000
    assert plan.cache_bytes == 68000 * 2048 * (4096 * 2 + 5)  # features, token and mask
    assert plan.steps == 68000 // 32 * 20
    alone = make_plan(load("vicuna7b_paper", "train.eval_every=null"), ranks=8).memory_per_gpu
    assert 8e9 < alone < 24e9
    rest = plan.target.parameters - plan.target.embedding_parameters  # also held when evaluating
    assert plan.memory_per_gpu - alone == 2 * rest
    text = dict(plan_lines(plan, recipe, 8, 100e12))
    assert "2.66 decoder layers" in text["head"]
    assert "1.14 TB" in text["feature cache"]
    assert (
        "42,500, of 32 rows each (accumulation 1 x processes 8 x rows per forward 4)"
        in text["steps"]
    )


def test_a_plan_that_needs_a_large_disk_names_smaller_alternatives():
    def less_disk(name: str, *changes: str) -> str | None:
        recipe = load(name, *changes)
        return dict(plan_lines(make_plan(recipe), recipe, 1, 1e12)).get("on less disk")

    told = less_disk("vicuna7b")
    assert told.startswith("data.feature_dtype=int8: at most 572 GB; data.features=online: none")
    assert less_disk("vicuna7b", "data.feature_dtype=int8").startswith("data.features=online")
    assert less_disk("vicuna7b", "data.features=online") is None
    assert less_disk("tiny", "data.limit=3000") is None


def test_an_eagle3_head_count_that_does_not_divide_the_width_can_be_planned():
    recipe = load_recipe("recipes/tiny_eagle3.yaml", ["head.heads=7"])
    found = compared(eagle3_config(recipe, target_shape(recipe)[0]), 4, 4)
    usual = load_recipe("recipes/tiny_eagle3.yaml", ["head.heads=4", "head.kv_heads=4"])
    plain = compared(eagle3_config(usual, target_shape(usual)[0]), 4, 4)
    assert found["EAGLE-1 pass"] == plain["EAGLE-1 pass"]


def test_a_dry_run_shows_the_plan_before_the_recipe():
    shown = run_here("train/falcon.py", "recipes/tiny.yaml", "--dry-run").stdout
    assert shown.startswith("target ")
    assert 0 < shown.index("memory   ") < shown.index("\nname: tiny\n")


def test_a_dry_run_tells_that_a_base_model_has_no_chat_template(tmp_path):
    base = shutil.copytree(bundled_target_dir(), tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    chats.write_text(json.dumps({"messages": said}) + "\n")
    texts.write_text(json.dumps({"text": "Once upon a time there was a fox."}) + "\n")
    given = ["recipes/tiny.yaml", "--dry-run", f"target.model={base}"]
    refused = run_here("train/falcon.py", *given, f"data.sources=[{chats}]")
    assert refused.returncode == 2
    assert "has no chat template; put a chat_template.jinja into" in refused.stderr
    planned = run_here("train/falcon.py", *given, f"data.sources=[{texts}]", "data.format=text")
    assert planned.returncode == 0, planned.stderr


def test_a_plan_shows_the_bytes_a_draft_reads():
    """Counted by hand for H = 4096, an MLP of 11008 and 32,000 tokens, in bfloat16 except for the
    LSTM head, which has a state."""
    square, lm_head = 2 * 4096**2, 2 * 32000 * 4096
    layer = 4 * square + 3 * 2 * 4096 * 11008
    options = ["head.fusion=linear", "head.reads=newest", "head.coupling=recurrent"]
    coupled = load("vicuna7b", *options, "head.block_size=3")
    costs = compared(head_config(coupled, target_shape(coupled)[0]), 2, 2)
    found = {name: (cost.head, cost.lm_head, cost.depths) for name, cost in costs.items()}
    bias_and_norms = 2 * 4096  # negligible
    assert found["EAGLE-1 pass"][0] == pytest.approx(2 * square + layer, abs=bias_and_norms * 2)
    # Each of the two slots after the first adds its own matrix and a pass through the cell, 7 H^2.
    expected = 2 * square + layer + 2 * square + 2 * 7 * square
    assert found["draft pass"][0] == pytest.approx(expected, abs=bias_and_norms * 2)
    assert found["LSTM pass"][0] == pytest.approx(
        2 * (20 * square + layer), abs=bias_and_norms * 24
    )
    assert [each[1:] for each in found.values()] == [(3 * lm_head, 3), (lm_head, 1), (lm_head, 3)]
    text = dict(plan_lines(make_plan(coupled, ranks=8), coupled, 8, 100e12))
    assert "reads 734 MB (head 472, lm_head 262)" in text["EAGLE-1 pass"]
    precise = load("vicuna7b", *options, "head.block_size=3", "eval.head_dtype=float32")
    text = dict(plan_lines(make_plan(precise, ranks=8), precise, 8, 100e12))
    assert "reads 1,206 MB (head 944, lm_head 262)" in text["EAGLE-1 pass"]


def test_a_plan_shows_small_models_without_rounding_them_to_zero():
    recipe = load("tiny")
    text = dict(plan_lines(make_plan(recipe), recipe, 1, 1e12))
    assert text["target"].startswith("tiny: 2.44 M parameters, 12 layers x 128")
    assert "0 MB" not in text["EAGLE-1 pass"]


@pytest.mark.parametrize("name", ["vicuna13b", "llama2_7b_chat", "llama2_13b_chat", "qwen2_5_7b"])
def test_every_published_target_is_planned_offline(name):
    plan = make_plan(load(name), ranks=8)
    assert 1.5 < plan.head_layers < 3
    assert all(text for _, text in plan_lines(plan, load(name), 8, 100e12))


@pytest.mark.parametrize(
    ("name", "size_", "trained", "student", "cache"),
    [
        ("tiny_distill", 0.625280e6, 0.625280e6, "layers 0, 11 of the target", "512 bytes"),
        ("vicuna7b_distill", 68.03e6, 68.03e6, "a config of its own", "1.14 TB"),
        # 16 * 22 layers * (4 attention and 3 MLP layers, inputs + outputs)
        ("llama2_13b_lora", 1.100e9, 12.62e6, "TinyLlama/TinyLlama_v1.1", "the target runs"),
        ("llama2_70b_draft", 6.74e9, 0, "meta-llama/Llama-2-7b-chat-hf", None),
    ],
)
def test_every_student_is_planned_offline(name, size_, trained, student, cache):
    recipe = load(name)
    plan = make_plan(recipe, ranks=8)
    assert plan.student.shape.parameters == pytest.approx(size_, rel=0.01)
    assert plan.student.trained == pytest.approx(trained, rel=0.01)
    text = dict(plan_lines(plan, recipe, 8, 100e12))
    assert student in text["student"]
    assert cache is None or cache in text["feature cache"]
    assert (trained == 0) == ("steps" not in text)


@pytest.mark.parametrize("changes", [{}, {"embeddings": "shared"}, {"training": "lora"}])
def test_the_planned_student_has_the_parameters_of_the_built_one(changes):
    recipe = load("tiny_distill", *(f"student.{key}={value}" for key, value in changes.items()))
    student = make_student(recipe.student, Target.load("tiny"))
    plan = make_plan(recipe).student
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    assert plan.trained == trained
    frozen = sum(p.numel() for name, p in student.named_parameters() if "lora" not in name)
    assert plan.shape.parameters == frozen


@pytest.mark.parametrize("model", [None, "models/tiny"])
def test_frozen_weights_of_a_student_are_planned_in_their_own_dtype(model):
    """Float32 for a pruned student; the target's dtype for a pretrained one."""
    own = [f"student.model={model}", "student.keep_layers=null"] if model else []
    recipe = load("tiny_distill", "target.dtype=bfloat16", "student.training=lora", *own)
    student = make_student(recipe.student, Target.of_recipe(recipe.target))
    frozen = sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    assert make_plan(recipe).student.frozen_bytes == frozen


def test_a_plan_refuses_an_invalid_student():
    with pytest.raises(RecipeError, match=r"keep_layers = \[0, 12\]: tiny has layers 0 to 11"):
        make_plan(load("tiny_distill", "student.keep_layers=[0,12]"))
    with pytest.raises(TargetError, match=r"vocabularies of 152064 and 32000"):
        make_plan(load("llama2_70b_draft", "student.model=Qwen/Qwen2.5-7B-Instruct"))
    with pytest.raises(RecipeError, match=r"student.heads = 7.*student.hidden \(768\)"):
        make_plan(load("vicuna7b_distill", "student.heads=7"))


@pytest.mark.parametrize(("heads", "dim"), [(1000, 0), (42, 3), (128, 1)])
def test_a_plan_refuses_an_invalid_eagle3_head(heads, dim):
    size = rf"hidden_size \(128\) // heads must be even and above 0, not {dim}"
    with pytest.raises(RecipeError, match=rf"head.heads = {heads}: {size}"):
        make_plan(load("tiny_eagle3", f"head.heads={heads}", "head.kv_heads=1"))


@pytest.mark.parametrize("name", ["vicuna7b", "vicuna7b_distill"])
def test_checkpointing_is_planned_with_less_memory(name):
    rollout = "train.rollout=3"  # checkpointing does not change a single pass
    plain, less = load(name, rollout), load(name, rollout, "train.checkpointing=true")
    assert make_plan(less).memory_per_gpu < 0.9 * make_plan(plain).memory_per_gpu


WIDE = TargetShape(256, layers=6, heads=4, kv_heads=4, intermediate_size=704, vocab_size=512)
EAGLE3 = ("data.feature_layers=[1,2,3]", "optim.name=adamw")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("rollout", [1, 6])
@pytest.mark.parametrize("name", ["tiny", "tiny_eagle", "tiny_eagle3"])
def test_the_plan_predicts_the_memory_kept_for_backward(name, rollout, precision):
    """Against the bytes autograd holds for a row with loss on every token."""
    options = [f"train.precision={precision}", f"train.rollout={rollout}", "loss.depth_decay=1.0"]
    recipe = load(name, *options, *(EAGLE3 if name == "tiny_eagle3" else ()))
    ends = TargetEmbeddings(*torch.randn(2, WIDE.vocab_size, WIDE.hidden_size))
    if name == "tiny_eagle3":
        config = eagle3_config(recipe, WIDE)
        head = Eagle3Head.of(config, ends.lm_head_weight, None, 1.0)
        objective = TrainingTimeTest(recipe, ends, config)
    else:
        head = FalconHead(head_config(recipe, WIDE))
        objective = CoupledGlancing(recipe, ends, head.config)
    length, width = recipe.data.max_length, WIDE.hidden_size * Storage.of(recipe.data).parts
    row = {"input_ids": torch.arange(length), "loss_mask": torch.ones(length, dtype=torch.bool)}
    batch = objective.collate([row | {"features": torch.randn(length, width)}], [(0, 0, 0)])
    given = [*head.parameters(), ends.embedding, ends.lm_head_weight, batch.features]
    given, kept = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    cast = precision == "bfloat16"
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
    ):
        objective.loss(head, batch, *objective.plan(head, batch, 0.0))
    held = sum(size for place, size in kept.items() if place not in given)
    held -= cast * 2 * sum(one.numel() for one in head.parameters() if one.ndim == 2)
    planned = head_memory(recipe, WIDE, 0, 2 * length) - head_memory(recipe, WIDE, 0, length)
    planned -= 20 * length * width  # features, read and revised
    assert 0.75 < held / planned < 1.15


def test_a_plan_counts_waiting_features_and_less_memory_for_small_forwards():
    def memory(name: str, *options: str) -> int:
        return make_plan(load(name, *options)).memory_per_gpu

    whole, cut = memory("tiny"), memory("tiny", "train.accumulation=4", "train.batch_size=32")
    assert cut - whole == 6 * 8 * 512 * 2 * 128 * 4  # of this step and the next
    for name in ("tiny", "tiny_distill"):
        row, some, all_ = (memory(name, f"train.forward_tokens={n}") for n in (1, 1024, 4096))
        assert row < some < all_ == memory(name)
    assert memory("tiny", "train.alignments=all") > whole
    assert memory("tiny_medusa", "train.alignments=all") == memory("tiny_medusa")  # has none


def test_the_recipe_decides_whether_a_head_is_checkpointed():
    target = Target.load("tiny")
    cache = SimpleNamespace(scales={"embed_scale": 1.0, "feature_scale": 1.0})
    for told in (False, True):
        recipe = load("tiny", f"train.checkpointing={str(told).lower()}")
        assert head_kind("falcon").make(recipe, target, cache).checkpointing == told


def test_counted_rows_replace_the_upper_bound_in_the_plan():
    recipe = load("vicuna7b")
    plan = make_plan(recipe, 8, rows=640, tokens=123456)
    text = dict(plan_lines(plan, recipe, 8, 100e12))
    assert text["data"] == "640 rows, 123,456 tokens"
    assert plan.steps == 20 * 20


def test_data_limit_counts_the_rows_left_after_the_holdout():
    assert make_plan(load("vicuna7b", "data.limit=600", "data.holdout=200")).rows == 600


def test_a_cache_of_another_chat_template_is_not_counted(tmp_path):
    here = "data.limit=20", f"data.cache_dir={tmp_path}"
    own, other = load("tiny", *here), load("tiny", *here, "target.chat_template=vicuna")
    cache = build_tokens(own, Target.of_recipe(own.target).tokenizer)
    assert known_sizes(own)[:2] == (20, cache.stats["tokens"])
    assert known_sizes(other) == (20, None, None)
    cache = build_tokens(other, Target.of_recipe(other.target).tokenizer)
    assert known_sizes(other)[:2] == (20, cache.stats["tokens"])


def test_without_rows_the_plan_says_so():
    recipe = load("vicuna7b", "data.limit=null")
    plan = make_plan(recipe, 8)
    text = dict(plan_lines(plan, recipe, 8, 100e12))
    assert plan.steps is None
    assert "data.limit" in text["data"]


def test_an_unknown_target_is_an_error_that_says_what_to_give(monkeypatch):
    def unreachable(*_, **__):
        raise OSError

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    told = r"no config of nobody/nothing here.*; give an existing folder or a Hub id \(owner/name\)"
    with pytest.raises(TargetError, match=told):
        target_shape(load("vicuna7b", "target.model=nobody/nothing"))


def test_shapes_are_read_from_a_config():
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=96, vocab_size=77)  # fmt: skip
    shape = TargetShape.of(config)
    assert (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads) == (64, 3, 4, 2)
    assert (shape.intermediate_size, shape.vocab_size) == (96, 77)
    assert shape.linear_layers["k_proj"] == (64, 32)


def test_the_shape_of_a_vision_model_is_that_of_its_text_model():
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
    config = Gemma3Config(text_config={**sizes, "vocab_size": 77})
    assert TargetShape.of(config) == TargetShape.of(config.get_text_config())
    assert TargetShape.of(config).heads == 4


def test_a_head_takes_the_rope_theta_of_full_attention_layers():
    assert TargetShape.of(Olmo3Config()).rope_theta == 500000.0
    assert TargetShape.of(Gemma3Config()).rope_theta == 1e6


def test_a_head_for_a_target_without_attention_has_heads_of_64_channels():
    shape = TargetShape.of(Mamba2Config(hidden_size=256, num_heads=16, head_dim=32, vocab_size=77))
    config = head_config(load("tiny"), shape)
    assert (config.heads, config.head_dim) == (4, 64)


def test_attention_heads_may_be_wider_than_the_hidden_size_divided_by_their_number():
    config = Qwen3Config(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
                         num_key_value_heads=2, intermediate_size=96, vocab_size=77)  # fmt: skip
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    sizes = TargetShape.of(config).linear_layers
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(layer, name)
        assert sizes[name] == (linear.in_features, linear.out_features)


def test_a_head_count_that_does_not_divide_the_width_is_refused():
    with pytest.raises(RecipeError, match=r"head.heads.*must divide hidden_size \(4096\)"):
        head_config(load("vicuna7b", "head.heads=3"), KNOWN["lmsys/vicuna-7b-v1.5"])


def test_the_full_7b_head_takes_a_step_on_the_meta_device():
    recipe = load("vicuna7b_paper")  # coupled slots would need real block numbers
    with torch.device("meta"):
        head = FalconHead(head_config(recipe, KNOWN[recipe.target.model]))
        ahead, features = torch.zeros(2, 1, 8, 4096)
        predicted = head(ahead, features, block_index(8, 2, 1)[None])
    assert predicted.shape == (1, 1, 8, 4096)
    predicted.sum().backward()
    assert all(p.grad is not None for p in head.parameters())


def test_the_7b_recipe_trains_at_reduced_width(tmp_path, monkeypatch):
    """Two steps: weights behind a zero matrix get a gradient only in the second."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    changes = ["train.epochs=null", "train.steps=2", "train.batch_size=2", "train.eval_every=null"]
    changes += ["train.threads=1"]
    recipe = load("vicuna7b", *changes, f"output.dir={tmp_path}")
    shape = replace(KNOWN[recipe.target.model], hidden_size=128, intermediate_size=344)
    head = FalconHead(head_config(recipe, shape, feature_scale=SCALE))
    data = ToyRows(count=4)
    for row in data.rows:
        row["features"] = torch.randn(len(row["input_ids"]), 128, dtype=torch.bfloat16)
    embedding, lm_head = torch.randn(2, 32000, 128, dtype=torch.bfloat16)
    ends = TargetEmbeddings(embedding, lm_head)
    before = [p.clone() for p in head.parameters()]
    objective = CoupledGlancing(recipe, ends, head.config)
    assert fit(head, data, objective, recipe, make_accelerator(recipe)).step == 2
    assert all((p != b).any() for p, b in zip(head.parameters(), before, strict=True))


def test_bytes_and_durations_are_formatted_with_units():
    assert format_bytes(1.14e12) == "1.14 TB"
    assert format_bytes(2048) == "2.05 KB"
    assert format_seconds(31 * 60) == "31.0 minutes"
    assert format_seconds(5400 * 2) == "3.0 hours"
    assert measured_flops(torch.device("cpu"), torch.float32, width=64) > 1e6
