"""The feature cache: correct values, never half a shard, never another target's."""

import errno
import json
import os
import pickle
import shutil
import signal
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import small_tokenizer as st
import torch
from commands import run
from test_tokens import chats, recipe, write
from thread_ranks import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.data import atomic
from specdraft.data.sealed import write_sealed
from specdraft.data.store import storage
from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.storage import Storage
from specdraft.data.store.token_builder import build_tokens
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.models.weights.identity import identity_of
from specdraft.recipes.errors import CacheError, DataError

HIDDEN = 16
SMALL = 8192  # bytes of a shard: a handful of rows


def make_target(seed: int = 0, context: int = 256) -> Target:
    torch.manual_seed(seed)
    tokenizer = st.small_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
    )
    return Target(LlamaForCausalLM(config), tokenizer, f"random-{seed}")


@pytest.fixture
def made(tmp_path):
    """A recipe, its token cache and its target."""
    rows = chats(24)
    for number, row in enumerate(rows):
        row["messages"][0]["content"] += " Tell me more." * (number % 7)
    settings = recipe(tmp_path, write(tmp_path / "a.jsonl", rows))
    target = make_target()
    return settings, build_tokens(settings, target.tokenizer), target


def build(made, **options) -> FeatureCache:
    settings, tokens, target = made
    return build_features(settings, tokens, target, **{"shard_bytes": SMALL, **options})


def same(first: FeatureCache, second: FeatureCache) -> bool:
    return len(first) == len(second) and all(
        all(torch.equal(first[n][name], second[n][name]) for name in first[n])
        for n in range(len(first))
    )


def test_a_row_is_what_the_target_computes_for_it_alone(made):
    _, tokens, target = made
    cache = build(made, batch_tokens=300)
    assert len(cache) == len(tokens) == 24
    for n in range(len(tokens)):
        row, ids = cache[n], tokens[n]["input_ids"]
        assert torch.equal(row["input_ids"], ids)
        assert torch.equal(row["loss_mask"], tokens[n]["loss_mask"])
        assert row["features"].shape == (len(ids), HIDDEN)
        torch.testing.assert_close(row["features"], target.features(ids[None])[0])
    assert cache.lengths == tokens.lengths
    assert len(cache.manifest["shards"]) > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_shards_assembled_in_the_same_memory_hold_their_own_rows(made, tmp_path, dtype):
    """Many small shards, of rows of all lengths, have the contents of a single one."""
    settings, tokens, target = made
    whole, small = (
        replace(
            settings,
            data=replace(settings.data, cache_dir=str(tmp_path / name), feature_dtype=dtype),
        )
        for name in ("whole", "small")
    )
    one = build_features(whole, tokens, target, batch_tokens=1)
    many = build_features(small, tokens, target, batch_tokens=1, shard_bytes=2048)
    assert len(one.manifest["shards"]) == 1 < 8 < len(many.manifest["shards"])
    assert same(one, many)


