"""Medusa heads: their training, their drafts, and that drafts change no output."""

import json
from itertools import product

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import ROOT, run_here
from decoding import PATHS, decode, plain_tokens, prompts
from random_models import VOCAB, random_head, random_target
from safetensors.torch import load_file, save_file
from test_distill import ToyTexts
from test_loop import assert_close, log_lines
from test_rules_in_decoder import CHAIN, check_law

from specdraft.eval.costing.tree_growth import WIDTH, Text, medusa_rank_traces, shares_of
from specdraft.eval.custom_generate import Speculative, medusa
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.measure.methods import make_method
from specdraft.eval.methods.registry import problems
from specdraft.eval.methods.trained import Trained
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.recipes.errors import HeadError, RecipeError, TargetError
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.loop import fit
from specdraft.train.heads import head_kind
from specdraft.train.medusa import check
from specdraft.train.objectives.ahead import TokensAhead
from specdraft.train.plan import make_plan
from specdraft.train.plan_lines import plan_lines

RECIPE = ROOT / "recipes" / "tiny_medusa.yaml"
DEPTH = max(map(len, PATHS))


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def random_heads(target, heads=DEPTH, layers=1, lm_heads="own", seed=1) -> MedusaHeads:
    torch.manual_seed(seed)
    config = MedusaConfig(
        target.hidden_size, target.vocab_size, heads, layers, lm_heads, target.identity()
    )
    made = MedusaHeads.of(config, target.lm_head_weight)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


def naive_logits(heads, target, feature, h):
    """Head h (from 1) on one feature [H], as the paper writes it."""
    x = feature
    for number in range(heads.config.layers):
        x = x + torch.nn.functional.silu(
            heads.weight[number, h - 1] @ x + heads.bias[number, h - 1]
        )
    own = target.lm_head_weight if heads.lm_heads is None else heads.lm_heads[h - 1]
    return own @ x


