"""EAGLE-3: fused layers of the target, training on its own outputs, its own lm_head; in training,
while drafting, and in the layouts of engines."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from commands import run_here
from decoding import check_as_plain, decode, plain_tokens, prompts
from random_models import HIDDEN, VOCAB, random_eagle3, random_head, random_target
from safetensors.torch import load_file, save_file
from test_feature_layers import Recording, hidden_states
from test_loop import ToyRows, log_lines, make_ends, make_recipe
from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specdraft.eval.costing.tree_growth import Text, rank_traces, shares_of
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.methods.registry import Setup, make_drafter, tree_of
from specdraft.eval.methods.trained import Trained
from specdraft.models.eagle3 import Eagle3Head, vocabulary_of
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.published import load_head
from specdraft.models.sar.blocks import block_index
from specdraft.models.serving import serve_eagle, serve_eagle3
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import HeadError, RecipeError, TargetError
from specdraft.recipes.load import load_recipe
from specdraft.train.eagle3 import check
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.loop import fit
from specdraft.train.heads import head_kind
from specdraft.train.objectives.training_time_test import TrainingTimeTest

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = RECIPES / "tiny_eagle3.yaml"
LAYERS = (1, 2, 3)
FORMS = [
    {},
    {"layer_norms": "each", "norm_output": True, "draft_vocab": 12},  # EAGLE-3.1
    {"layer_norms": "joint", "norm_residual": True, "feature_layers": (1, 3)},
    {"rope": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}, "draft_vocab": 9},
]
every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module")
def target():
    return random_target(layers=4)


def read(target, head, ids) -> tuple:
    """What a head reads of tokens [T] in training: embeddings, wide features, positions."""
    layers = head.config.feature_layers
    features = hidden_states(target, ids, layers)[None, :-1].clone()
    ahead = target.embed(ids[None, 1:]).clone()
    return ahead, features, torch.arange(len(ids) - 1)[None]


# -- the head, and its drafts ----------------------------------------------------------------------


@every_form
def test_every_pass_equals_feeding_each_position_by_hand(target, form):
    """Pass r at position p == the first pass over p - r + 1 positions, then position by position,
    each reading the state before it."""
    head = random_eagle3(target, **form)
    ids = torch.tensor(prompts()[3][:9])
    ahead, features, blocks = read(target, head, ids)
    rolled = head(ahead, features, blocks, passes=3)[:, 0]
    for p in range(2, 8):
        given = head.join(features)
        for r in range(3):
            states = given.clone()
            for position in range(p - r, p):  # the state at `position` is fed to the next
                states[:, position + 1] = once(head, ahead, states)[:, position]
            torch.testing.assert_close(
                rolled[r, p], once(head, ahead, states)[0, p], atol=1e-5, rtol=1e-4
            )


def once(head, ahead, states):
    """One pass over states [B, T, H] by torch's causal attention."""

    def attend(layer, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    rope = head.rope(torch.arange(states.shape[1])[None])
    return head.decode(head.inputs(ahead, states), rope, attend)


@every_form
def test_drafting_predicts_what_the_head_predicts_in_training(target, form):
    """An incremental chain of three against passes over the whole sequence."""
    head = random_eagle3(target, **form)
    vocabulary = vocabulary_of(head, target)
    drafter = Recording(head, target, StaticTree.chain(3, 1), 1, 128)
    prompt = prompts()[2]
    done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 14)]))
    assert done.fallback is None
    tokens, length = prompt + done.tokens, len(prompt)
    assert len(drafter.drafts) == len(done.steps) - 1 > 3
    for draft, step in zip(drafter.drafts, done.steps, strict=False):
        length += step.emitted
        ahead, features, _ = read(target, head, torch.tensor(tokens[:length]))
        expected, states = [], head.join(features)
        for _ in range(3):
            state = once(head, ahead, states)[:, -1:]
            best = vocabulary.tokens(vocabulary.logits(state)[0].argmax(-1))
            expected += best.tolist()
            states = torch.cat((states, state), 1)
            ahead = torch.cat((ahead, target.embed(best[None])), 1)
        assert draft == expected