@pytest.mark.skipif(os.name != "posix", reason="modes are posix's")
def test_a_shards_file_permissions_follow_the_umask(made):
    before = os.umask(0o027)
    try:
        cache = build(made)
    finally:
        os.umask(before)
    files = [cache.directory / entry["file"] for entry in cache.manifest["shards"].values()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_the_manifest_records_target_template_shards_and_scales(made):
    _, tokens, target = made
    cache = build(made)
    manifest = cache.manifest
    assert manifest["target"] == target.identity()
    assert manifest["settings"]["template"] == tokens.meta["settings"]["template"]
    assert {"file", "bytes", "sha256", "rows"} <= manifest["shards"]["0"].keys()
    every = torch.cat([cache[n]["features"] for n in range(len(cache))])
    ids = torch.cat([cache[n]["input_ids"] for n in range(len(cache))])
    assert manifest["feature_scale"] == pytest.approx(every.std().item(), rel=1e-3)
    assert manifest["embed_scale"] == pytest.approx(target.embed(ids).std().item(), rel=1e-3)


def test_bfloat16_features_are_the_float32_ones_rounded(made, tmp_path):
    settings, tokens, target = made
    half = recipe(tmp_path, settings.data.sources[0], feature_dtype="bfloat16")
    cache, whole = build_features(half, tokens, target), build(made)
    assert cache.directory != whole.directory
    for n in range(len(cache)):
        made_so, rounded = cache[n]["features"], whole[n]["features"].bfloat16()
        assert made_so.dtype is torch.bfloat16
        # A feature computed twice may differ in its last digit and be rounded the other way.
        torch.testing.assert_close(made_so, rounded, rtol=2**-7, atol=1e-4)
        assert (made_so == rounded).float().mean() > 0.98


def test_changing_a_row_in_place_does_not_change_the_cache(made):
    cache = build(made)
    cache[3]["features"].add_(1)
    assert same(cache, FeatureCache.open(cache.directory))


def test_a_cache_can_be_pickled(made):
    cache = build(made)
    cache[0]
    assert same(pickle.loads(pickle.dumps(cache)), cache)


def test_rows_past_the_end_are_an_index_error(made):
    cache = build(made)
    assert torch.equal(cache[-1]["features"], cache[23]["features"])
    with pytest.raises(IndexError):
        cache[24]


class Breaking:
    """A target that counts forwards and fails at the n-th."""

    def __init__(self, target: Target, after: int):
        self._target, self.left, self.forwards = target, after, 0

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def features(self, ids, **options):
        if self.left == self.forwards:
            raise KeyboardInterrupt
        self.forwards += 1
        return self._target.features(ids, **options)


def test_an_interrupted_build_resumes_where_it_stopped(made, tmp_path):
    settings, tokens, target = made
    total = Breaking(target, -1)
    elsewhere = recipe(tmp_path, settings.data.sources[0], cache_dir=str(tmp_path / "2"))
    whole = build((elsewhere, tokens, total))
    first = Breaking(target, total.forwards // 2)
    with pytest.raises(KeyboardInterrupt):
        build((settings, tokens, first))
    (directory,) = Path(settings.data.cache_dir).glob("features-*")
    with pytest.raises(CacheError, match="is not finished"):
        FeatureCache.open(directory)
    rest = Breaking(target, -1)
    cache = build((settings, tokens, rest))
    assert first.forwards + rest.forwards == total.forwards
    assert same(cache, whole)
    assert cache.manifest["feature_scale"] == whole.manifest["feature_scale"]


def test_a_finished_cache_needs_no_forward(made):
    settings, tokens, target = made
    whole = build(made)
    assert same(build((settings, tokens, Breaking(target, 0))), whole)


KILLED = """
import os, signal, sys
from specdraft.data.store import storage
from test_features import build, make_target
from specdraft.data.store.tokens import TokenCache
from specdraft.recipes.load import load_recipe
write, written = os.fsync, []
def fsync(handle):
    written.append(handle)
    if len(written) == 12:  # between a shard's bytes and its name
        os.kill(os.getpid(), signal.SIGKILL)
    write(handle)
os.fsync = fsync
build((load_recipe(sys.argv[1]), TokenCache.open(sys.argv[2]), make_target()))
"""


def test_after_kill_9_nothing_half_written_is_taken_for_complete(made, tmp_path):
    from specdraft.recipes.load import dump

    settings, tokens, _ = made
    dump(settings, tmp_path / "test.yaml")
    (tmp_path / "killed.py").write_text(KILLED)
    killed = run(tmp_path / "killed.py", tmp_path / "test.yaml", tokens.directory)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (directory,) = Path(settings.data.cache_dir).glob("features-*")
    named = json.loads((directory / storage.MANIFEST).read_text())["shards"]
    assert 0 < len(named) < len(list(directory.iterdir()))
    elsewhere = recipe(tmp_path, settings.data.sources[0], cache_dir=str(tmp_path / "2"))
    assert same(build(made), build((elsewhere, *made[1:])))


def test_a_shard_that_is_not_in_the_manifest_is_made_again(made):
    cache = build(made)
    good = {n: cache[n]["features"] for n in range(len(cache))}
    path = cache.directory / storage.MANIFEST
    manifest = json.loads(path.read_text())
    entry = manifest["shards"].pop("1")
    manifest["complete"] = False
    write_sealed(path, manifest)
    (cache.directory / entry["file"]).write_bytes(b"left by a crash")
    again = build(made)
    assert all(torch.equal(again[n]["features"], features) for n, features in good.items())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "words"), [(flip, "sha256"), (cut, "bytes and should have"), (Path.unlink, "missing")]
)
def test_a_damaged_shard_is_found_on_opening_and_rebuilt_once_deleted(made, harm, words):
    cache = build(made)
    good = {n: cache[n]["features"] for n in range(len(cache))}
    path = cache.directory / cache.manifest["shards"]["1"]["file"]
    del cache
    harm(path)
    with pytest.raises(CacheError, match=rf"{path.name} .*{words}"):
        FeatureCache.open(path.parent)
    if path.exists():
        with pytest.raises(CacheError, match=words):
            build(made)
        path.unlink()
    again = build(made)
    assert all(torch.equal(again[n]["features"], features) for n, features in good.items())