def make_recipe(out="runs/toy", **changes):
    tree = {
        "name": "toy",
        "data": {"sources": ["tiny"], "max_length": 24},
        "medusa": {"heads": 3},
        "optim": {"lr": 1.0e-2},
        "train": {"steps": 4, "batch_size": 8, "log_every": 2, "threads": 1},
        "output": {"dir": str(out)},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return from_dict(tree)


def train(out, target, evaluate=None, **changes):
    """Run `fit` in this process; return its state and the final weights."""
    AcceleratorState._reset_state(True)
    recipe = make_recipe(out, **changes)
    section = recipe.medusa
    heads = random_heads(target, section.heads, section.layers, section.lm_heads)
    accelerator = make_accelerator(recipe)
    objective = TokensAhead(recipe, target)
    state = fit(heads, ToyTexts(target), objective, recipe, accelerator, evaluate)
    return state, {name: tensor.clone() for name, tensor in heads.state_dict().items()}


# -- training --------------------------------------------------------------------------------------

SETTINGS = [
    {},
    {"medusa.lm_heads": "shared", "medusa.layers": 2},
    {"medusa.soft_weight": 0.3},
    {"medusa.soft_weight": 1.0, "medusa.lm_heads": "shared"},
]


@pytest.mark.parametrize("changes", SETTINGS)
def test_loss_and_gradient_equal_a_naive_sum_over_heads_and_positions(target, changes):
    """Head h at position i predicts t_(i+1+h), which counts if in the mask, with weight 0.8^h."""
    recipe = make_recipe(**changes)
    section = recipe.medusa
    heads = random_heads(target, 3, section.layers, section.lm_heads)
    objective = TokensAhead(recipe, target)
    rows = [ToyTexts(target)[n] for n in range(4)]
    batch = objective.collate(rows, [(0, 0, n) for n in range(4)])
    answered, counted = objective.plan(heads, batch, 0.0)
    total, sums = objective.loss(heads, batch, answered, counted)
    total.backward()
    slopes = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()

    expected, agreed, positions = torch.zeros(()), torch.zeros(3), set()
    for number, row in enumerate(rows):
        ids, mask, features = row["input_ids"], row["loss_mask"], row["features"].clone()
        for h in (1, 2, 3):
            for i in range(len(ids) - 1 - h):
                if not mask[i + 1 + h]:
                    continue
                positions.add((number, i))
                q = naive_logits(heads, target, features[i], h).log_softmax(-1)
                p = target.logits(features[i + h]).log_softmax(-1)
                soft = section.soft_weight
                value = -(1 - soft) * q[ids[i + 1 + h]] + soft * (p.exp() * (p - q)).sum()
                expected = expected + 0.8**h * value
                agreed[h - 1] += q.argmax() == (p.argmax() if soft else ids[i + 1 + h])
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    assert sums["agreed"].tolist() == agreed.tolist()
    assert {tuple(place) for place in counted.nonzero().tolist()} == positions
    assert sums["counted"] == len(positions)
    expected.backward()
    for slope, parameter in zip(slopes, heads.parameters(), strict=True):
        torch.testing.assert_close(slope, parameter.grad, rtol=1e-4, atol=1e-4)


def test_untrained_heads_predict_the_targets_next_token(target):
    for lm_heads in ("own", "shared"):
        config = MedusaConfig(target.hidden_size, target.vocab_size, 2, 2, lm_heads)
        heads, feature = MedusaHeads.of(config, target.lm_head_weight), torch.randn(16)
        for h in (1, 2):
            torch.testing.assert_close(
                naive_logits(heads, target, feature, h), target.logits(feature)
            )


def test_eight_micro_batches_of_one_row_equal_one_of_eight_rows(tmp_path, target):
    _, whole = train(tmp_path / "whole", target)
    _, cut = train(tmp_path / "cut", target, **{"train.accumulation": 8})
    assert_close(whole, cut, 1e-5)
    for a, b in zip(log_lines(tmp_path / "whole"), log_lines(tmp_path / "cut"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"])
        assert len(a["cross_entropy"]) == 3


class CrashError(Exception):
    """Stands for anything that ends a process between two steps."""


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, target):
    changes = {"train.save_every": 1, "train.eval_every": 1}

    def crash(heads, step):
        if step == 3:
            raise CrashError
        return {"tokens_per_step": 1.0}

    _, whole = train(tmp_path / "whole", target, lambda *_: {"tokens_per_step": 1.0}, **changes)
    with pytest.raises(CrashError):
        train(tmp_path / "cut", target, crash, **changes)
    state, cut = train(tmp_path / "cut", target, lambda *_: {"tokens_per_step": 1.0}, **changes)
    assert state.step == 4
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name


@pytest.mark.parametrize("changes", [{}, {"medusa.lm_heads": "shared", "medusa.soft_weight": 0.9}])
def test_training_lowers_the_loss(tmp_path, target, changes):
    settings = {"train.steps": 60, "train.batch_size": 16, "train.log_every": 20}
    train(tmp_path, target, **settings, **changes)
    first, *_, last = log_lines(tmp_path)
    assert last["loss"] < 0.6 * first["loss"]
    assert sum(last["accuracy"]) > sum(first["accuracy"])


def test_bfloat16_training_keeps_float32_master_weights(tmp_path, target):
    _, weights = train(tmp_path, target, **{"train.precision": "bfloat16"})
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert all(record["loss"] > 0 for record in log_lines(tmp_path))


# -- drafts ----------------------------------------------------------------------------------------


def drafters(target, rows):
    for lm_heads, layers, paths in (
        ("own", 1, PATHS),
        ("shared", 2, PATHS),
        ("own", 2, [(0,), (1,), (2,), (0, 0)]),  # fewer depths than there are heads
        ("shared", 1, [(0,) * n for n in range(1, DEPTH + 1)]),
    ):
        heads = random_heads(target, DEPTH, layers, lm_heads)
        tree = StaticTree(paths, max(map(len, paths)))
        yield f"{lm_heads} x{layers}", MedusaDrafter(heads, target, tree, rows)


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_output_equals_that_of_the_model_without_a_cache(target, rows):
    requests = [Request(prompt, 17) for prompt in prompts()]
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]
    for name, drafter in drafters(target, rows):
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name
        assert drafter.forwards > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_output_equals_that_of_plain_seeded_sampling(target, rows):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts())]
    expected = [decode(Decoder(target, None, 1, 128), [request])[0] for request in requests]
    for name, drafter in drafters(target, rows):
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


@pytest.mark.parametrize("rule", RULES)
def test_outputs_follow_the_targets_distribution_if_nodes_share_their_draw(target, rule):
    paths = CHAIN.paths if rule == "block" else PATHS
    tree = StaticTree(paths, max(map(len, paths)))
    check_law(target, MedusaDrafter(random_heads(target), target, tree, 100), rule, 100)