def test_padding_changes_no_output(target):
    head = random_eagle3(target)
    ahead, features, blocks = read(target, head, torch.tensor(prompts()[3][:12]))
    expected = head(ahead[:, :6], features[:, :6], blocks[:, :6], passes=3)
    valid = torch.arange(11)[None] < 6
    got = head(ahead, features, blocks, valid, passes=3)
    torch.testing.assert_close(got[:, :, :6], expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["eagle3_chain", "eagle3_tree"])
def test_output_equals_that_of_plain_decoding(target, method, rows):
    recipe = load_recipe(RECIPE, [f"eval.batch_size={rows}"])
    head = random_eagle3(target, draft_vocab=20)
    drafter = make_drafter(method, Setup(recipe, target, Trained(head), rows, 128))
    check_as_plain(target, drafter, rows)


def test_eagle_1_and_eagle_3_methods_refuse_each_others_heads(target):
    recipe, eagle = load_recipe(RECIPE), random_head(target, 1, fusion="linear")
    for name, head, told in (
        ("eagle3_tree", eagle, r"eagle3_tree needs an EAGLE-3 head.* measure eagle_tree"),
        ("eagle_chain", random_eagle3(target), r"needs an EAGLE-1 head.* measure eagle3_tree"),
    ):
        with pytest.raises(RecipeError, match=told):
            make_drafter(name, Setup(recipe, target, Trained(head), 1, 64))


def test_ranks_are_counted_among_the_draft_vocabulary(target):
    head, ids = random_eagle3(target, draft_vocab=7), prompts()[4]
    texts = [Text(3, ids)]
    ahead, features, blocks = read(target, head, torch.tensor(ids))
    rolled, expected = head(ahead, features, blocks, passes=3)[:, 0], torch.zeros(3, 7)
    scores, own = vocabulary_of(head, target).logits(rolled), head.draft_ids.tolist()
    for d in range(3):
        places = range(3, len(ids) - 1 - d)  # of the last committed token
        for p in places:
            if (token := ids[p + 1 + d]) in own:
                ranked = scores[d, p - 1 + d].argsort(descending=True).tolist()
                expected[d, ranked.index(own.index(token))] += 1 / len(places)
    assert expected.any()
    found = shares_of(rank_traces(head, target, texts, 3), texts, 7)
    torch.testing.assert_close(found, expected)


# -- training --------------------------------------------------------------------------------------


def toy_rows(count=24) -> ToyRows:
    """Rows whose layers carry the same information as the feature."""
    rows = ToyRows(count)
    for row in rows.rows:
        row["features"] = torch.cat([row["features"]] * 4, -1)
    return rows


def toy_recipe(out, **changes):
    settings = {"head.fusion": "layers", "head.block_size": 1, "data.feature_layers": [1, 2, 3]}
    settings |= {"loss.feature_weight": 0, "loss.feature_noise": 0, "glance.enabled": False}
    settings |= {"eval.tree": "tiny_k1", "eval.methods": ["plain", "eagle3_tree"]}
    return make_recipe(out, **settings, **changes)


def toy_head(**changes) -> Eagle3Head:
    shape = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB)
    head, ids = random_eagle3(shape, **changes), None
    if head.draft_ids is not None:
        ids = head.draft_ids
    return Eagle3Head.of(head.config, make_ends().lm_head_weight, ids, 1.0)


