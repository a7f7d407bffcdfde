"""What a target says of itself, whatever its family."""

import json
import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.shapes import model_shape
from specdraft.models.student import load_student
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
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
        ("Bloom", {"n_head": 4, "n_layer": 1}, None),  # ALiBi: no end is named
    ],
)
def test_its_context_is_read_wherever_its_family_writes_it(family, sizes, context):
    assert random_target(family, **sizes).context == context


@pytest.mark.parametrize("scaled", [False, True])
def test_tokens_without_an_embedding_do_not_hide_that_logits_are_scaled(scaled):
    """Zero equals zero at any scale: what is compared must not be padding alone."""
    config = transformers.CohereConfig(**SMALL, intermediate_size=32, tie_word_embeddings=False)
    config.logit_scale = 0.25 if scaled else 1.0
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:5] = 0.0
    if scaled:
        with pytest.raises(TargetError, match="scaled or shifted"):
            Target(model, None, "padded")
    else:
        assert Target(model, None, "padded").vocab_size == 23


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_weights_that_say_nothing_are_no_target(value):
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
def test_a_config_that_makes_no_model_is_a_line(tiny, tmp_path, load, config):
    folder = shutil.copytree(bundled_target_dir(), tmp_path / "model")
    path = folder / "config.json"
    if isinstance(config, dict):
        config = json.dumps(json.loads(path.read_text()) | config)
    path.write_text(config)
    with pytest.raises(TargetError, match=str(folder)) as refusal:
        LOADERS[load](folder, tiny)
    assert "\n" not in str(refusal.value)
