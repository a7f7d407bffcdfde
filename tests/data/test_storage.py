"""Features in fewer bytes and of fewer tokens: the loss is bounded, measured and reported."""

import hashlib
import json
import os
from collections import Counter

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import run_here
from random_models import random_target
from safetensors.torch import load_file
from test_distill import ToyTexts
from test_distill import train as train_student
from test_features import HIDDEN, Breaking, cut, flip, make_target, same
from test_loop import ToyRows, train
from test_medusa import make_recipe, random_heads
from test_tokens import chats, recipe, write
from thread_ranks import on_ranks

from specdraft.data import fingerprint
from specdraft.data.sealed import write_sealed
from specdraft.data.store import storage
from specdraft.data.store.feature_builder import build_features, feature_settings
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.read_ahead import first_bytes, read_ahead
from specdraft.data.store.storage import LARGEST, TYPES, Storage, decode
from specdraft.data.store.token_builder import build_tokens
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.checkup.caches import check_rows
from specdraft.models.target import Target
from specdraft.recipes.errors import CacheError, RecipeError
from specdraft.recipes.schema import Recipe
from specdraft.train.objectives.ahead import TokensAhead

SMALL = 4096  # bytes of a shard: a handful of rows
Made = tuple[Recipe, TokenCache, Target]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)


# -- number formats --------------------------------------------------------------------------------


def representable(dtype: str) -> torch.Tensor:
    """Every finite value of a one-byte format."""
    patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = patterns.view(TYPES[dtype]).double()
    values = values[values.isfinite() & (values > -128)]  # int8 is symmetric
    assert values.max() == LARGEST[dtype]
    return values


def features_of_all_sizes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 64, generator=generator)
    rows[1] *= 1e30
    rows[2] *= 3e37
    rows[3] *= 1e-30
    rows[4] *= 1e-40  # subnormal numbers
    rows[5] = 0.0
    rows[6, 7] = 1000.0  # one channel far larger than the others
    rows[7] = rows[7].exp().pow(4)
    rows[8] = -3.0
    return rows


@pytest.mark.parametrize("dtype", LARGEST)
def test_every_value_is_rounded_to_the_nearest_byte_times_its_scale(dtype):
    features = features_of_all_sizes()
    stored = Storage(dtype).encode(features)
    assert stored["features"].dtype == TYPES[dtype]
    assert (stored["scales"].shape, stored["scales"].dtype) == ((12,), torch.float32)
    scales, exact = stored["scales"].double()[:, None], features.double()
    found = decode(stored)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert torch.equal(found[5], features[5])
    error = (found.double() - exact).abs()
    nearest = (representable(dtype) * scales[..., None] - exact[..., None]).abs().amin(-1)
    assert (error <= nearest + 1e-6 * exact.abs() + 1e-45).all()
    # The bounds that the module states.
    bound = scales / 2 if dtype == "int8" else (exact.abs() / 2**4).maximum(scales / 2**10)
    assert (error <= 1.00001 * bound + 1e-45).all()
    largest = exact.abs().amax(-1)
    used = largest > LARGEST[dtype] * torch.finfo().tiny
    torch.testing.assert_close(scales[used, 0] * LARGEST[dtype], largest[used])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_wider_formats_round_and_have_no_scales(dtype):
    features = features_of_all_sizes()
    stored = Storage(dtype).encode(features)
    assert stored.keys() == {"features"}
    assert torch.equal(decode(stored), features.to(TYPES[dtype]))


def test_half_precision_features_are_quantised_like_float32_ones():
    features = torch.randn(4, 32).bfloat16()
    for dtype in LARGEST:
        narrow, wide = (Storage(dtype).encode(f) for f in (features, features.float()))
        assert torch.equal(decode(narrow), decode(wide))


# -- which tokens have features --------------------------------------------------------------------


def test_a_feature_is_kept_if_a_supervised_token_follows_within_the_context():
    generator = torch.Generator().manual_seed(1)
    for length in (1, 2, 9, 20):
        for density in (0.0, 0.1, 0.5, 1.0):
            mask = torch.rand(length, generator=generator) < density
            for context in (1, 2, 5, 20, 99):
                kept = Storage("float32", context).kept(mask)
                naive = [bool(mask[j + 1 : j + 1 + context].any()) for j in range(length)]
                assert kept.tolist() == naive
            assert Storage("float32").kept(mask).all()


def holes(data):
    """Masks with unsupervised gaps and tails, as in chats that end with a question."""
    generator = torch.Generator().manual_seed(2)
    for row in data.rows:
        length = len(row["input_ids"])
        row["loss_mask"] = torch.rand(length, generator=generator) < 0.4
        row["loss_mask"][length - int(torch.randint(4, (), generator=generator)) :] = False
        row["loss_mask"][3] = True
    return data


