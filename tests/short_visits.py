"""What is timed for a figure, which no test asserts, is timed once, and no garbage is looked for
before: that takes a quarter of a second beside all that tests have loaded.

As a script it is another one so: python tests/short_visits.py train/falcon.py recipes/tiny.yaml
"""

import runpy
import sys
from contextlib import nullcontext
from pkgutil import resolve_name

SHORT = {
    "specdraft.eval.costing.bench.ENOUGH": 1e-3,
    "specdraft.eval.costing.grid.REPEATS": 1,
    "specdraft.eval.costing.race.SECONDS": 1.0,
    "specdraft.eval.measure.rounds.nothing_to_collect": nullcontext,
}


def set_short() -> None:
    """In this process, to its end."""
    for name, value in SHORT.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(resolve_name(module), constant), name
        setattr(resolve_name(module), constant, value)


if __name__ == "__main__":
    set_short()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
