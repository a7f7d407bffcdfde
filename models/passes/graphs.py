"""Functions of tensors that stay where they are, launched at once: CUDA graphs.

A host launches the operations of a forward one by one, and a GPU that runs a few tokens is done
with each before the next one comes: it waits most of the time. Captured once and replayed, all of
them are one launch. What is captured reads and writes the same memory ever after, so that whatever
differs from call to call must be data in tensors that are written before.
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from specdraft.recipes.errors import in_a_line

Result = TypeVar("Result")
FEWEST_SLOTS = 128


class Replays:
    """What is captured of one owner, by key; the graphs share their memory.

    A result stands until the same key runs again. Elsewhere than on CUDA every call runs as it is,
    and so does everything after a capture that failed: a warning says why.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_replaying = device.type == "cuda"
        self._captured: dict[Hashable, tuple] = {}  # graphs and their results
        self._memory = torch.cuda.graph_pool_handle() if self.is_replaying else None

    def run(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Call a function, or replay what it did when the key was new."""
        if not self.is_replaying:
            return function()
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(function)
            except RuntimeError as error:  # something waits for the device, or is another's
                self.is_replaying = False
                warnings.warn(
                    f"target.cuda_graphs: goes on without: {in_a_line(error)}", stacklevel=2
                )
                return function()
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        # What a first call sets up, workspaces say, is no part of a graph.
        aside, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            function()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._memory):
            result = function()
        return graph, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: another graph among it would be freed, which CUDA does
    not allow while one is captured."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def slots_in_sight(stop: int, capacity: int) -> int:
    """How many slots of a cache a graph looks at for those before `stop`: few numbers, so that
    there are few graphs; FEWEST_SLOTS, or less than twice as many as are needed."""
    return min(max(FEWEST_SLOTS, 1 << (stop - 1).bit_length()), capacity)