def without(data, context: int):
    """The same rows with all features but the kept ones set to zero."""
    storage = Storage("float32", context)
    for row in data.rows:
        kept = row["features"][storage.kept(row["loss_mask"])]
        row["features"] = storage.spread(kept, row["loss_mask"])
    return data


def equal(weights: dict, others: dict) -> bool:
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("k", "changes"),
    [
        (1, {}),
        (2, {}),
        (3, {"glance.start": 0.9, "train.rollout": 3}),
        (2, {"glance.start": 0.9, "glance.isolated": True, "glance.supervise_revealed": True}),
    ],
)
def test_a_head_never_reads_features_after_the_last_supervised_token(tmp_path, k, changes):
    changes = changes | {"train.steps": 2}
    _, whole = train(tmp_path / "whole", holes(ToyRows()), k=k, **changes)
    rows = without(holes(ToyRows()), context=99)
    assert any((row["features"] == 0).all(-1).sum() > 1 for row in rows.rows)
    _, trimmed = train(tmp_path / "trimmed", rows, k=k, **changes)
    assert equal(whole, trimmed)
    _, bounded = train(tmp_path / "bounded", without(holes(ToyRows()), context=1), k=k, **changes)
    assert not equal(whole, bounded)


def test_a_student_reads_only_the_feature_before_each_supervised_token(tmp_path):
    target = random_target()
    options = {"target": target, "distill.jsd": 0.5}
    _, whole = train_student(tmp_path / "whole", holes(ToyTexts(target)), **options)
    rows = without(holes(ToyTexts(target)), context=1)
    _, trimmed = train_student(tmp_path / "trimmed", rows, **options)
    assert equal(whole, trimmed)


def test_medusa_heads_need_a_feature_context_of_their_number_plus_one():
    target = random_target()
    objective = TokensAhead(make_recipe(**{"medusa.soft_weight": 0.5}), target)
    heads = random_heads(target, 3)

    def loss(rows: list[dict]) -> torch.Tensor:
        batch = objective.collate(rows, [(0, 0, n) for n in range(len(rows))])
        total, _ = objective.loss(heads, batch, *objective.plan(heads, batch, 0.0))
        return total

    whole = loss(holes(ToyTexts(target)).rows)
    assert torch.equal(loss(without(holes(ToyTexts(target)), context=4).rows), whole)
    assert not torch.equal(loss(without(holes(ToyTexts(target)), context=3).rows), whole)


# -- on the disk -----------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path):
    """Tokens of chats truncated anywhere, with their target and recipe."""
    rows = chats(24)
    for number, row in enumerate(rows):
        row["messages"][2]["content"] += " Tell me more." * (number % 9)
    source = write(tmp_path / "a.jsonl", rows)

    def made(folder: str = "", **data) -> Made:
        settings = recipe(tmp_path / folder, source, max_length=48, **data)
        target = make_target()
        return settings, build_tokens(settings, target.tokenizer), target

    return made


def build(made: Made, **options) -> FeatureCache:
    return build_features(*made, **{"shard_bytes": SMALL, **options})


STORED = [("float32", None), ("bfloat16", 9), ("float8", None), ("int8", 48), ("int8", 3)]
every_storage = pytest.mark.parametrize(("dtype", "context"), STORED)


@every_storage
def test_a_row_has_its_stored_features_and_zeros_for_the_others(make, dtype, context):
    made = make(feature_dtype=dtype, feature_context=context)
    cache, whole = build(made, shard_bytes=1 << 20), build(make(), shard_bytes=1 << 20)
    storage = Storage(dtype, context)
    for n in range(len(cache)):
        row, exact = cache[n], whole[n]
        assert torch.equal(row["input_ids"], exact["input_ids"])
        assert torch.equal(row["loss_mask"], exact["loss_mask"])
        kept = storage.kept(row["loss_mask"])
        stored = decode(storage.encode(exact["features"][kept]))
        assert torch.equal(row["features"][kept], stored)
        assert not row["features"][~kept].any()
        assert len(stored) == cache.kept[n]
    assert (sum(cache.kept) < sum(cache.lengths)) == (context is not None)
    assert cache.manifest["feature_scale"] == whole.manifest["feature_scale"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="a system that cannot be asked")
