"""Layers of the target besides its last feature: storage, training and drafting with them, and no
change without them. (test_families.py tests each family.)"""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import run_here
from decoding import PATHS, decode, prompts
from random_models import HIDDEN, random_head, random_target
from small_tokenizer import small_tokenizer
from test_checkpoint import assert_equal
from test_features import Breaking, same
from test_loop import ToyRows, log_lines, make_ends, make_head, make_recipe
from test_tokens import chats, recipe, write
from thread_ranks import on_ranks

from specdraft.data.store.feature_builder import build_features, feature_settings
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.features import OnlineFeatures
from specdraft.data.store.storage import LARGEST, TYPES, Storage, feature_bytes
from specdraft.data.store.storage import decode as read_back
from specdraft.data.store.token_builder import build_tokens
from specdraft.eval.checkup.caches import check_caches
from specdraft.eval.checkup.drafters import check_shape
from specdraft.eval.costing.tree_growth import Text, rank_traces, shares_of
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.generation.answers import build_caches
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.eval.lookup.tail import MaxGramTail
from specdraft.models.falcon import FalconHead
from specdraft.models.sar.blocks import block_index
from specdraft.models.target import Target
from specdraft.recipes.errors import CacheError, HeadError, TargetError
from specdraft.recipes.load import load_recipe
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.loop import fit
from specdraft.train.heads import head_kind
from specdraft.train.objectives.csgd import CoupledGlancing
from specdraft.train.plan import make_plan
from specdraft.train.plan_lines import plan_lines

LAYERS = (3, 1)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(layers=4)


def reading_target() -> Target:
    """A target with a tokenizer and its vocabulary."""
    tokenizer = small_tokenizer()
    model = random_target(layers=4).model
    torch.manual_seed(5)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return Target(model, tokenizer, "random-0")


@pytest.fixture
def make(tmp_path):
    """Make a recipe with these data settings, its token cache and its target."""
    source, target = write(tmp_path / "a.jsonl", chats(12)), reading_target()

    def made(**data):
        settings = recipe(tmp_path, source, **data)
        return settings, build_tokens(settings, target.tokenizer), target

    return made


def build(made, **options) -> FeatureCache:
    return build_features(*made, **{"shard_bytes": 8192, **options})


def hidden_states(target: Target, ids: torch.Tensor, layers=LAYERS) -> torch.Tensor:
    """The last feature and these layers [T, (1 + n) * H], as transformers gives them."""
    with torch.inference_mode():
        states = target.model(ids[None], use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[-1][0], *(states[n][0] for n in layers)], -1)


# -- what is stored --------------------------------------------------------------------------------


def test_a_cache_holds_the_models_own_hidden_states(make):
    _, tokens, target = made = make(feature_layers=LAYERS)
    cache, narrow = build(made), build(make())
    assert cache.manifest["settings"]["layers"] == list(LAYERS)
    assert cache.scales == pytest.approx(narrow.scales)
    for n in range(len(tokens)):
        row = cache[n]
        assert row["features"].shape == (len(tokens[n]["input_ids"]), 3 * target.hidden_size)
        torch.testing.assert_close(row["features"], hidden_states(target, row["input_ids"]))
        assert torch.equal(row["features"][:, :HIDDEN], narrow[n]["features"])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("context", [None, 2])
def test_online_features_equal_cached_ones_in_every_format(make, dtype, context):
    made = make(feature_layers=LAYERS, feature_dtype=dtype, feature_context=context)
    settings, tokens, target = made
    cache, online = build(made, batch_tokens=1), OnlineFeatures(*made)
    narrow = build(make(feature_dtype=dtype, feature_context=context), batch_tokens=1)
    assert online.scales == pytest.approx(cache.scales)
    for n in range(len(tokens)):
        row = cache[n]
        assert torch.equal(online[n]["features"], row["features"])
        assert torch.equal(row["features"][:, :HIDDEN], narrow[n]["features"])
        kept = cache.storage.kept(row["loss_mask"])
        parts = row["features"][kept].unflatten(-1, (3, -1))
        whole = hidden_states(target, row["input_ids"])[kept].unflatten(-1, (3, -1))
        # Every part has its own scale: its error is relative to its own largest value.
        largest = whole.abs().amax(-1, keepdim=True)
        limit = {"float32": 1e-5, "bfloat16": 2**-8, "float8": 2**-4, "int8": 0.51 / 127}[dtype]
        assert ((parts - whole).abs() <= limit * largest).all()
    size = sum(entry["bytes"] for entry in cache.manifest["shards"].values())
    planned = feature_bytes(sum(cache.lengths), sum(cache.kept), HIDDEN, Storage.of(settings.data))
    assert planned < size < planned + 1024 * len(cache.manifest["shards"])


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_stored_token_has_one_scale_per_layer(dtype):
    features = torch.randn(5, 3 * 8, generator=torch.Generator().manual_seed(0))
    features[:, 8:16] *= 1e4
    stored = Storage(dtype, layers=(1, 2)).encode(features)
    assert stored["scales"].shape == (5, 3)
    apart = [Storage(dtype).encode(part) for part in features.chunk(3, -1)]
    assert [part["scales"].shape for part in apart] == [(5,)] * 3
    assert torch.equal(read_back(stored), torch.cat([read_back(part) for part in apart], -1))
    nothing = Storage(dtype, layers=(1, 2)).encode(features[:0])
    assert read_back(nothing).shape == (0, 24)


