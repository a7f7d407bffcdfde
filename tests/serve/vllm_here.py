"""For tests that need vLLM: `SPECDRAFT_VLLM_PYTHON` names the Python of its environment."""

import os

import pytest

PYTHON = os.environ.get("SPECDRAFT_VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="SPECDRAFT_VLLM_PYTHON names no python of an environment with vLLM"
)