@every_storage
def test_read_ahead_covers_exactly_the_requested_rows(make, dtype, context, monkeypatch):
    cache, rows = build(make(feature_dtype=dtype, feature_context=context)), [3, 0, 11]
    features, asked = [cache[n]["features"] for n in range(len(cache))], Counter()

    def fetch(file, start, count, _):
        asked.update((os.fstat(file).st_ino, byte) for byte in range(start, start + count))

    monkeypatch.setattr(os, "posix_fadvise", fetch)
    cache.will_read(rows)
    assert {*asked.values()} == {1}
    for path in cache.directory.glob("*.safetensors"):  # zero all other bytes
        left, file = bytearray(path.read_bytes()), path.stat().st_ino
        for name, tensor in load_file(path).items():
            if name in ("features", "scales"):
                first = first_bytes(path)[name]
                for byte in range(first, first + tensor.nbytes):
                    left[byte] *= (file, byte) in asked
        path.write_bytes(left)
    found = FeatureCache(cache.directory, cache.manifest)
    for n, wanted in enumerate(features):
        assert torch.equal(found[n]["features"], wanted) == (n in rows)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="a system that cannot be asked")
def test_an_empty_row_is_not_read_ahead(tmp_path, monkeypatch):
    (path := tmp_path / "shard").write_bytes(bytes(16))
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *span: asked.append(span[:2]))
    read_ahead(path, [(8, 0), (8, 4)])
    assert asked == [(8, 4)]


@every_storage
def test_the_manifest_states_the_quantisation_error(make, dtype, context):
    cache, whole = build(make(feature_dtype=dtype, feature_context=context)), build(make())
    storage, error, squares = Storage(dtype, context), 0.0, 0.0
    for n in range(len(cache)):
        kept = storage.kept(cache[n]["loss_mask"])
        exact = whole[n]["features"][kept].double()
        error += (cache[n]["features"][kept].double() - exact).square().sum().item()
        squares += exact.square().sum().item()
    said = cache.manifest["quantisation"]
    assert said["format"] == dtype
    assert said["scale"] == ("token" if dtype in LARGEST else None)
    assert said["error"] == pytest.approx((error / squares) ** 0.5, rel=1e-3, abs=1e-6)
    assert (said["error"] == 0) == (dtype == "float32")
    assert said["error"] < {"float32": 1e-9, "bfloat16": 3e-3, "int8": 0.01, "float8": 0.04}[dtype]


@every_storage
def test_the_size_is_announced_before_the_first_forward(make, dtype, context):
    settings, tokens, target = make(feature_dtype=dtype, feature_context=context)
    told = []
    with pytest.raises(KeyboardInterrupt):
        build((settings, tokens, Breaking(target, 0)), announce=lambda *what: told.append(what))
    cache = build((settings, tokens, target))
    ((count, size),) = told
    assert count == sum(cache.lengths)
    entries = cache.manifest["shards"].values()
    real = sum(entry["bytes"] for entry in entries)
    assert len(entries) > 1
    assert size < real < size + 512 * len(entries)  # the headers
    plan = storage.feature_bytes(count, sum(cache.kept), HIDDEN, cache.storage)
    assert plan == size


def test_the_planned_size_is_the_size_of_the_cache(tmp_path):
    places = [f"data.cache_dir={tmp_path}", "data.limit=8", "data.feature_context=20"]
    places.append("data.feature_layers=[]")
    command = ["data/cache.py", "recipes/tiny.yaml", *places, "data.feature_dtype=int8"]
    planned = run_here(*command, "--dry-run").stdout
    assert "at most 8 rows" in planned
    made = run_here(*command).stdout
    (folder,) = tmp_path.glob("features-*")
    cache = FeatureCache.open(folder)
    tokens, kept = sum(cache.lengths), sum(cache.kept)
    size = f"{(kept * (128 + 4) + tokens * 5) / 1000:.3g} KB"
    assert made.startswith(f"features to make: {tokens:,} tokens, {size} in int8")
    assert f"{kept:,} stored in int8, one scale per token; relative error (RMS) 0.0" in made
    assert size in run_here(*command, "--dry-run").stdout
    assert "features to make" not in run_here(*command).stdout


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_an_interrupted_build_and_one_of_two_ranks_equal_an_uninterrupted_one(make, dtype):
    options = {"feature_dtype": dtype, "feature_context": 9}
    alone = build(make(**options))
    settings, tokens, target = make("cut", **options)
    told = []
    with pytest.raises(KeyboardInterrupt):
        build((settings, tokens, Breaking(target, 2)))
    resumed = build((settings, tokens, target), announce=lambda *what: told.append(what))
    assert 0 < told[0][0] < sum(tokens.lengths)

    made = make("ranks", **options)
    caches = on_ranks(2, lambda ranks: build(made, ranks=ranks))
    for other in (resumed, *caches):
        assert same(other, alone)
        for key in ("quantisation", "feature_scale", "embed_scale", "kept", "lengths"):
            assert other.manifest[key] == alone.manifest[key]


