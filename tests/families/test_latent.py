"""Latent attention, where keys are wider than values, decodes as the family's own `generate`."""

import pytest
from random_families import MLP, check_family, random_model

from specdraft.eval.engine.packed import PackedTarget
from specdraft.models.target import Target

LATENT = {
    **MLP,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 2,
}


@pytest.mark.parametrize("value_dim", [5, 12])  # narrower and wider than keys
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_decodes_as_the_model_generates(family, value_dim):
    target = Target(random_model(family, **LATENT, v_head_dim=value_dim), None, family)
    keys, values = PackedTarget(target, 2, 64).pool.kv[0]
    assert keys.shape == (2, 4, 64, 10)
    assert values.shape == (2, 4, 64, value_dim)
    check_family(target)
