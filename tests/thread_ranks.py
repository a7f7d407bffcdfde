"""Ranks as threads of one process, which is enough to share work."""

import threading
from collections.abc import Callable

from specdraft.data.ranks import Ranks


def on_ranks(world: int, work: Callable[[Ranks], object]) -> list:
    """Run `work` on all ranks at once; return their results."""
    barrier, shared, made = threading.Barrier(world, timeout=30), [], [None] * world

    def share(value: object, rank: int) -> object:
        if rank == 0:
            shared[:] = [value]
        barrier.wait()
        seen = shared[0]
        barrier.wait()  # wait until all ranks have read it
        return seen

    def run(rank: int) -> None:
        made[rank] = work(Ranks(rank, world, barrier.wait, lambda value: share(value, rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return made