@pytest.mark.parametrize("harm", [flip, cut])
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_a_damaged_shard_is_found_on_opening(make, dtype, harm):
    cache = build(make(feature_dtype=dtype))
    harm(cache.directory / cache.manifest["shards"]["1"]["file"])
    with pytest.raises(CacheError, match="delete that file and run again"):
        FeatureCache.open(cache.directory)


def rewrite(cache: FeatureCache, **changes) -> None:
    """Write a manifest as before quantised features, with changes."""
    manifest = json.loads(json.dumps(cache.manifest | {"quantisation": None} | changes))
    del manifest["kept"]
    for entry in manifest["shards"].values():
        del entry["error_moments"]
    write_sealed(cache.directory / storage.MANIFEST, manifest)


def test_an_older_cache_opens_and_an_unfinished_older_one_is_completed(make):
    settings, tokens, target = made = make(feature_dtype="bfloat16")
    names = {"version", "weights", "config", "target_dtype", "tokenizer", "template", "tokens"}
    names.add("dtype")
    assert feature_settings(settings, tokens, target).keys() == names  # a new key renames it
    cache = build(made)
    rewrite(cache)
    opened = build((settings, tokens, Breaking(target, 0)))
    assert opened.manifest["quantisation"] is None
    assert same(opened, cache)

    entries = cache.manifest["shards"]
    rewrite(cache, complete=False, shards={number: entries[number] for number in ("0", "1")})
    finished = build(made)
    assert same(finished, cache)
    assert finished.manifest["feature_scale"] == cache.manifest["feature_scale"]
    assert 0 < finished.manifest["quantisation"]["error"] < 3e-3


@every_storage
def test_the_doctor_checks_features_in_every_storage_format(make, dtype, context):
    settings, _, target = made = make(feature_dtype=dtype, feature_context=context)
    cache = build(made)

    def outcomes(rows: list[dict]) -> dict[str, str]:
        return {line.line: line.outcome for line in check_rows(settings, target, cache, rows)}

    rows = [cache[n] for n in range(8)]
    found = outcomes(rows)
    assert (found["features"], found["scale"]) == ("pass", "pass")
    wrong = [row | {"features": 3 * row["features"]} for row in rows]
    assert outcomes(wrong)["features"] == "fail"


def test_the_doctor_can_check_rows_with_a_single_stored_feature(make):
    settings, _, target = made = make(feature_context=1)
    cache, rows = build(made), []
    for row in (cache[n] for n in range(4)):  # cut after the first supervised token
        end = int(row["loss_mask"].int().argmax()) + 1
        rows.append({name: values[:end] for name, values in row.items()})
    found = {line.line: line.outcome for line in check_rows(settings, target, cache, rows)}
    assert (found["features"], found["scale"], found["shift"]) == ("pass", "pass", "skipped")
    wrong = [row | {"features": 3 * row["features"]} for row in rows]
    assert next(check_rows(settings, target, cache, wrong)).outcome == "fail"


@pytest.mark.parametrize(
    ("dtype", "way_out"),
    [
        ("float32", "data.feature_dtype=bfloat16 or int8"),
        ("bfloat16", "data.feature_dtype=int8"),
        ("float8", "data.features=online"),
        ("int8", "data.features=online"),
    ],
)
def test_a_full_disk_error_names_settings_that_need_less_space(tmp_path, dtype, way_out):
    with pytest.raises(CacheError, match=rf"short; set {way_out}, a lower data.limit"):
        storage.check_disk(tmp_path / "features", 9, 1 << 60, dtype)


def test_every_storage_format_has_its_own_cache(make):
    made = [make(feature_dtype=dtype, feature_context=context) for dtype, context in STORED]
    assert len({build(one).directory for one in made}) == len(STORED)


@pytest.mark.parametrize("data", [{"feature_dtype": "int4"}, {"feature_context": 0}])
def test_invalid_storage_settings_are_refused(make, data):
    with pytest.raises(RecipeError, match=next(iter(data))):
        make(**data)


@pytest.mark.parametrize("key", ["settings", "lengths", "kept", "shards"])
def test_a_changed_or_malformed_manifest_is_refused(make, key):
    cache = build(make())
    path = cache.directory / storage.MANIFEST
    content = json.loads(path.read_text())
    for value in (7, None, [], "x", {"0": 3}):
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(CacheError, match="its checksum is another"):
            FeatureCache.open(cache.directory)
        path.write_text(json.dumps(content | {key: value, "sha256": None}))  # an older manifest
        with pytest.raises(CacheError, match=r"manifest.json is damaged"):
            FeatureCache.open(cache.directory)


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 14, 20])
def test_a_file_hashed_in_parts_has_the_sha256_of_its_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(fingerprint, "PART", 7)
    (path := tmp_path / "file").write_bytes(content := bytes(range(size)))
    assert fingerprint.of_file(path) == hashlib.sha256(content).hexdigest()
