"""Plot acceptance by position from a report (CS Drafting, Figures 1 and 3).

    python eval/papers/plot.py runs/tiny_cascade/report.json [--methods ssd,cascade]
        [--out FILE.png]

The default is acceptance.png beside the report. Needs the extra `plots`.
"""

import argparse
import json
from pathlib import Path

from specdraft.eval.papers.plots import acceptance_by_position, save
from specdraft.recipes.errors import DataError, entry


@entry
def main() -> None:
    """Parse, read the report, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="a report.json")
    parser.add_argument("--methods", help="comma-separated; default: all that draft")
    parser.add_argument("--out", type=Path, help="default: acceptance.png beside the report")
    options = parser.parse_args()
    runs = chosen(read_runs(options.report), options.methods)
    out = options.out or options.report.with_name("acceptance.png")
    print(f"wrote {save(acceptance_by_position(runs), out)}")  # noqa: T201


def read_runs(path: Path) -> list[dict]:
    """Return the runs of a report; DataError for a file that is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a report.json") from None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path}: no report; eval/bench.py writes report.json") from None


def chosen(runs: list[dict], methods: str | None) -> list[dict]:
    """Return the runs of the named methods; DataError for a method that is not there."""
    known = list(dict.fromkeys(run["method"] for run in runs))
    names = methods.split(",") if methods else known
    for name in names:
        if name not in known:
            raise DataError(f"--methods: no run of {name!r}; the report has {', '.join(known)}")
    return [run for run in runs if run["method"] in names]


if __name__ == "__main__":
    main()
