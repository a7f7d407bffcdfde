"""Latent attention, with keys and values of different widths, decodes as `generate` does."""

import pytest
from random_families import LATENT, check_family, random_model

from specdraft.eval.engine.packed import PackedTarget
from specdraft.models.target import Target


@pytest.mark.parametrize("value_dim", [5, 12])  # narrower and wider than keys
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_decodes_as_the_model_generates(family, value_dim):
    target = Target(
        random_model(family, **LATENT, first_k_dense_replace=2, v_head_dim=value_dim), None, family
    )
    keys, values = PackedTarget(target, 2, 64).pool.kv[0]
    assert keys.shape == (2, 4, 64, 10)
    assert values.shape == (2, 4, 64, value_dim)
    check_family(target)