@pytest.mark.parametrize("drafted", [None, 12])
@pytest.mark.parametrize("lk", [0.0, 0.4])
def test_the_loss_and_gradients_equal_a_naive_sum_over_passes(tmp_path, drafted, lk):
    """The naive version keeps all logits."""
    changes = {"train.rollout": 3, "loss.depth_decay": 0.8, "loss.lk_weight": lk}
    recipe = toy_recipe(tmp_path, **changes)
    ends, heads = make_ends(), [toy_head(draft_vocab=drafted) for _ in range(2)]
    objective = TrainingTimeTest(recipe, ends, heads[0].config, heads[0].draft_ids)
    rows = toy_rows(4)
    batch = objective.collate(rows.rows, [(0, 0, slot) for slot in range(4)])
    plan, counted = objective.plan(heads[0], batch, 0.0)
    total, sums = objective.loss(heads[0], batch, plan, counted)
    total.backward()
    naive(heads[1], ends, batch, counted, recipe.loss).backward()
    for (name, one), other in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)
    report = objective.report(sums)
    assert report["loss"] == pytest.approx(total.item() / int(counted.sum()))
    assert len(report["accuracy"]) == 1
    assert len(report["rollout_accuracy"]) == 2


def naive(head, ends, batch, counted, loss):
    """The loss by its definition."""
    ids = torch.arange(VOCAB) if head.draft_ids is None else head.draft_ids
    states = head(
        ends.embed(batch.tokens[:, 1:]), batch.features[:, :-1], batch.blocks, batch.valid, 3
    )
    total = 0.0
    for r in range(3):
        for b, i in counted.nonzero().tolist():
            q = (head.answers(states[r, b, i]) @ head.lm_head.T).log_softmax(-1)
            p = (batch.features[b, i + 1, :HIDDEN] @ ends.lm_head_weight[ids].T).softmax(-1)
            token = (ids == batch.tokens[b, i + 2]).nonzero().flatten()
            hard = -q[token].sum()
            soft = (1 - loss.lk_weight) * (p * (p.log() - q)).sum()
            soft = soft - loss.lk_weight * torch.minimum(p, q.exp()).sum().log()
            total = total + 0.8**r * (loss.soft_weight * soft + (1 - loss.soft_weight) * hard)
    return loss.distill_weight * total / (1 + 0.8 + 0.64)


def test_a_new_heads_lm_head_is_the_targets_times_the_feature_scale():
    """It reads normed features, so untrained it gives the target's logits for a normed feature."""
    config, ids = toy_head(draft_vocab=5).config, torch.tensor([1, 4, 7, 8, 20])
    weight = make_ends().lm_head_weight
    head = Eagle3Head.of(config, weight, ids, 6.7)
    assert torch.equal(head.draft_ids, ids)
    torch.testing.assert_close(head.lm_head.detach(), 6.7 * weight[ids])


@pytest.mark.parametrize("normed", [False, True])
def test_training_lowers_the_loss_and_changes_every_weight(tmp_path, monkeypatch, normed):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    changes = {"optim.lr": 1.0e-2, "train.steps": 60, "train.batch_size": 4}
    recipe = toy_recipe(tmp_path, **changes, **{"train.log_every": 20, "head.normed": normed})
    head = toy_head(layer_norms="each" if normed else "none", norm_output=normed)
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    objective = TrainingTimeTest(recipe, make_ends(), head.config)
    fit(head, toy_rows(4), objective, recipe, make_accelerator(recipe))
    first, *_, last = log_lines(tmp_path)
    assert last["loss"] < 0.5 * first["loss"]
    assert all(not torch.equal(before[name], weight) for name, weight in head.named_parameters())


def test_checkpointing_changes_no_gradient(target):
    ids, slopes = torch.tensor(prompts()[3][:10]), []
    for checkpointing in (False, True):
        head = random_eagle3(target)
        head.checkpointing = checkpointing
        head(*read(target, head, ids), passes=3).square().sum().backward()
        slopes.append([weight.grad for weight in head.parameters() if weight.grad is not None])
    torch.testing.assert_close(*slopes, rtol=0, atol=0)


