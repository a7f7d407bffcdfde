"""What cascades are expected to gain, without a model: EWIF over lengths and costs.

    python eval/papers/simulate.py [--alpha 0.8] [--cost 0.1] [--small-alpha 0.4]
        [--small-cost 0.01] [--most 20] [--out DIR]

Draws EWIF (CS Drafting, Theorem 4.1) of one drafter and of horizontal cascades, holds the formula
against coins, and checks Theorem 4.4 on small cases by trying every assignment and a grid of
mixtures. Needs the extra `plots`.
"""

import argparse
import random
from pathlib import Path

from rich.console import Console

from specdraft.eval.measure.ewif import (
    Proposer,
    best_assignment,
    ewif,
    mixing_gains,
    of_assignment,
    simulate,
)
from specdraft.eval.papers.plots import of_horizontal_cascade, of_one_drafter, save
from specdraft.recipes.errors import DataError, entry

COSTS = (0.01, 0.03, 0.1, 0.3)
STEPS = 100_000
CASES, LENGTH = 100, 3


@entry
def main() -> None:
    """Parse, draw, simulate, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alpha", type=float, default=0.8, help="of the larger drafter")
    parser.add_argument("--cost", type=float, default=0.1, help="share of a target forward")
    parser.add_argument("--small-alpha", type=float, default=0.4)
    parser.add_argument("--small-cost", type=float, default=0.01)
    parser.add_argument("--most", type=int, default=20, help="drafted tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/simulate"))
    options = parser.parse_args()
    large = checked("", options.alpha, options.cost)
    small = checked("small-", options.small_alpha, options.small_cost)
    if options.most < 1:
        raise DataError(f"--most {options.most}: must be at least 1")
    figures = {
        "one_drafter.png": of_one_drafter(large.alpha, COSTS, options.most),
        "horizontal.png": of_horizontal_cascade(large, small, options.most),
    }
    console = Console(soft_wrap=True)
    for name, drawn in figures.items():
        console.print(f"wrote {save(drawn, options.out / name)}")
    show_coins(console, large, options.most)
    show_best(console, large, small)
    show_theorem(console)


def checked(kind: str, alpha: float, cost: float) -> Proposer:
    """Return a drafter; DataError for a probability or a cost that is none."""
    if not 0 <= alpha <= 1 or not 0 <= cost < float("inf"):
        raise DataError(
            f"--{kind}alpha {alpha}, --{kind}cost {cost}: alpha must be in 0..1, cost at least 0"
        )
    return Proposer(alpha, cost)


def show_coins(console: Console, drafter: Proposer, most: int) -> None:
    """The formula beside what coins gave."""
    for k in sorted({1, min(5, most), most}):
        expected = ewif([drafter.alpha] * k, k * drafter.cost)
        thrown = simulate([drafter.alpha] * k, k * drafter.cost, STEPS)
        console.print(f"k = {k}: EWIF {expected:.3f}, {STEPS:,} simulated steps {thrown:.3f}")


def show_best(console: Console, large: Proposer, small: Proposer) -> None:
    """The best deterministic cascade of up to ten tokens."""
    best = max((best_assignment([large, small], k) for k in range(1, 11)), key=of_assignment)
    console.print(
        f"best of up to 10 tokens: {best.count(large)} of the larger, then {best.count(small)} of "
        f"the smaller, EWIF {of_assignment(best):.3f}"
    )


def show_theorem(console: Console) -> None:
    """Theorem 4.4 on random pairs of drafters: the most that mixing them gains."""
    chance = random.Random(0)
    pairs = [[Proposer(chance.random(), chance.random()) for _ in range(2)] for _ in range(CASES)]
    gain = max(mixing_gains(pair, LENGTH) for pair in pairs)
    console.print(
        f"Theorem 4.4: over {CASES} pairs of drafters and all mixtures of {LENGTH} positions in "
        f"quarters, mixing gains at most {gain:.1e} over the best assignment"
    )


if __name__ == "__main__":
    main()
