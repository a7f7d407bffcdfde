"""A pickle, which can run code, is refused wherever weights are read, and nothing in it runs."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from test_drafted_answers import head_of
from test_features import make_target
from test_tokens import chats, recipe, write

from specdraft.data.atomic import describe
from specdraft.data.sealed import write_sealed
from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.storage import MANIFEST
from specdraft.data.store.token_builder import build_tokens
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.falcon import FalconHead
from specdraft.models.maxgram import load_table
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.student import load_student
from specdraft.models.target import Target
from specdraft.recipes.errors import CacheError, HeadError, TargetError


class Trap:
    """An object that runs code when unpickled."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


@pytest.fixture(params=["plain", "torch"])
def trap(request, tmp_path):
    """A pickle, plain or saved by torch; after the test, it must not have run."""
    path, sprung = tmp_path / "trap", tmp_path / "sprung"
    if request.param == "plain":
        path.write_bytes(pickle.dumps(Trap(sprung)))
    else:
        torch.save({"model.embed_tokens.weight": Trap(sprung)}, path)
    yield path
    assert not sprung.exists()


@pytest.fixture
def drafters(tiny, tmp_path):
    head_of(tiny).save_pretrained(tmp_path / "head")
    config = MedusaConfig(hidden_size=tiny.hidden_size, vocab_size=tiny.vocab_size, heads=1)
    MedusaHeads.of(config, tiny.lm_head_weight).save_pretrained(tmp_path / "medusa")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "config.json").write_text('{"vocab_size": 2048}')
    return {
        "head": lambda: FalconHead.load_for(tmp_path / "head", tiny.identity()),
        "medusa": lambda: MedusaHeads.load_for(tmp_path / "medusa", tiny.identity()),
        "table": lambda: load_table(tmp_path / "table", "tiny", tiny.vocab_size),
    }


@pytest.mark.parametrize("name", ["head", "medusa", "table"])
def test_a_pickle_in_place_of_a_drafter_is_refused(drafters, trap, tmp_path, name):
    weights = tmp_path / name / "model.safetensors"
    shutil.copy(trap, weights)
    with pytest.raises(HeadError, match=r"holds no whole .*: Error while deserializing header"):
        drafters[name]()
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(HeadError, match=r"model.safetensors"):
        drafters[name]()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_place_of_a_target_is_refused_and_does_not_run(tiny, trap, tmp_path, file):
    folder = tmp_path / "model"
    tiny.config.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    shutil.copy(trap, folder / file)
    with pytest.raises(TargetError, match=f"cannot load {folder}"):
        Target.load(str(folder))
    with pytest.raises(TargetError, match=f"cannot read {folder / file}"):
        TargetEmbeddings.load(str(folder))
    with pytest.raises(TargetError, match=rf"student\.model: cannot load {folder}"):
        load_student(folder, None, tiny)


def test_a_pickle_in_place_of_a_feature_shard_is_refused_and_does_not_run(trap, tmp_path):
    settings, target = recipe(tmp_path, write(tmp_path / "a.jsonl", chats(1))), make_target()
    cache = build_features(settings, build_tokens(settings, target.tokenizer), target)
    (entry,) = cache.manifest["shards"].values()
    shutil.copy(trap, cache.directory / entry["file"])
    with pytest.raises(CacheError, match="bytes and should have"):
        FeatureCache.open(cache.directory, verify=False)
    entry |= describe(cache.directory / entry["file"])  # as where the manifest is forged, too
    write_sealed(cache.directory / MANIFEST, cache.manifest)
    forged = FeatureCache.open(cache.directory, verify=True)
    with pytest.raises(SafetensorError, match="deserializing header"):
        forged[0]
