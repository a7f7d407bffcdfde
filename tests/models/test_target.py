"""Loading targets of any family: their properties, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.shapes import model_shape
from specdraft.models.snapshot import folder_of
from specdraft.models.student import load_student
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.models.weights.identity import identity_of
from specdraft.recipes.errors import TargetError

SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random_target(family: str, **changes) -> Target:
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    return Target(AutoModelForCausalLM.from_config(config), None, family)


@pytest.mark.parametrize(
    ("family", "sizes", "context"),
    [
        ("Llama", {"max_position_embeddings": 40, "intermediate_size": 32}, 40),
        ("GPT2", {"n_positions": 41}, 41),
        ("Mpt", {"max_seq_len": 42, "d_model": 16, "n_heads": 4, "n_layers": 1}, 42),
        ("Bloom", {"n_head": 4, "n_layer": 1}, None),  # ALiBi: no limit
    ],
)
def test_a_targets_context_is_found_under_its_familys_config_key(family, sizes, context):
    assert random_target(family, **sizes).context == context


@pytest.mark.parametrize("changed", [False, True])
def test_zero_embeddings_do_not_hide_that_a_model_changes_its_logits(changed):
    """Zeros are equal at any scale, so the probe must not use only such tokens."""
    config = transformers.CohereConfig(**SMALL, intermediate_size=32, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:5] = 0.0
    if changed:  # by a hook unknown to its class
        model.register_forward_hook(lambda *call: type(call[-1])(logits=call[-1].logits / 4))
        with pytest.raises(TargetError, match="changed in another way"):
            Target(model, None, "padded")
    else:
        assert Target(model, None, "padded").vocab_size == 23


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_target_whose_logits_are_all_zero_or_not_finite_is_refused(value):
    model = random_target("GPT2").model
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    with pytest.raises(TargetError, match=r"its largest logit of ids \[0, 2, .* is (0.0|nan|inf)"):
        Target(model, None, "damaged")


LOADERS = {
    "target": lambda folder, _: Target.load(str(folder)),
    "embeddings": lambda folder, _: TargetEmbeddings.load(str(folder)),
    "shape": lambda folder, _: model_shape("target.model", str(folder), None),
    "student": lambda folder, target: load_student(folder, None, target),
}


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "null",
        '"x"',
        "{",
        {"num_attention_heads": 0},
        {"hidden_size": "a"},
        {"vocab_size": 1.5},
    ],
    ids=str,
)
def test_an_invalid_config_is_refused_in_one_line(tiny, tmp_path, load, config):
    folder = shutil.copytree(bundled_target_dir(), tmp_path / "model")
    path = folder / "config.json"
    if isinstance(config, dict):
        config = json.dumps(json.loads(path.read_text()) | config)
    path.write_text(config)
    with pytest.raises(TargetError, match=str(folder)) as refusal:
        LOADERS[load](folder, tiny)
    assert "\n" not in str(refusal.value)


# -- weights and config belong together ------------------------------------------------------------

UP = "model.layers.3.mlp.up_proj.weight"


def with_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_generation(folder: Path, **changes) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_tensors(folder: Path, change: Callable[[dict], dict]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(name: str) -> Callable[[dict], dict]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def spoilt(name: str, value: float) -> Callable[[dict], dict]:
    """Tensors with one bad value that no probe of the logits meets."""

    def spoil(tensors: dict) -> dict:
        tensors[name] = tensors[name].clone()
        tensors[name][7, 0] = value
        return tensors

    return spoil


EMBEDDING = "model.embed_tokens.weight"
MISFITS = {
    "13 layers": (
        lambda folder: with_config(folder, num_hidden_layers=13),
        "model.safetensors lacks model.layers.12.input_layernorm.weight, ",
    ),
    "11 layers": (
        lambda folder: with_config(folder, num_hidden_layers=11),
        "has model.layers.11.input_layernorm.weight, .*, which config.json leaves out",
    ),
    "no layers": (
        lambda folder: with_config(folder, num_hidden_layers=-1),
        "has model.layers.0.input_layernorm.weight, .*, which config.json leaves out",
    ),
    "a width": (
        lambda folder: with_config(folder, intermediate_size=300),
        r"than config.json: model.layers.0.mlp.down_proj.weight \[128, 344\], not \[128, 300\]",
    ),
    "layers without end": (
        lambda folder: with_config(folder, num_hidden_layers=10**7),
        "bytes, too few for config.json's num_hidden_layers = 10,000,000",
    ),
    "a vocabulary that fills any memory": (
        lambda folder: with_config(folder, vocab_size=10**9),
        "bytes, too few for config.json's vocab_size = 1,000,000,000",
    ),
    "an end that is no token": (
        lambda folder: with_generation(folder, eos_token_id=[[3]]),
        r"eos_token_id of its generation has \[3\]; give token ids",
    ),
    "a tensor less": (
        lambda folder: with_tensors(folder, without(UP)),
        f"model.safetensors lacks {UP}, which config.json asks for",
    ),
    "another name": (
        lambda folder: with_tensors(folder, lambda t: without(UP)(t) | {"up": t[UP]}),
        f"model.safetensors lacks {UP}, which config.json asks for",
    ),
    "a bias that nobody reads": (
        lambda folder: with_tensors(folder, lambda t: t | {f"{UP[:-6]}bias": t[UP][:, 0].clone()}),
        f"has {UP[:-6]}bias, which config.json leaves out",
    ),
    "no number": (
        lambda folder: with_tensors(folder, spoilt(EMBEDDING, torch.nan)),
        f"values that are no finite numbers in {EMBEDDING}",
    ),
    "infinite": (
        lambda folder: with_tensors(folder, spoilt(UP, torch.inf)),
        f"values that are no finite numbers in {UP}",
    ),
}


@pytest.mark.parametrize("load", ["target", "student"])
@pytest.mark.parametrize("name", MISFITS)
def test_weights_that_do_not_fit_their_config_are_refused(tiny, tmp_path, load, name):
    folder = shutil.copytree(bundled_target_dir(), tmp_path / "model")
    change, message = MISFITS[name]
    change(folder)
    with pytest.raises(TargetError, match=message) as refusal:
        LOADERS[load](folder, tiny)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_tokenizer_settings_that_break_it_are_refused_on_loading(tmp_path):
    folder = shutil.copytree(bundled_target_dir(), tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "many"}))
    with pytest.raises(TargetError, match=f"no usable tokenizer in {folder}: '>' not supported"):
        Target.load(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: with_config(folder, vocab_size=3000), r"is \[2048, 128\], and .* \[3000, "),
        (lambda folder: with_tensors(folder, spoilt(EMBEDDING, torch.nan)), "no finite numbers"),
    ],
    ids=["size", "no number"],
)
def test_embeddings_that_are_loaded_alone_are_checked_too(tmp_path, change, message):
    change(folder := shutil.copytree(bundled_target_dir(), tmp_path / "model"))
    with pytest.raises(TargetError, match=message):
        TargetEmbeddings.load(str(folder))


def test_a_saved_tied_lm_head_or_rotary_buffer_is_ignored(tmp_path):
    ids = torch.arange(9)[None]
    expected = Target.load("tiny").model(ids).logits
    for number, more in enumerate((None, "lm_head.weight", "model.rotary_emb.inv_freq")):
        folder = shutil.copytree(bundled_target_dir(), tmp_path / str(number))
        if more:
            with_tensors(folder, lambda t, more=more: t | {more: t[EMBEDDING].clone()})
        assert torch.equal(Target.load(str(folder)).model(ids).logits, expected)


@pytest.mark.parametrize("main_is_here", [True, False])
def test_a_loaded_model_is_identified_by_its_own_revision(tmp_path, monkeypatch, main_is_here):
    """`from_pretrained(name, revision=..)` does not record the revision on the model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--you--tiny"
    (repo / "refs").mkdir(parents=True)
    refs = {"main": "a" * 40, "v2": "b" * 40}
    for ref, commit in refs.items() if main_is_here else [("v2", refs["v2"])]:
        folder = repo / "snapshots" / commit
        random_target("Llama").model.save_pretrained(folder)
        (repo / "refs" / ref).write_text(commit)
    for folder in (repo / "snapshots").iterdir():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.name_or_path = "you/tiny"
        known, expected = Target.of_model(model).identity(), identity_of("", None, folder)
        assert known["weights"] == expected["weights"]
        assert known["revision"] == (None if folder.name == refs["main"] else folder.name)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_snapshot_is_found_by_unprefixed_weights_next_to_a_damaged_one(
    tmp_path, monkeypatch, family
):
    """A base model's files, such as GPT-2's on the Hub, have `h.0..`, not `transformer.h.0..`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshots = tmp_path / "models--you--tiny" / "snapshots"
    for commit in "abc":
        random_target(family).model.base_model.save_pretrained(snapshots / (commit * 40))
    (snapshots / ("a" * 40) / "model.safetensors").write_bytes(b"version https://git-lfs")
    model = AutoModelForCausalLM.from_pretrained(last := snapshots / ("c" * 40))
    model.name_or_path = "you/tiny"
    assert folder_of(model) == (last, last.name)


class Int8(torch.nn.Module):
    """Like torch's own quantised layers: `weight` is a method."""

    def weight(self) -> torch.Tensor:
        return torch.zeros(1)


def test_an_lm_head_without_a_matrix_is_refused():
    model = random_target("Llama").model
    model.set_output_embeddings(Int8())
    with pytest.raises(TargetError, match="its Int8 is no matrix of numbers; leave embedding"):
        Target.of_model(model)


def test_a_model_that_loads_as_bfloat16_is_refused_if_float32_is_wanted(tmp_path):
    """Without fp8 kernels, transformers makes its layers bfloat16, or a mixture that cannot run."""
    folder = shutil.copytree(bundled_target_dir(), tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "dequantize": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"comes as torch.bfloat16, .* set target.dtype=bfloat16"):
        Target.load(str(folder))
    assert Target.load(str(folder), dtype="bfloat16").dtype == torch.bfloat16
