"""Where the time of decoding goes: a stopwatch for `with` blocks, and the sums of the loop."""

import time
from dataclasses import dataclass


class Stopwatch:
    """`with Stopwatch() as watch: ..`, then `watch.seconds` is what the block took.

    A class with slots: made by a generator, the context would cost a step some microseconds.
    """

    __slots__ = ("began", "seconds")

    def __enter__(self) -> "Stopwatch":
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self.began


@dataclass(slots=True)
class Timing:
    """Seconds of the loop, and tokens that were real and pads, summed over steps.

    `verify` is the target's own forward, lm_head included, and `total` everything; what a drafter's
    model takes, the drafter counts. Time on a CUDA device counts where the host waits for it.
    """

    verify: float = 0.0
    total: float = 0.0
    forwards: int = 0
    inputs: int = 0
    input_pads: int = 0
    cached: int = 0
    cache_pads: int = 0
