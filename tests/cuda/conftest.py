"""The device of these tests: a GPU, or the one that SPECDRAFT_TEST_DEVICE names."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("SPECDRAFT_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU; where there is one: CUDA_VISIBLE_DEVICES=0 pytest -n 0 tests/cuda")
    return torch.device(name)


@pytest.fixture(scope="module", autouse=True)
def _no_tf32():
    """TF32 products differ from float32 by as much as near-ties do."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), [flag.allow_tf32 for flag in flags]
    torch.set_float32_matmul_precision("highest")
    for flag in flags:
        flag.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    for flag, allowed in zip(flags, before[1], strict=True):
        flag.allow_tf32 = allowed