def test_an_interrupted_build_resumes_and_several_ranks_build_the_same(make, tmp_path):
    settings, tokens, target = make(feature_layers=LAYERS)
    total = Breaking(target, -1)
    whole = build((settings, tokens, total), batch_tokens=100)
    elsewhere = make(feature_layers=LAYERS, cache_dir=str(tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        build((*elsewhere[:2], Breaking(target, total.forwards // 2)), batch_tokens=100)
    assert same(build(elsewhere, batch_tokens=100), whole)
    several = make(feature_layers=LAYERS, cache_dir=str(tmp_path / "ranks"))
    on_ranks(2, lambda ranks: build(several, ranks=ranks, batch_tokens=100))
    assert same(build(several), whole)


def test_a_cache_without_layers_has_the_older_settings_and_format(make):
    made = make()
    assert "layers" not in feature_settings(*made)
    assert Storage("int8").settings() == {"dtype": "int8"}
    assert Storage.of_settings({"dtype": "int8"}) == Storage("int8")
    assert build(made)[0]["features"].shape[-1] == HIDDEN


# -- training a head -------------------------------------------------------------------------------


def widened(rows: ToyRows) -> ToyRows:
    """The same rows with two layers of noise of other magnitudes appended to the features."""
    generator = torch.Generator().manual_seed(9)
    for row in rows.rows:
        layers = torch.randn(len(row["features"]), 2 * HIDDEN, generator=generator) * 40
        row["features"] = torch.cat((row["features"], layers), -1)
    return rows


@pytest.mark.parametrize("isolated", [False, True])
def test_a_new_head_with_layers_equals_one_without_them(tmp_path, isolated):
    """The same weights, loss and gradients to the bit, with noise, glancing and rollout."""
    outcomes = []
    settings = make_recipe(tmp_path, **{"glance.isolated": isolated})
    for layers, rows in (((), ToyRows()), (LAYERS, widened(ToyRows()))):
        head = make_head(feature_layers=layers)
        objective = CoupledGlancing(settings, make_ends(), head.config)
        batch = objective.collate(rows.rows[:6], [(0, 0, slot) for slot in range(6)])
        plan, counted = objective.plan(head, batch, 0.0)
        assert plan.any()
        loss, sums = objective.loss(head, batch, plan, counted)
        loss.backward()
        weights = {n: (w, w.grad) for n, w in head.named_parameters() if n != "layer_fusion"}
        outcomes.append((plan, loss, sums, weights))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)
    assert head.layer_fusion.grad.abs().max() > 0


def test_the_head_adds_a_matrix_times_normed_layers_to_the_last_feature(target):
    head = random_head(target, feature_layers=LAYERS, feature_scale=6.7)
    given = torch.randn(2, 5, 3 * HIDDEN, generator=torch.Generator().manual_seed(0)) * 30
    f, *layers = given.chunk(3, -1)
    normed = [x / (x.square().mean(-1, keepdim=True) + head.config.norm_eps).sqrt() for x in layers]
    expected = f + 6.7 * torch.cat(normed, -1) @ head.layer_fusion.T
    torch.testing.assert_close(head.join(given), expected)
    plain = random_head(target)
    assert plain.join(f) is f
    ahead, blocks = torch.randn(2, 5, HIDDEN), block_index(5, 2, 1).expand(2, -1)
    where = torch.rand(2, 5) < 0.5
    got = head(ahead, given, blocks, passes=2, revised=(ahead, given.flip(0), where))
    plain.load_state_dict(head.state_dict(), strict=False)
    plain.config = head.config.__class__(**{**vars(head.config), "feature_layers": ()})
    revised = (ahead, head.join(given.flip(0)), where)
    torch.testing.assert_close(got, plain(ahead, expected, blocks, passes=2, revised=revised))


@pytest.mark.parametrize("kind", ["falcon", "eagle"])
def test_training_on_layers_is_the_same_with_cached_and_online_features(make, tmp_path, kind):
    own = {"head.block_size": 1, "head.fusion": "linear"} if kind == "eagle" else {}
    settings, _, target = make()

    def train(name: str, **changes) -> dict:
        AcceleratorState._reset_state(True)
        data = {"sources": settings.data.sources, "cache_dir": settings.data.cache_dir}
        data |= {"feature_layers": LAYERS}
        changes |= {f"data.{key}": value for key, value in data.items()}
        one = make_recipe(tmp_path / name, **own, **changes)
        accelerator, sar = make_accelerator(one), head_kind(kind)
        _, rows = build_caches(one, target, accelerator)
        head = sar.make(one, target, rows)
        fit(head, rows, sar.objective(one, target.embeddings(), head), one, accelerator)
        return FalconHead.from_pretrained(tmp_path / name / kind).state_dict()

    alone = {"train.accumulation": 8}  # one row per forward
    build(make(feature_layers=LAYERS), batch_tokens=1)
    cached = train("cached", **alone)
    assert_equal(cached, train("online", **alone, **{"data.features": "online"}))
    assert cached["layer_fusion"].abs().max() > 0
    assert log_lines(tmp_path / "cached")


def test_a_saved_head_keeps_its_layers_and_an_older_head_has_none(target, tmp_path):
    head = random_head(target, feature_layers=LAYERS)
    head.save_pretrained(tmp_path / "new")
    again = FalconHead.from_pretrained(tmp_path / "new")
    assert again.config == head.config
    assert torch.equal(again.layer_fusion, head.layer_fusion)
    random_head(target).save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    del config["feature_layers"]
    path.write_text(json.dumps(config))
    (tmp_path / "old" / "SHA256SUMS").unlink()
    assert FalconHead.from_pretrained(tmp_path / "old").config == random_head(target).config


# -- drafting --------------------------------------------------------------------------------------


class Recording(FalconDrafter):
    """Keeps the tokens of every draft of its only row."""

    def draft(self, rows):
        trees = super().draft(rows)
        self.drafts = [*getattr(self, "drafts", []), trees[0].tokens.tolist()]
        return trees


@pytest.mark.parametrize("fusion", ["lstm", "linear"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafting_predicts_what_the_head_predicts_in_training(target, fusion, k):
    """Two passes of a chain against forwards over the whole sequence; drafted positions have no
    layers, that is, zeros, which stay zeros when normed."""
    head = random_head(target, k, fusion=fusion, feature_layers=LAYERS)
    drafter = Recording(head, target, StaticTree.chain(2 * k, k), 1, 128)
    prompt = prompts()[2]
    done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 14)]))
    assert done.fallback is None
    tokens, length = prompt + done.tokens, len(prompt)
    assert len(drafter.drafts) == len(done.steps) - 1 > 3
    for draft, step in zip(drafter.drafts, done.steps, strict=False):
        length += step.emitted
        fed = hidden_states(target, torch.tensor(tokens[:length]))[None, :-1]
        ahead, expected = target.embed(torch.tensor([tokens[1:length]])), []
        for _ in range(2):
            count = fed.shape[1]
            out = head(ahead, fed, block_index(count, k, (count - 1) % k + 1)[None])[0][:, -k:]
            best = target.logits(out)[0].argmax(-1)
            expected += best.tolist()
            fed = torch.cat((fed, torch.nn.functional.pad(out, (0, 2 * HIDDEN))), 1)
            ahead = torch.cat((ahead, target.embed(best[None])), 1)
        assert draft == expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_equals_that_of_plain_decoding(target, rows, temperature):
    """Greedy and with shared noise, prompts read in chunks, also with copied tokens appended."""
    requests = [Request(p, 14, temperature=temperature, seed=n) for n, p in enumerate(prompts())]
    expected = decode(Decoder(target, None, rows, 128), requests)
    head = random_head(target, 2, feature_layers=LAYERS)
    falcon = FalconDrafter(head, target, StaticTree(PATHS, 2), rows, 128)
    tail = MaxGramTail(falcon, PromptLookup(1, 3, rows), 3)
    for drafter in (falcon, tail):
        decoder = Decoder(target, drafter, rows, 128, prefill=7)
        assert decode(decoder, requests, accepts=False) == expected


def test_rank_shares_equal_a_count_by_whole_text_forwards(target):
    """For every position, with the layers."""
    head = random_head(target, 1, feature_layers=LAYERS)
    texts = [Text(3, prompts()[4]), Text(5, prompts()[5])]
    found = shares_of(rank_traces(head, target, texts, 1), texts)
    seen = torch.zeros(1, 21)  # the last: ranks beyond those counted
    for start, ids, _ in texts:
        wide = hidden_states(target, torch.tensor(ids))[None, :-1]
        ahead = target.embed(torch.tensor([ids[1:]]))
        out = head(ahead, wide, block_index(len(ids) - 1, 1, 1)[None])[0, 0]
        for i in range(start - 1, len(ids) - 2):
            scores = target.logits(out[i])
            rank = int((scores > scores[ids[i + 2]]).sum())
            seen[0, min(rank, 20)] += 1
    torch.testing.assert_close(found, (seen / seen.sum())[:, :20])


# -- messages --------------------------------------------------------------------------------------


def test_layers_that_the_target_lacks_are_refused_before_anything_runs(make, target):
    settings, _, reader = make(feature_layers=(1, 4))
    with pytest.raises(TargetError, match=r"data.feature_layers = \[1, 4\]: each must be below 4"):
        build_caches(settings, reader, make_accelerator(settings))
    tiny = load_recipe("recipes/tiny.yaml", ["data.feature_layers=[12]"])
    with pytest.raises(TargetError, match=r"tiny has 12 decoder layers.*from 1 to 11"):
        make_plan(tiny)
    head = random_head(target, feature_layers=(1, 9))
    with pytest.raises(TargetError, match=r"the head's feature_layers = .* train a head for this"):
        FalconDrafter(head, target, StaticTree(PATHS, 2))
    with pytest.raises(ValueError, match="each layer once"):
        random_head(target, feature_layers=(1, 1))


def test_a_cache_without_a_heads_layers_is_refused_with_the_command_to_build_it(make, target):
    reader = (made := make())[2]
    cache, wanted = build(made), feature_settings(*make(feature_layers=LAYERS))
    remedy = r"accelerate launch data/cache.py RECIPE data.feature_layers=\[3,1\]"
    with pytest.raises(CacheError, match=rf"has layers \[\] .* \[3, 1\] are wanted.*{remedy}"):
        FeatureCache.open(cache.directory, wanted)
    head = random_head(reader, feature_layers=LAYERS)
    with pytest.raises(HeadError, match=rf"layers \[3, 1\] .* 3 x 16 .* given 1 x 16.*{remedy}"):
        head.join(cache[0]["features"])
    with pytest.raises(HeadError, match=r"layers \[\] .* given 3 x 16"):
        random_head(target).join(torch.zeros(4, 48))
    found = check_shape(head, reader, cache.manifest)
    assert "reads layers [3, 1], the cache has []" in found.note
    _, findings = check_caches(make(feature_layers=LAYERS)[0], reader, 2)
    told = {finding.line: finding for finding in findings}["features"]
    assert told.outcome == "fail"
    assert "layers [] of the target, the recipe wants [3, 1]" in told.note
    build(make(feature_layers=LAYERS))
    _, findings = check_caches(make(feature_layers=LAYERS)[0], reader, 2)
    lines = {finding.line: finding.outcome for finding in findings}
    assert (lines["shards"], lines["features"], lines["scale"]) == ("pass",) * 3


def test_the_plan_counts_the_cost_of_layers():
    plain = load_recipe("recipes/vicuna7b.yaml")
    deep = load_recipe("recipes/vicuna7b.yaml", ["data.feature_layers=[2,16,29]"])
    before, after = make_plan(plain, rows=10, tokens=1000), make_plan(deep, rows=10, tokens=1000)
    assert after.cache_bytes - before.cache_bytes == 3 * (before.cache_bytes - 5 * 1000)
    assert after.drafter_parameters - before.drafter_parameters == 3 * 4096**2
    assert after.memory_per_gpu > before.memory_per_gpu
    lines = dict(plan_lines(after, deep, 1, 1e12))
    assert "layers 2, 16, 29 of the target" in lines["head"]
    assert "3 layers beside the feature" in lines["feature cache"]


def test_a_run_with_layers_trains_benchmarks_and_passes_the_doctor(tmp_path):
    small = ["train.steps=2", "train.batch_size=2", "train.threads=1", "data.limit=8"]
    small += ["eval.limit=1", "eval.validation=1", "eval.max_new_tokens=8"]
    small += ["eval.methods=[plain,falcon_tree]", "data.feature_layers=[3,9]"]
    small += ["eval.tree=tiny_coupled_k3"]
    small += [f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    for command in ("train/falcon.py", "eval/bench.py", "eval/doctor.py"):
        done = run_here(command, "recipes/tiny.yaml", *small)
        assert done.returncode == 0, done.stdout + done.stderr
