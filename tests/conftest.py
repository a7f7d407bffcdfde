"""One thread per worker: two test workers with two threads each wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of this process and of the scripts it starts

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    """Undo what training sets for its whole process: the tests after it would take ten times as
    long beside another worker."""
    yield
    torch.set_num_threads(1)
