"""One thread per worker: two test workers with two threads each wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of this process and of the scripts it starts

import torch

torch.set_num_threads(1)
