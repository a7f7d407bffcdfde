"""What a target says of itself, whatever its family."""

import pytest
import transformers
from transformers import AutoModelForCausalLM

from specdraft.models.target import Target

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
