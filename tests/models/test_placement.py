"""A target spread over devices and disk equals the whole target bit for bit."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from accelerate.utils import DistributedType
from commands import ROOT, end, run_here, start_ranks
from decoding import PATHS, Foreseeing, decode, prompts
from random_models import random_head
from shallow import shallow_target
from small_tokenizer import small_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.data.store.features import OnlineFeatures
from specdraft.data.store.token_builder import build_tokens
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.kv import KVPool
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.plan import Plan, Segment
from specdraft.eval.engine.request import Request
from specdraft.eval.generation.answers import build_caches
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.student import pruned
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, TargetError
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.recipes.schema import TargetSection
from specdraft.train.fit.accelerator import check_launch, load_target
from specdraft.train.plan import make_plan
from specdraft.train.plan_lines import plan_lines

LAYERS = {f"model.layers.{n}": "disk" if n % 2 else "cpu" for n in range(4)}
MIDDLE = {"model.embed_tokens": "cpu", **LAYERS, "model.norm": "cpu", "model.rotary_emb": "cpu"}
MAPS = {
    "layers": {**MIDDLE, "lm_head": "cpu"},
    "ends": {**MIDDLE, "model.embed_tokens": "disk", "lm_head": "disk"},
    "everything": {"": "disk"},
}
TINY = "{model.embed_tokens: cpu, model.layers: disk, model.norm: disk, lm_head: cpu}"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    """A random Llama of four layers with a tokenizer, saved."""
    torch.manual_seed(0)
    tokenizer, folder = small_tokenizer(), tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=request.param,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def placed(folder, spread, dtype="float32", **changes) -> Target:
    section = TargetSection(model=str(folder), dtype=dtype, device_map=spread, **changes)
    return Target.of_recipe(section)


@pytest.mark.parametrize("spread", MAPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_logits_and_embeddings_equal_those_of_the_whole_target(folder, spread, dtype):
    whole, target = Target.load(str(folder), dtype=dtype), placed(folder, MAPS[spread], dtype)
    assert any(tensor.is_meta for tensor in target.model.parameters())
    assert (target.device, target.dtype) == (whole.device, whole.dtype)
    assert target.identity() == whole.identity()
    ids = torch.tensor([prompts()[3], prompts()[3][::-1]])
    features = target.features(ids)
    assert torch.equal(features, whole.features(ids))
    wide = target.features(ids, layers=(1, 3))
    assert torch.equal(wide, whole.features(ids, layers=(1, 3)))
    assert torch.equal(wide[..., :16], features)
    assert torch.equal(target.logits(features), whole.logits(features))
    assert torch.equal(target.embed(ids), whole.embed(ids))
    ends, expected = target.embeddings(), whole.embeddings()
    assert torch.equal(ends.embedding, expected.embedding)
    assert torch.equal(ends.lm_head_weight, expected.lm_head_weight)


@pytest.mark.parametrize("spread", ["ends", "everything"])
def test_decoding_equals_that_of_the_whole_target(folder, spread):
    whole, target = Target.load(str(folder)), placed(folder, MAPS[spread])
    requests = [
        Request(prompt, 8, temperature=0.8 * (n % 2), seed=n, eos_ids=frozenset())
        for n, prompt in enumerate(prompts(4))
    ]
    expected = decode(Decoder(whole, None, 2, 64), requests)
    answers = zip(requests, expected, strict=True)
    right = Foreseeing({tuple(request.prompt): answer for request, answer in answers})
    falcon = FalconDrafter(random_head(target, 2), target, StaticTree(PATHS, 2), 2, 64)
    deep = random_head(target, 2, feature_layers=(2, 1))
    deep = FalconDrafter(deep, target, StaticTree(PATHS, 2), 2, 64)
    for drafter in (None, right, PromptLookup(1, 5, 2), falcon, deep):
        decoder = Decoder(target, drafter, 2, 64)
        assert decode(decoder, requests, accepts=drafter is right) == expected


def test_a_callers_model_may_be_offloaded(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    requests = [Request(prompts()[2], 9)]
    expected = decode(Decoder(Target.of_model(model), None, 1, 64), requests)
    cpu_offload(model, "cpu")
    target = Target.of_model(model)
    assert decode(Decoder(target, None, 1, 64), requests) == expected
    assert torch.equal(target.lm_head_weight, TargetEmbeddings.load(str(folder)).lm_head_weight)


def test_a_packed_copy_shares_offloaded_weights_but_has_its_own_hooks(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    cpu_offload(model, "cpu")
    target = Target.of_model(model)
    theirs, views = model.model, (target.model.model, PackedTarget(target, 1, 64).base)
    for view in views:
        pairs = [*zip(view.modules(), theirs.modules(), strict=True)]
        hooks = [(a._hf_hook, b._hf_hook) for a, b in pairs if hasattr(b, "_hf_hook")]
        assert any(hook.weights_map is not None for hook, _ in hooks)
        for ours, their in hooks:
            assert ours is not their  # a forward leaves state in its hooks
            assert ours.weights_map is their.weights_map


def test_threads_can_use_an_offloaded_target_at_the_same_time(folder):
    whole, target = Target.load(str(folder)), placed(folder, MAPS["everything"])
    ids = torch.tensor([prompts()[4]])
    expected = whole.features(ids)
    scores = whole.logits(expected)

    def work(number: int) -> bool:
        if number % 2:
            return torch.equal(target.logits(expected), scores)
        return torch.equal(target.features(ids), expected)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(60)))


def test_max_memory_is_respected(folder):
    target = placed(folder, "auto", max_memory={"cpu": "20KB"})
    assert set(target.model.hf_device_map.values()) == {"disk"}
    assert not any(tensor.is_meta for tensor in placed(folder, "auto").model.parameters())


# -- caches and training ---------------------------------------------------------------------------


def recipe_of(folder, out, spread, **data):
    return from_dict(
        {
            "name": "placed",
            "target": {"model": str(folder), "device_map": spread},
            "data": {"sources": ["tiny"], "limit": 12, "max_length": 48, **data},
            "train": {"steps": 1, "batch_size": 4},
            "output": {"dir": str(out)},
        }
    )


def accelerator(processes: int = 1):
    return SimpleNamespace(
        num_processes=processes,
        process_index=0,
        distributed_type=DistributedType.NO,
        device=torch.device("cpu"),
        wait_for_everyone=lambda: None,
    )


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("features-*/*"))}


@pytest.mark.parametrize("data", [{}, {"answers": "target", "max_new_tokens": 8}], ids=str)
def test_caches_equal_those_of_the_whole_target_byte_for_byte(folder, tmp_path, data):
    for name, spread in (("whole", None), ("spread", MAPS["ends"])):
        recipe = recipe_of(folder, tmp_path, spread, cache_dir=str(tmp_path / name), **data)
        build_caches(recipe, Target.of_recipe(recipe.target), accelerator())
    whole, spread = contents(tmp_path / "whole"), contents(tmp_path / "spread")
    assert whole == spread
    assert "manifest.json" in whole


def test_online_features_equal_those_of_the_whole_target(folder, tmp_path):
    recipe = recipe_of(folder, tmp_path, MAPS["everything"], cache_dir=str(tmp_path))
    whole, spread = Target.load(str(folder)), Target.of_recipe(recipe.target)
    tokens = build_tokens(recipe, whole.tokenizer)
    rows = [OnlineFeatures(recipe, tokens, target)[1]["features"] for target in (whole, spread)]
    assert torch.equal(*rows)


SMALL = ["train.steps=2", "train.batch_size=4", "data.limit=8", "eval.limit=1", "eval.threads=1"]
SMALL += ["eval.tree=tiny_coupled_k3", "data.feature_layers=[1]"]
SMALL += ["eval.max_new_tokens=5", "eval.methods=[plain,falcon_tree]", "train.log_every=1"]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> str:
    return f"target.model={shallow_target(tmp_path_factory.mktemp('shallow'))}"


def test_a_run_gives_the_same_caches_and_losses_as_with_the_whole_target(tmp_path, shallow):
    runs = {"whole": ["train.eval_every=null"], "spread": ["train.eval_every=2"]}
    runs["spread"] += [f"target.device_map={TINY}", "eval.validation=1"]
    for name, overrides in runs.items():
        places = [f"output.dir={tmp_path / name}", f"data.cache_dir={tmp_path / name / 'cache'}"]
        command = ["train/falcon.py", "recipes/tiny.yaml", shallow, *SMALL, *overrides, *places]
        done = run_here(*command)
        assert done.returncode == 0, done.stderr[-2000:]
    assert contents(tmp_path / "whole/cache") == contents(tmp_path / "spread/cache")
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in runs]
    losses = [[json.loads(x)["loss"] for x in log if '"loss"' in x] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    for name in runs:
        rows = json.loads((tmp_path / name / "report.json").read_text())["runs"]
        assert rows
        assert all(row["identical"] == 1 for row in rows)


def test_one_process_makes_the_caches_and_several_train_from_them(tmp_path, shallow):
    places = [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    command = ["recipes/tiny.yaml", shallow, *SMALL, *places, "train.eval_every=null"]
    command += [f"target.device_map={TINY}"]
    made = run_here("data/cache.py", *command, "--preview", "0")
    assert made.returncode == 0, made.stderr[-2000:]
    two = start_ranks("train/falcon.py", *command, ACCELERATE_USE_CPU="true")
    errors = end(two)
    assert [rank.returncode for rank in two] == [0, 0], errors[-2000:]
    rows = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [(row["method"], row["identical"]) for row in rows] == [("plain", 1), ("falcon_tree", 1)]


def test_several_processes_do_not_load_the_target_and_train_only_from_caches(folder, tmp_path):
    recipe = recipe_of(folder, tmp_path, "auto", cache_dir=str(tmp_path))
    target = load_target(recipe, accelerator(8))
    assert all(tensor.is_meta for tensor in target.model.parameters())
    with pytest.raises(TargetError, match="8 processes would each do so; make the caches in one p"):
        build_caches(recipe, target, accelerator())
    assert not list(tmp_path.glob("features-*"))
    with pytest.raises(TargetError, match="make the caches in one process, which has all devices"):
        Decoder(target)
    with pytest.raises(TargetError, match="make the caches in one process"):
        pruned(target, (0,), shared=False)
    build_caches(recipe, load_target(recipe, accelerator()), accelerator())
    _, data = build_caches(recipe, target, accelerator())
    assert len(data) > 0
    whole = load_target(recipe, accelerator(8), alone=True)
    assert torch.equal(target.embeddings().lm_head_weight, whole.lm_head_weight)
    assert target.eos_ids == whole.eos_ids


def test_evaluating_during_training_with_several_processes_is_refused():
    changed = ["target.device_map=auto", "train.eval_every=7"]
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", changed)
    check_launch(recipe, accelerator(1))
    with pytest.raises(RecipeError, match=r"2 processes .*; set train\.eval_every=null \(now 7"):
        check_launch(recipe, accelerator(2))


def test_the_plan_shows_what_is_spread_over_devices():
    path = ROOT / "recipes/llama2_70b_draft.yaml"
    recipe = load_recipe(path)
    text = dict(plan_lines(make_plan(recipe, ranks=1), recipe, 1, 1e12))
    assert text["placement"] == "target.device_map = auto: 138 GB over the devices of one process"
    recipe = load_recipe(path, ["target.device_map=null"])
    assert "placement" not in dict(plan_lines(make_plan(recipe, ranks=1), recipe, 1, 1e12))
    online = ["data.features=online", "target.device_map=auto"]
    recipe = load_recipe(ROOT / "recipes/vicuna7b.yaml", online)
    text = dict(plan_lines(make_plan(recipe, ranks=1), recipe, 1, 1e12))
    assert text["feature cache"].endswith("the target runs in training, 13.5 GB over all devices")


# -- several devices -------------------------------------------------------------------------------


def test_every_layers_cache_and_masks_are_on_its_own_device():
    """The meta device is the second one: it computes nothing, and cannot be mixed with others."""
    here, there = torch.device("cpu"), torch.device("meta")
    pool = KVPool([here, there, here], rows=2, kv_heads=1, capacity=16, head_dim=4)
    assert [layer.device for layer in pool.layers] == [here, there, here]
    assert [len(block) for block in pool.tensors] == [2, 1]
    pool.lengths = [3, 5]
    bias = torch.zeros(2, 7)
    segments = [Segment(0, 3, 2, torch.zeros(2, 5)), Segment(1, 5, 2, bias)]
    plan = Plan(pool, segments, here)
    assert plan.on(here) is plan
    assert plan.on(there) is plan.on(there)
    for layer, device in enumerate([here, there, here]):
        query, key = torch.ones(1, 2, 4, 4, device=device), torch.ones(1, 1, 4, 4, device=device)
        mine = plan.on(device)
        assert mine.attend(layer, query, key, key).device == device
        tensors = [*mine.mapping, *(group.mask for group in mine.groups)]
        assert {tensor.device for tensor in tensors} == {device}
    pool.keep(0, [0, 1])
    pool.keep(1, [0, 1])
    assert pool.layers[2][0, 1, 0, 5:7].eq(1).all()


def test_keeping_an_accepted_path_moves_the_slots_of_all_layers():
    pool = KVPool([torch.device("cpu"), torch.device("meta")] * 2, 1, 1, 8, 2)
    before = [torch.randn(2, 1, 1, 8, 2) for _ in range(2)]
    for layer, values in zip(pool.layers[::2], before, strict=True):
        layer.copy_(values)
    pool.keep(0, [0, 2, 3])
    for layer, values in zip(pool.layers[::2], before, strict=True):
        assert torch.equal(layer[:, :, :, :3], values[:, :, :, [0, 2, 3]])


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"device_map": "automatic"}, "must be one of auto, balanced, sequential; nearest is auto"),
        ({"device_map": "cuda"}, "or must be a mapping, not text"),
        ({"device_map": {"model": 1.5}}, "entry 'model' (1.5) must be a whole number, not"),
        ({"device_map": "auto", "max_memory": {"0": 40}}, "entry '0' (40) must be text, not a who"),
        ({"max_memory": {0: "40GiB"}}, "needs target.device_map=auto, balanced or sequential"),
    ],
    ids=str,
)
def test_an_invalid_placement_is_refused(section, expected):
    with pytest.raises(RecipeError) as caught:
        TargetSection(**section)
    assert expected in str(caught.value)


def test_a_placement_survives_a_round_trip_through_json():
    spread = {"model": 0, "lm_head": "disk"}
    for section in ({"device_map": spread}, {"device_map": "auto", "max_memory": {0: "1GiB"}}):
        known = TargetSection(**section)
        again = json.loads(json.dumps({n: getattr(known, n) for n in section}))
        assert TargetSection(**again) == known


def test_a_missing_device_and_an_invalid_memory_size_are_refused(folder):
    for place in (7, "cuda:7", "gpu"):
        with pytest.raises(TargetError, match=r"target\.device_map: no device .* here; there are"):
            placed(folder, {"": place})
    with pytest.raises(TargetError, match=r"target\.max_memory: no device '7' here"):
        placed(folder, "auto", max_memory={7: "1GiB"})
    with pytest.raises(TargetError, match=r"cannot load .*: `size` much is not in a valid format"):
        placed(folder, "auto", max_memory={"cpu": "much"})
    with pytest.raises(TargetError, match="cannot load"):
        placed(folder, {"model.layers": "disk"})


def test_tied_embeddings_cannot_be_placed_apart(folder):
    parted = {**MAPS["layers"], "lm_head": "disk"}
    if not Target.load(str(folder)).config.tie_word_embeddings:
        assert placed(folder, parted).lm_head.weight.is_meta
        return
    with pytest.raises(
        TargetError, match=r"separates 'lm_head\.weight' from the matrix that it is tied"
    ):
        placed(folder, parted)


def test_a_student_cannot_copy_layers_that_lie_on_disk(folder):
    with pytest.raises(TargetError, match=r"keep_layers = \[1\]: copies layers of .* or on disk"):
        pruned(placed(folder, MAPS["layers"]), (1,), shared=False)