def test_generate_drafts_with_the_heads_of_a_folder(target, tmp_path):
    random_heads(target).save_pretrained(tmp_path / "heads")
    (tmp_path / "tree.yaml").write_text("paths: [[0], [1], [0, 0]]\n")
    ids = torch.tensor([prompts(2)[1]])
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    config["target"] = {}  # `generate` copies the model, under another identity
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    (tmp_path / "heads" / "SHA256SUMS").unlink()
    fast = Speculative(medusa(tmp_path / "heads", str(tmp_path / "tree.yaml")))
    ours = target.model.generate(ids, custom_generate=fast, max_new_tokens=9, do_sample=False)
    assert ours[0].tolist() == ids[0].tolist() + plain_tokens(target, ids[0].tolist(), 9)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_draft_has_the_ranked_tokens_of_each_head_after_the_last_feature(target, temperature):
    """Whatever was accepted before; sampled by log q + G with the noise of the token's position."""
    from specdraft.eval.engine.sampling import gumbel

    heads = random_heads(target)
    drafter = MedusaDrafter(heads, target, StaticTree(PATHS, DEPTH))
    drafted = []

    class Recorder:
        """Records every draft."""

        forwards, max_nodes, rules = 0, drafter.max_nodes, drafter.rules
        start, observe, from_tokens = drafter.start, drafter.observe, False

        def draft(self, rows):
            trees = drafter.draft(rows)
            drafted.append(trees[0].tokens.tolist())
            return trees

    prompt = prompts(3)[2]
    request = Request(prompt, 14, temperature, seed=5)
    done = next(Decoder(target, Recorder(), 1, 128).run([request]))
    assert any(step.accepted for step in done.steps)
    assert len(drafted) == len(done.steps) - 1 > 3  # the first step reads the prompt
    tokens, length = prompt + done.tokens, len(prompt)
    for draft, step in zip(drafted, done.steps, strict=False):
        length += step.emitted  # the last one, the bonus token, has no feature yet
        feature = target.features(torch.tensor([tokens[:length]]))[0, -2].clone()
        for path, token in zip(drafter.tree.paths, draft, strict=True):
            scores = naive_logits(heads, target, feature, len(path)).detach()
            if temperature:
                place = torch.tensor(length + len(path) - 1)
                scores = scores / temperature + gumbel(5, place, VOCAB)
            assert token == scores.argsort(descending=True)[path[-1]]


def test_the_tokens_of_a_head_that_is_right_are_accepted(target):
    """The head is fitted to the answer: a linear map from the feature at i to t_(i+2)."""
    prompt = prompts(2)[1]
    answer = plain_tokens(target, prompt, 8)
    heads = random_heads(target, 1)
    ids = torch.tensor([prompt + answer])
    features = target.features(ids)[0, len(prompt) - 1 : -2].clone()  # drafted from
    wanted = torch.nn.functional.one_hot(ids[0, len(prompt) + 1 :], VOCAB).float()
    with torch.no_grad():
        heads.weight.zero_()
        heads.bias.fill_(-100.0)  # SiLU gives zero
        heads.lm_heads[0] = (torch.linalg.pinv(features) @ wanted).T
    drafter = MedusaDrafter(heads, target, StaticTree([(0,)], 1))
    done = next(Decoder(target, drafter, 1, 64).run([Request(prompt, 8)]))
    assert done.tokens == answer
    assert [step.accepted for step in done.steps[1:4]] == [1, 1, 1]


def test_shares_equal_how_often_each_rank_of_each_head_is_right(target):
    heads, texts = random_heads(target, 3), [Text(4, prompts(4)[3]), Text(2, prompts(3)[2])]
    found, seen = torch.zeros(3, WIDTH), torch.zeros(3, 1)
    for start, ids, _ in texts:
        features = target.features(torch.tensor([ids]))[0].clone()
        for i, h in product(range(start - 1, len(ids)), (1, 2, 3)):
            if i + 1 + h < len(ids):  # not beyond the text
                seen[h - 1] += 1
                order = naive_logits(heads, target, features[i], h).argsort(descending=True)
                rank = order.tolist().index(ids[i + 1 + h])
                if rank < WIDTH:
                    found[h - 1, rank] += 1
    assert seen.min() > 10
    traces = medusa_rank_traces(heads, target, texts, 3)
    torch.testing.assert_close(shares_of(traces, texts), found / seen)


@pytest.mark.parametrize("lm_heads", ["own", "shared"])
def test_the_plan_counts_the_parameters_of_the_heads(lm_heads):
    recipe = load_recipe(RECIPE, [f"medusa.lm_heads={lm_heads}"])
    plan = make_plan(recipe)
    made = 4 * (128 * 128 + 128) + (4 * 2048 * 128 if lm_heads == "own" else 0)
    assert plan.drafter_parameters == made
    assert f"4 Medusa heads, {lm_heads} lm_heads" in dict(plan_lines(plan, recipe, 1, 1e12))["head"]


# -- files and bad input ---------------------------------------------------------------------------