def test_a_new_head_of_a_recipe_has_the_targets_scaled_lm_head_and_its_norms(target):
    data = SimpleNamespace(
        scales={"embed_scale": 1.0, "feature_scale": 6.7},
        answers=lambda: [torch.tensor([4, 4, 9, 9, 9, 1])],
    )
    changes = ["head.draft_vocab=3", "data.feature_layers=[1,2,3]", "head.normed=true"]
    head = head_kind("eagle3").make(load_recipe(RECIPE, changes), target, data)
    assert head.draft_ids.tolist() == [1, 4, 9]
    torch.testing.assert_close(head.lm_head, 6.7 * target.lm_head_weight[[1, 4, 9]])
    assert (head.config.layer_norms, head.config.norm_output) == ("each", True)
    assert head.config.target == target.identity()


@pytest.mark.parametrize("name", ["tiny_eagle3", "qwen3_8b_eagle3", "llama31_8b_eagle3"])
def test_the_recipes_describe_eagle_3_heads(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    check(head_kind("eagle3"), recipe)
    assert (recipe.head.fusion, len(recipe.data.feature_layers)) == ("layers", 3)
    assert recipe.train.rollout > 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head.block_size=2"], r"head.block_size = 2: EAGLE-3 \(head.fusion=layers\) has 1"),
        (["head.layers=2"], r"head.layers = 2: EAGLE-3 .* has 1"),
        (["data.feature_layers=[]"], r"feature_layers = \[\]: head.fusion=layers reads some"),
        (["data.feature_layers=[6,2]"], r"feature_layers = \[6, 2\]: .* in ascending order"),
        (["head.fusion=linear", "head.normed=false"], "fusion = linear: EAGLE-3 has head.fusion="),
        (["head.fusion=linear"], "head.normed = True: needs head.fusion=layers"),
        (["loss.feature_weight=1"], "loss.feature_weight = 1.0: EAGLE-3 is trained without"),
        (["glance.enabled=true"], "glance.enabled = True: .* set glance.enabled=false"),
        (["head=you/a-head"], "head.model = you/a-head: it is trained already; measure it"),
        (["eval.methods=[medusa_tree]", "medusa.heads=8"], "Medusa heads do not read them"),
    ],
)
def test_a_recipe_that_is_not_for_eagle_3_is_refused_before_any_training(overrides, message):
    with pytest.raises(RecipeError, match=message):
        check(head_kind("eagle3"), load_recipe(RECIPE, overrides))


