"""The processes of one run, as whoever shares work among them needs to know them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


@dataclass(frozen=True)
class Ranks:
    """Which process this is of how many, and how they meet; by default the only one.

    wait: returns once every rank has called it. share: returns to every rank what the first gave.
    """

    rank: int = 0
    world: int = 1
    wait: Callable[[], None] = lambda: None
    share: Callable[[Any], Any] = lambda value: value

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Ranks":
        """Describe the processes that a launcher has started."""
        return cls(
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.wait_for_everyone,
            lambda value: broadcast_object_list([value])[0],
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0


ALONE = Ranks()
