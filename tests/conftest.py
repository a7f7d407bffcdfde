"""On the CPU, one thread per worker: two workers with two threads each wait for each other."""

import os

# Of this process and of the scripts it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    """Undo what training sets for its whole process: the tests after it would take ten times as
    long beside another worker."""
    yield
    torch.set_num_threads(1)
