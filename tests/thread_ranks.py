"""Ranks that are threads of one process, which is all that sharing work takes."""

import threading
from collections.abc import Callable

from specdraft.data.ranks import Ranks


def on_ranks(world: int, work: Callable[[Ranks], object]) -> list:
    """Run `work` on every rank at once; return what each made of it."""
    barrier, shared, made = threading.Barrier(world, timeout=30), [], [None] * world

    def share(value: object, rank: int) -> object:
        if rank == 0:
            shared[:] = [value]
        barrier.wait()
        seen = shared[0]
        barrier.wait()  # nobody shares the next thing before all have seen this one
        return seen

    def run(rank: int) -> None:
        made[rank] = work(Ranks(rank, world, barrier.wait, lambda value: share(value, rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return made
