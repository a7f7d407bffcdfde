"""Saved drafters may come from anywhere: errors are reported before a tensor is allocated."""

import hashlib
import json
import resource
from pathlib import Path

import pytest
import torch
from random_models import VOCAB, random_head, random_target
from safetensors.torch import load_file, save_file

from specdraft.models.falcon import FalconHead
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable, load_table
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.saved import CONFIG, WEIGHTS
from specdraft.models.weights.checksums import write_sums
from specdraft.recipes.errors import HeadError

KINDS = ["head", "medusa", "table"]
COUNTS = {
    "head": ["hidden_size", "vocab_size", "block_size", "layers", "heads", "kv_heads"],
    "medusa": ["hidden_size", "vocab_size", "heads", "layers"],
    "table": ["vocab_size"],
}


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(params=KINDS)
def drafter(request, target, tmp_path):
    """A kind of drafter, the folder of a saved one, and a function that loads it."""
    folder, whose = tmp_path / "drafter", target.identity()
    if request.param == "head":
        random_head(target).save_pretrained(folder)
        return request.param, folder, lambda: FalconHead.load_for(folder, whose)
    if request.param == "medusa":
        config = MedusaConfig(target.hidden_size, VOCAB, 2, target=whose)
        MedusaHeads.of(config, target.lm_head_weight).save_pretrained(folder)
        return request.param, folder, lambda: MedusaHeads.load_for(folder, whose)
    seen = torch.arange(VOCAB)
    MaxGramTable.of_counts(MaxGramConfig(VOCAB), seen, seen, seen).save_pretrained(folder)
    return request.param, folder, lambda: load_table(folder, "mine", VOCAB)


def refused(load, *words: str) -> None:
    """Loading is refused in one line with these words, before anything large is allocated."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HeadError) as refusal:
        load()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 600
    for word in words:
        assert word in message


def change_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_intact_drafter_loads(drafter):
    assert not drafter[2]().training


def test_the_weights_have_the_same_file_permissions_as_the_config(drafter):
    """safetensors' own mode is owner-only, which would stop a server run by another user."""
    _, folder, _ = drafter
    assert (folder / WEIGHTS).stat().st_mode == (folder / CONFIG).stat().st_mode


@pytest.mark.parametrize("text", ["[]", "null", '"head"', "7", "", "{", "[" * 100_000, "\ud800"])
def test_a_config_that_is_no_json_object_is_refused(drafter, text):
    _, folder, load = drafter
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(load, str(folder), "config.json")


def test_a_huge_config_is_refused_unread(drafter):
    _, folder, load = drafter
    with (folder / "config.json").open("r+b") as file:
        file.truncate(10**12)
    refused(load, "config.json has 1000000000000 bytes")


@pytest.mark.parametrize("value", [0, -1, 2.0, 2.5, True, None, "2", [2], {}, 10**9, 10**60])
def test_a_count_that_is_no_whole_number_in_its_range_is_refused(drafter, value):
    kind, folder, load = drafter
    written = (folder / "config.json").read_text()
    for key in COUNTS[kind]:
        change_config(folder, **{key: value})
        refused(load, str(folder), "config.json", f"{key} = ", "must be")
        (folder / "config.json").write_text(written)


@pytest.mark.parametrize("drafter", ["head"], indirect=True)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, 1e-300, "1", None])
@pytest.mark.parametrize("key", ["embed_scale", "feature_scale", "rope_theta"])
def test_a_scale_that_cannot_be_divided_by_is_refused(drafter, key, value):
    _, folder, load = drafter
    change_config(folder, **{key: value})
    refused(load, "config.json", f"{key} = ")


@pytest.mark.parametrize("drafter", ["head", "medusa"], indirect=True)
@pytest.mark.parametrize("target_identity", [[], "x", {"name": "x"}, {"name": 1, "weights": "w"}])
def test_an_invalid_target_identity_is_refused(drafter, target_identity):
    _, folder, load = drafter
    change_config(folder, target=target_identity)
    refused(load, "config.json", "target = ")


def test_keys_that_are_missing_or_unknown_are_named(drafter):
    _, folder, load = drafter
    change_config(folder, speed=9)
    refused(load, "'speed' is no key; known: ")
    written = json.loads((folder / "config.json").read_text())
    del written["speed"], written["vocab_size"]
    (folder / "config.json").write_text(json.dumps(written))
    refused(load, "config.json has no vocab_size")


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_is_found_by_the_checksums(drafter):
    _, folder, load = drafter
    path = folder / "model.safetensors"
    # The last mantissa bit of the last value: nearly the same number.
    flip(path, 8 * (path.stat().st_size - 4))
    refused(load, str(folder), "model.safetensors is not what was saved: its sha256 is")


def test_a_changed_config_value_is_found_by_the_checksums(drafter):
    kind, folder, load = drafter
    change_config(folder, **({"fallback": 3} if kind == "table" else {"target": {}}))
    refused(load, "config.json is not what was saved", "delete SHA256SUMS where you changed it")
    (folder / "SHA256SUMS").unlink()
    load()


@pytest.mark.parametrize("text", ["what", f"{'0' * 64}  ../other", f"{'0' * 64}  gone"])
def test_invalid_checksums_are_refused(drafter, text):
    _, folder, load = drafter
    (folder / "SHA256SUMS").write_text(text)
    refused(load, "SHA256SUMS: ", "take a copy that is whole")


def test_checksums_are_plain_sha256_sums(drafter):
    _, folder, _ = drafter
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_from_pretrained_is_as_strict_as_loading_for_a_target(drafter):
    _, folder, load = drafter
    kind, path = type(load()), folder / "model.safetensors"
    whole = load_file(path)
    save_file(dict([*whole.items()][1:]), path)
    refused(lambda: kind.from_pretrained(folder), "model.safetensors lacks")


def test_an_invalid_choice_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="lm_heads = 'none': must be one of own, shared"):
        MedusaConfig(16, VOCAB, lm_heads="none")


def test_tensors_that_do_not_match_the_config_are_refused(drafter):
    """Missing, renamed, superfluous, or of another shape or dtype."""
    _, folder, load = drafter
    path = folder / "model.safetensors"
    written, whole = path.read_bytes(), load_file(path)
    for name, tensor in whole.items():
        rest = {key: value for key, value in whole.items() if key != name}
        save_file(rest, path)
        refused(load, f"model.safetensors lacks {name!r}")
        save_file(rest | {"renamed": tensor}, path)
        refused(load, f"lacks {name!r}")
        save_file(whole | {"more": tensor.clone()}, path)
        refused(load, "model.safetensors has no use for 'more'")
        save_file(rest | {name: tensor[:-1].clone()}, path)
        refused(load, f"{name} is ", f"numbers {list(tensor.shape)}")
        other = tensor.long() if tensor.is_floating_point() else tensor.float()
        save_file(rest | {name: other}, path)
        refused(load, f"{name} is ", "must be")
    path.write_bytes(written)
    load()


@pytest.mark.parametrize("drafter", ["head", "medusa"], indirect=True)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(drafter, value):
    _, folder, load = drafter
    path = folder / "model.safetensors"
    whole = load_file(path)
    for name, tensor in whole.items():
        damaged = tensor.clone()
        damaged.view(-1)[-1] = value
        save_file(whole | {name: damaged}, path)
        write_sums(folder)
        refused(load, f"{name} has values that are no finite numbers")