def test_saved_heads_load_unchanged(target, tmp_path):
    for lm_heads in ("own", "shared"):
        heads, folder = random_heads(target, 2, 2, lm_heads), tmp_path / lm_heads
        heads.save_pretrained(folder)
        again = MedusaHeads.load_for(folder, target.identity())
        assert again.config == heads.config
        for name, tensor in heads.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name])
        assert {path.name for path in folder.iterdir()} == {
            "config.json",
            "model.safetensors",
            "SHA256SUMS",
        }


def test_damaged_or_foreign_heads_are_refused(target, tmp_path):
    with pytest.raises(HeadError, match=r"no trained Medusa heads.*train/medusa\.py"):
        MedusaHeads.load_for(tmp_path, target.identity())
    random_heads(target, 2).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="trained for random-0"):
        MedusaHeads.load_for(tmp_path, random_target(seed=9).identity())
    weights = load_file(tmp_path / "model.safetensors")
    save_file({"bias": weights["bias"]}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=r"(?s)holds no whole Medusa heads.*lm_heads"):
        MedusaHeads.load_for(tmp_path, target.identity())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(HeadError, match=r"model\.safetensors is missing"):
        MedusaHeads.load_for(tmp_path, target.identity())


def test_a_tree_deeper_than_the_heads_is_refused(target):
    heads = random_heads(target, 2)
    for block_size in (2, 3):
        with pytest.raises(ValueError, match=r"3 deep, .* for 2 Medusa heads"):
            MedusaDrafter(heads, target, StaticTree.chain(3, block_size))


def test_a_method_without_its_heads_is_refused(target):
    trained = Trained(head=random_head(target))
    with pytest.raises(RecipeError, match="medusa_tree needs Medusa heads"):
        make_method("medusa_tree", load_recipe(RECIPE), target, trained, 64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["medusa.heads=3"], "eval.tree = 'tiny_medusa_k4': 4 deep, and medusa.heads = 3"),
        (["medusa.heads=null"], "medusa_tree drafts with Medusa heads; set medusa.heads"),
        (["medusa.heads=0"], "medusa.heads = 0: must be >= 1"),
        (["medusa.soft_weight=1.5"], "medusa.soft_weight = 1.5: must be"),
        (["medusa.lm_heads=tied"], "must be one of own, shared"),
        (["student.layers=1"], "medusa.heads = 4: the recipe has a student, too"),
    ],
)
def test_invalid_settings_are_refused_when_the_recipe_is_read(overrides, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, overrides, check=problems)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/tiny.yaml"], "tiny: no Medusa heads; set medusa.heads"),
        (["recipes/tiny_medusa.yaml", "eval.methods=[falcon_tree]"], "falcon_tree needs a trained"),
        (["recipes/tiny_medusa.yaml", "train.checkpointing=true"], "no decoder layers; set it to"),
    ],
)
def test_bad_input_gives_one_clear_message_before_any_training(arguments, message):
    with pytest.raises(RecipeError, match=message):
        check(head_kind("medusa"), load_recipe(ROOT / arguments[0], arguments[1:]))


def test_trained_heads_are_measured_benchmarked_and_exported(tmp_path):
    small = ["train.steps=4", "train.batch_size=4", "train.eval_every=2", "data.limit=8"]
    small += [
        "eval.limit=2",
        "eval.validation=2",
        "eval.max_new_tokens=12",
        "eval.methods=[plain,medusa_tree]",
    ]
    small += [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_here("train/medusa.py", "recipes/tiny_medusa.yaml", *small)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [row["method"] for row in rows] == ["plain", "medusa_tree"]
    assert all(row["identical"] + row["near_ties"] == 2 for row in rows)
    # One pass per step except the first, which reads the prompt.
    assert 0.5 < rows[1]["drafter_forwards_per_step"] < 1
    options = ["--batch-sizes", "1,2", "--temperatures", "1"]
    bench = run_here("eval/bench.py", "recipes/tiny_medusa.yaml", *small, *options)
    assert bench.returncode == 0, bench.stderr[-2000:]
    rows = json.loads(
        (tmp_path / "run" / "bench" / "tiny_chat-b1+2-t1" / "report.json").read_text()
    )["runs"]
    assert all(row["identical"] + row["near_ties"] == 2 for row in rows)
    engine = ["--engine", "vllm", "--out", str(tmp_path / "served")]
    exported = run_here("eval/export.py", "recipes/tiny_medusa.yaml", *small, *engine)
    assert exported.returncode == 0, exported.stderr[-2000:]
    assert len(load_file(tmp_path / "served" / "model.safetensors")) == 4 * 3