@pytest.mark.parametrize("features", ["cached", "online"])
def test_a_trained_head_is_exported_and_measured_again_with_the_same_acceptance(tmp_path, features):
    """As in the large recipes: a draft vocabulary, and checkpointing of every pass."""
    small = ["train.steps=2", "train.batch_size=2", "train.threads=1", "data.limit=8"]
    small += ["train.checkpointing=true", "head.draft_vocab=500", f"data.features={features}"]
    small += ["eval.limit=1", "eval.validation=1", "eval.max_new_tokens=8"]
    small += ["eval.methods=[plain,eagle3_tree]", f"data.cache_dir={tmp_path / 'cache'}"]
    run, served = f"output.dir={tmp_path / 'run'}", tmp_path / "served"
    for command, more in (
        ("train/eagle3.py", [run]),
        ("eval/export.py", [run, "--engine", "vllm", "--out", str(served)]),
        ("eval/bench.py", [f"output.dir={tmp_path / 'out'}", f"head={served}"]),
    ):
        done = run_here(command, "recipes/tiny_eagle3.yaml", *small, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (
        json.loads((tmp_path / name / "report.json").read_text())["runs"][-1]
        for name in ("run", "out/bench/tiny_chat-b1-t0")
    )
    assert ours["method"] == theirs["method"] == "eagle3_tree"
    assert ours["tokens_per_step"] == theirs["tokens_per_step"]


# -- files -----------------------------------------------------------------------------------------


def test_a_saved_head_loads_unchanged_and_only_for_its_target(target, tmp_path):
    head = random_eagle3(target, draft_vocab=9, target=target.identity(), **FORMS[2])
    head.save_pretrained(tmp_path)
    for again in (
        load_head(tmp_path, target),
        Eagle3Head.load_for(tmp_path, target.identity()),
        Eagle3Head.from_pretrained(tmp_path),
    ):
        assert again.config == head.config
        torch.testing.assert_close(again.state_dict(), head.state_dict())
    with pytest.raises(TargetError, match="was trained for random-0"):
        load_head(tmp_path, random_target(seed=9, layers=4))
    with pytest.raises(HeadError, match="no trained EAGLE-3 head at"):
        Eagle3Head.load_for(tmp_path / "none", target.identity())


def test_an_invalid_config_is_refused(target):
    config = random_eagle3(target).config
    for change, told in (
        ({"feature_layers": ()}, "reads some, each once"),
        ({"feature_layers": (3, 1)}, "ascending order"),
        ({"kv_heads": 3}, "must be a multiple of kv_heads"),
        ({"head_dim": 5}, "must be even"),
        ({"draft_vocab": 24}, "at most the vocabulary"),
        ({"rope": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_type must be one of"),
        ({"rope": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope = "),
    ):
        with pytest.raises(ValueError, match=told):
            replace(config, **change)


class Eagle3Layout(nn.Module):
    """EAGLE-3 as engines build it from config.json, with transformers' modules."""

    def __init__(self, config: LlamaConfig, aux: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.midlayer = nn.Module()
        self.midlayer.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = getattr(self.midlayer.self_attn, name).out_features
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * width, out, bias=False))
        self.midlayer.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(width, eps))
        self.fc = nn.Linear(aux * width, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in range(aux))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(aux * width, eps)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.config = config

    def forward(self, embeddings, layers):
        """The state fed back, and logits over the whole vocabulary."""
        if self.config.norm_before_fc:
            layers = self.input_norm(layers)
        if self.config.fc_norm:
            parts = layers.chunk(len(self.fc_norm), -1)
            layers = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], -1)
        x, layer = self.fc(layers), self.midlayer
        normed = layer.hidden_norm(x)
        residual = normed if self.config.norm_before_residual else x
        both = torch.cat((layer.input_layernorm(embeddings), normed), -1)
        rope = LlamaRotaryEmbedding(self.config)(x, torch.arange(x.shape[1])[None])
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        x = residual + layer.self_attn(both, rope, mask)[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed if self.config.norm_output else x, self.lm_head(normed)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@every_form
def test_an_exported_head_gives_the_same_in_an_engines_layout(target, tmp_path, engine, form):
    head = random_eagle3(target, **form)
    if engine == "sglang" and form.get("norm_residual"):
        with pytest.raises(HeadError, match="sglang lacks norms"):
            serve_eagle3(head, engine, 64)
        return
    serve_eagle3(head, engine, 64).write(tmp_path / "served")
    content = json.loads((tmp_path / "served" / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle3"]
    layers, key = list(head.config.feature_layers), "eagle_aux_hidden_state_layer_ids"
    if engine == "vllm":  # the layer after the state, from 0
        assert content[key] == layers
    else:  # the layer before the state, from 0
        assert content["eagle_config"][key] == [layer - 1 for layer in layers]
    tensors = load_file(tmp_path / "served" / "model.safetensors")
    shift, marked = tensors.pop("d2t", None), tensors.pop("t2d", None)
    config = AutoConfig.from_pretrained(tmp_path / "served", attn_implementation="eager")
    served = Eagle3Layout(config, len(layers))
    assert served.state_dict().keys() == tensors.keys()
    served.load_state_dict(tensors)
    ids = torch.tensor(prompts()[3][:11])
    ahead, features, blocks = read(target, head, ids)
    with torch.no_grad():
        ours = head(ahead, features, blocks)[0]
        theirs, logits = served(ahead, features[..., HIDDEN:])
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, vocabulary_of(head, target).logits(ours))
    if head.draft_ids is not None:
        assert torch.equal(torch.arange(len(shift)) + shift, head.draft_ids)
        assert torch.equal(marked.nonzero()[:, 0], head.draft_ids)


# -- published heads -------------------------------------------------------------------------------


def edit(folder: Path, config=None, tensors=None) -> None:
    """Change a head's files; None removes a key or a tensor."""
    for name, changes, load, save in (
        ("config.json", config, lambda p: json.loads(p.read_text()), write_json),
        ("model.safetensors", tensors, load_file, lambda p, c: save_file(c, p)),
    ):
        if changes:
            content = {**load(folder / name), **changes}
            save(folder / name, {key: v for key, v in content.items() if v is not None})


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


def published(target, folder, engine="vllm", **form) -> Path:
    serve_eagle3(random_eagle3(target, **form), engine, 64).write(folder)
    return folder


FOR_SGLANG = [form for form in FORMS if not form.get("norm_residual")]  # it refuses the other


@pytest.mark.parametrize(
    ("engine", "form"), [("vllm", form) for form in FORMS] + [("sglang", f) for f in FOR_SGLANG]
)
def test_an_exported_head_is_read_back_unchanged(target, tmp_path, engine, form):
    head = random_eagle3(target, **form)
    again = load_head(published(target, tmp_path / "served", engine, **form), target)
    assert again.config == head.config
    torch.testing.assert_close(again.state_dict(), head.state_dict())
    assert not again.training


def test_the_same_head_with_other_names_and_token_orders_can_be_read(target, tmp_path):
    """As speculators saves it: `layers.0`, a nested config, the target's embeddings; and draft
    tokens in any order."""
    folder = published(target, tmp_path / "served", draft_vocab=9, norm_residual=True)
    expected = load_head(folder, target).state_dict()
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(9)
    ids = (tensors["d2t"] + torch.arange(9))[order]
    tensors |= {"d2t": ids - torch.arange(9), "lm_head.weight": tensors["lm_head.weight"][order]}
    renamed = {
        f"model.{name}".replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if name not in ("d2t", "t2d", "lm_head.weight")
    }
    kept = {name: tensors[name].contiguous() for name in ("d2t", "t2d", "lm_head.weight")}
    kept["embed_tokens.weight"] = target.embedding_weight.clone()
    save_file(renamed | kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    inner = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    inner += ("head_dim", "rope_theta", "rms_norm_eps", "vocab_size", "model_type")
    outer = {key: config[key] for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    outer |= {"architectures": ["Eagle3Speculator"], "norm_before_residual": True}
    outer["transformer_layer_config"] = {key: config[key] for key in inner}
    write_json(folder / "config.json", outer)
    torch.testing.assert_close(load_head(folder, target).state_dict(), expected)


def test_weights_tell_eagle_3_from_eagle_1_where_configs_share_a_name(target, tmp_path):
    """EAGLE's configs call both heads LlamaForCausalLM."""
    folder = published(target, tmp_path / "served", draft_vocab=9)
    expected = load_head(folder, target)
    edit(folder, {"architectures": ["LlamaForCausalLM"]})
    assert load_head(folder, target).config == expected.config


def test_embeddings_saved_with_a_head_may_have_another_half_precision(tmp_path):
    """As EAGLE's are: in float16, for targets that run in bfloat16."""
    half = random_target().model.half()
    exact = {"embed_tokens.weight": half.model.embed_tokens.weight.detach().clone()}
    target = Target(half.bfloat16(), None, "random-0")
    head = random_head(target, 1, fusion="linear", input_norm=False)
    serve_eagle(head, "vllm", 64).write(tmp_path / "served")
    edit(tmp_path / "served", tensors=exact)
    assert load_head(tmp_path / "served", target).config.block_size == 1
    edit(tmp_path / "served", tensors={"embed_tokens.weight": 2 * exact["embed_tokens.weight"]})
    with pytest.raises(HeadError, match=r"embed_tokens.weight must equal that of"):
        load_head(tmp_path / "served", target)


def test_a_config_without_layers_means_the_engines_default_layers(tmp_path):
    target = random_target(layers=8)
    folder = published(target, tmp_path / "served", feature_layers=(2, 4, 5))
    edit(folder, config={"eagle_aux_hidden_state_layer_ids": None})
    assert load_head(folder, target).config.feature_layers == (2, 4, 5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_published_eagle_1_head_drafts_losslessly(target, tmp_path, engine, bias):
    """Its weights include the scales; only a bias of its own changes its states."""
    head = random_head(target, 1, fusion="linear", input_norm=False, layers=2, feature_scale=3.0)
    head.config = replace(head.config, target={})
    serve_eagle(head, engine, 64).write(tmp_path / "served")
    tensors = {"embed_tokens.weight": target.embedding_weight.clone()}
    tensors["fc.bias"] = torch.zeros(HIDDEN) + (0.1 if bias else 0.0)
    edit(tmp_path / "served", tensors=tensors if bias or engine == "sglang" else None)
    again = load_head(tmp_path / "served", target)
    assert again.config.is_eagle
    ids = torch.tensor([prompts()[3][:10]])
    given = target.embed(ids[:, 1:]), target.features(ids)[:, :-1], block_index(9, 1, 1)[None]
    ours, theirs = head(*given)[0], again(*given)[0]
    same = torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    assert same is not bias
    recipe = load_recipe(RECIPES / "tiny_eagle.yaml")
    drafter = make_drafter("eagle_tree", Setup(recipe, target, Trained(again), 1, 64))
    requests = [Request(prompt, 12) for prompt in prompts(3)]
    expected = [plain_tokens(target, prompt, 12) for prompt in prompts(3)]
    assert decode(Decoder(target, drafter, 1, 64), requests, accepts=False) == expected


def test_a_published_head_drafts_eagles_tree_unless_it_has_its_own(target, tmp_path):
    folder = published(target, tmp_path / "served")
    recipe = load_recipe(RECIPES / "tiny_eagle3.yaml").with_eval(tree="auto")
    head = load_head(folder, target)
    assert tree_of("eagle3_tree", recipe, Trained(head)) == "eagle_k1_depth5, 25 nodes to depth 5"
    drafter = make_drafter("eagle3_tree", Setup(recipe, target, Trained(head), 2, 128))
    check_as_plain(target, drafter, 2)
    (folder / "tree.yaml").write_text("paths: [[0], [1], [0, 0]]")
    assert tree_of("eagle3_tree", recipe, Trained(head)) == "tree, 3 nodes to depth 2"
    heads = MedusaHeads.of(MedusaConfig(HIDDEN, VOCAB, heads=2), target.lm_head_weight)
    heads.save_pretrained(heads_at := tmp_path / "medusa")
    (heads_at / "tree.yaml").write_text("paths: [[0], [1]]")
    both = Trained(head, medusa=MedusaHeads.load_for(heads_at, target.identity()))
    assert tree_of("medusa_tree", recipe, both) == "tree, 2 nodes to depth 1"
    assert make_drafter("medusa_tree", Setup(recipe, target, both, 2, 128)).max_nodes == 2


@pytest.mark.parametrize(
    ("config", "tensors", "told"),
    [
        ({"hidden_size": 32}, {}, "hidden_size = 32, and random-0 has 16: .* another target"),
        ({"vocab_size": 99}, {}, "vocab_size = 99, and random-0 has 23"),
        ({"target_hidden_size": 8}, {}, "target_hidden_size = 8, and random-0 has 16"),
        ({}, {"d2t": None}, "draft_vocab_size = 9 of 23 tokens, and no d2t says which"),
        ({}, {"d2t": torch.full((9,), -3)}, "d2t must make 9 different ids below 23"),
        ({}, {"t2d": torch.ones(23, dtype=torch.bool)}, "d2t and t2d name different tokens"),
        (
            {"architectures": ["Qwen3Eagle"]},
            {},
            "its layout is Qwen3Eagle; known layouts: Llama",
        ),
        ({"architectures": 3}, {}, "its layout is 3"),
        ({"attention_bias": True}, {}, "attention_bias = True: only heads with False load"),
        ({"hidden_act": "gelu"}, {}, "hidden_act = 'gelu'"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers = 2: only 1 loads"),
        ({"num_attention_heads": None}, {}, "config.json has no num_attention_heads"),
        ({"num_attention_heads": "four"}, {}, "heads = 'four'|unsupported operand"),
        ({"intermediate_size": 10**6}, {}, r"mlp.\w+.weight is \[.*\], and must be"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, {}, "rope_type must be one of"),
        ({}, {"fc.weight": None}, "lacks fc.weight"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(6)}, "also has midlayer.self_attn.q"),
        ({}, {"fc.weight": torch.full((16, 48), torch.nan)}, "fc.weight has values that are no"),
        ({}, {"embed_tokens.weight": torch.ones(23, 16)}, "embed_tokens.weight must equal that of"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state = False"),
        ({"rope_scaling": "linear"}, {}, "'str' object has no attribute"),
        ({"rope_theta": 10**400}, {}, "too large"),
    ],
)
def test_a_head_that_cannot_be_read_is_refused_with_the_reason(
    target, tmp_path, config, tensors, told
):
    folder = published(target, tmp_path / "served", draft_vocab=9)
    edit(folder, config, tensors)
    with pytest.raises(HeadError, match=rf"the head at .*served cannot be read: .*{told}"):
        load_head(folder, target)


def test_invalid_and_missing_weight_files_are_refused(target, tmp_path):
    folder = published(target, tmp_path / "served")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(HeadError, match=r"cannot be read: model.safetensors: "):
        load_head(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(HeadError, match=r"it has no \*.safetensors"):
        load_head(folder, target)
    with pytest.raises(HeadError, match="no trained head at"):
        load_head(tmp_path / "nowhere", target)


def test_a_head_that_reads_layers_the_target_lacks_is_refused(target, tmp_path):
    head = load_head(published(target, tmp_path / "served", feature_layers=(1, 2, 9)), target)
    recipe = load_recipe(RECIPE)
    with pytest.raises(TargetError, match="the head's feature_layers"):
        make_drafter("eagle3_tree", Setup(recipe, target, Trained(head), 1, 64))


def test_a_published_head_can_be_benchmarked_by_its_folder(tmp_path):
    """With `head=FOLDER`, whatever the recipe trains."""
    tiny = json.loads((bundled_target_dir() / "config.json").read_text())
    sizes = {key: tiny[key] for key in ("hidden_size", "vocab_size", "intermediate_size")}
    head = random_eagle3(SimpleNamespace(**sizes), feature_layers=(2, 6, 9), draft_vocab=99)
    serve_eagle3(head, "sglang", 512).write(tmp_path / "head")
    small = ["eval.limit=1", "eval.max_new_tokens=8", "eval.tree=tiny_k1"]
    small += ["eval.methods=[plain,falcon_tree,eagle3_tree]"]  # as it is called, both times
    where = [f"head={tmp_path / 'head'}", f"output.dir={tmp_path / 'out'}"]
    done = run_here("eval/bench.py", "recipes/tiny.yaml", *small, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "out").rglob("report.json")
    assert [run["method"] for run in json.loads(report.read_text())["runs"]] == [
        "plain",
        "eagle3_tree",
    ]