def test_another_target_has_its_own_cache_and_a_mix_up_names_both(made, tmp_path):
    settings, tokens, _ = made
    first, other = build(made), build((settings, tokens, make_target(seed=1)))
    assert first.directory != other.directory
    shutil.copy(other.directory / storage.MANIFEST, first.directory / storage.MANIFEST)
    both = f"random-1 .*{other.manifest['target']['weights'][:12]}.*"
    both += first.manifest["target"]["weights"][:12]
    with pytest.raises(CacheError, match=both):
        build(made)


def test_the_same_weights_with_another_config_are_another_target(made, tmp_path):
    folder = shutil.copytree(bundled_target_dir(), tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())

    def written(file: str, **changes) -> str:
        told = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps(told))
        return identity_of("target", None, folder)["config"]

    first = written("config.json", transformers_version="5.0")  # no change of the model
    assert first == identity_of("tiny", None, bundled_target_dir())["config"]
    rope = config["rope_parameters"] | {"rope_theta": 12345.0}
    others = {written("config.json", rope_parameters=rope)}
    others.add(written("generation_config.json", eos_token_id=[3, 4]))
    assert len(others - {first}) == 2
    assert build(made).manifest["settings"]["config"] == made[2].identity()["config"]


def test_too_little_disk_space_is_an_error_before_anything_runs(made, monkeypatch):
    settings, tokens, target = made
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 100))
    with pytest.raises(CacheError, match=r"out of disk: .* short; set data.feature_dtype"):
        build((settings, tokens, Breaking(target, 0)))


def test_a_disk_that_fills_up_is_an_error_and_written_shards_stay_valid(made, monkeypatch):
    settings, tokens, _ = made
    flush, flushed = os.fsync, []

    def full(handle):
        flushed.append(handle)
        if len(flushed) == 9:  # within a shard
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(atomic.shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
        with pytest.raises(CacheError, match=r"out of disk: .* needs .* KiB .* stays valid: make"):
            build(made)
    (directory,) = Path(settings.data.cache_dir).glob("features-*")
    named = json.loads((directory / storage.MANIFEST).read_text())["shards"].values()
    assert named
    assert not any(atomic.damage(directory, entry, checksum=True) for entry in named)
    assert not list(directory.glob(".*.partial"))
    assert len(build(made)) == len(tokens)


def test_a_full_disk_error_states_what_is_needed_free_and_short(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage(9, 9, 1 << 20))
    with pytest.raises(CacheError, match=r"needs 3\.0 MiB and 1\.0 MiB are free, 2\.0 MiB short"):
        atomic.write_atomic(tmp_path / "file", b"x" * (3 << 20))
    # The part written is deleted first, so that its space counts as free.
    free = lambda path: usage(9, 9, 512 - 512 * any(tmp_path.iterdir()))  # noqa: E731
    monkeypatch.setattr(atomic.shutil, "disk_usage", free)
    with pytest.raises(CacheError, match=r"needs 2\.0 KiB and 0\.5 KiB are free, 1\.5 KiB short"):
        atomic.write_atomic(tmp_path / "file", b"x" * 2048)
    assert not list(tmp_path.iterdir())


def test_the_size_of_a_cache_is_estimated_correctly(made):
    cache = build(made)
    count = sum(cache.lengths)
    estimate = storage.feature_bytes(count, count, HIDDEN, Storage("float32"))
    size = sum(entry["bytes"] for entry in cache.manifest["shards"].values())
    assert estimate <= size <= estimate + 1024 * len(cache.manifest["shards"])


def test_rows_longer_than_the_context_are_refused(made):
    settings, tokens, _ = made
    with pytest.raises(DataError, match=r"data.max_length=32"):
        build((settings, tokens, make_target(context=32)))


def test_ranks_write_disjoint_shards_of_one_cache(made, tmp_path):
    settings, tokens, target = made
    targets = [Breaking(target, -1), Breaking(target, -1)]
    caches = on_ranks(2, lambda r: build((settings, tokens, targets[r.rank]), ranks=r))
    assert min(t.forwards for t in targets) > 0
    elsewhere = recipe(tmp_path, settings.data.sources[0], cache_dir=str(tmp_path / "2"))
    alone = build((elsewhere, tokens, target))
    assert same(caches[0], alone)
    assert same(caches[1], alone)
    assert [p.name for p in alone.directory.glob("manifest*")] == [storage.MANIFEST]
    assert [p.name for p in caches[0].directory.glob("manifest*")] == [storage.MANIFEST]
