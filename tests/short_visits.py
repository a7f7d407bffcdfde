"""Time everything only once: no test asserts a measured time.

As a script it runs another one so: python tests/short_visits.py train/falcon.py recipes/tiny.yaml
"""

import runpy
import sys
from pkgutil import resolve_name

SHORT = {
    "specdraft.eval.costing.bench.ENOUGH": 1e-3,
    "specdraft.eval.costing.grid.REPEATS": 1,
    "specdraft.eval.costing.race.SECONDS": 1.0,
}


def set_short() -> None:
    """For the rest of this process."""
    for name, value in SHORT.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(resolve_name(module), constant), name
        setattr(resolve_name(module), constant, value)


if __name__ == "__main__":
    set_short()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
