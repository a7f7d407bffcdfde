"""Thousands of steps need no more memory: the cache is allocated once and nothing accumulates."""

import gc
import random
from pathlib import Path

import pytest
import torch
from random_models import VOCAB, random_target

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Topology, Tree

STATUS = Path("/proc/self/status")


class RandomTrees:
    """A drafter that gives every draft another tree shape."""

    forwards, seconds, max_nodes, rules = 0, 0.0, 9, frozenset()
    from_tokens = False

    def __init__(self):
        self.random = random.Random(0)

    def start(self, row, request):
        pass

    def observe(self, row, tokens, features):
        pass

    def draft(self, rows):
        return [self._tree() for _ in rows]

    def _tree(self):
        parents = [-1, *(self.random.randrange(node) for node in range(1, 10))]
        return Tree(Topology(parents), torch.randint(VOCAB, (9,)))


def resident() -> int:
    """Resident bytes of this process."""
    gc.collect()
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not STATUS.is_file(), reason="resident memory is read from /proc")
def test_resident_memory_does_not_grow_with_steps():
    decoder = Decoder(random_target(), RandomTrees(), 2, 128)

    def steps(count: int) -> None:
        requests = (Request([1, 2, 3], 100, seed=n) for n in range(10**6))
        stream = decoder.stream(requests)
        target = decoder.timing.forwards + count
        while decoder.timing.forwards < target:
            next(stream)
        stream.close()

    steps(500)
    pool, growths = decoder.packed.pool.tensors[0].data_ptr(), []
    for _ in range(3):  # what earlier tests have left may settle in one; what is lost, in each
        before = resident()
        steps(1500)
        growths.append(resident() - before)
    assert min(growths) < 600 << 10  # 400 bytes a step; a tree has 9 tokens of 8 bytes
    assert decoder.packed.pool.tensors[0].data_ptr() == pool
