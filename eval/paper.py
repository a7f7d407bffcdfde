"""Make a table of a paper again on the bundled target: ours beside the paper's, over seeds.

    python eval/paper.py TABLE [section.key=value ..] [--seeds 0,1,2] [--jobs 2]
        [--recipe FILE.yaml] [--runs runs/paper] [--out FILE.json]

    falcon_tree_csgd  Falcon, Table 4    gsd          GSD, Figure 5
    falcon_k          Falcon, Table 5    cascades     CS Drafting, Table 2
    glancing fusion noise rollout        rsd_budgets  RSD, Tables 2 and 3
    storage                              ems          EMS-SD, Table 2

With --jobs 2 each takes less than half an hour on two cores. Every run is a command of train/ or
eval/ with overrides; one that has its report is not made again, and tables share them. Overrides
here are those of every run. Wall-clock is worth reading only with --jobs 1 on an idle machine.
"""

import argparse
from pathlib import Path

from specdraft.eval.measure.report import write_json
from specdraft.eval.papers.paper_table import Plan, make, show
from specdraft.eval.papers.paper_tables import TABLES, table_of
from specdraft.recipes.arguments import whole_numbers
from specdraft.recipes.errors import entry


@entry
def main() -> None:
    """Run what is missing, then write and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", help=f"one of {', '.join(TABLES)}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--recipe", help="what is trained; default: the bundled target's recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--out", type=Path, help="default: TABLE.json of --runs")
    options = parser.parse_intermixed_args()
    table = table_of(options.table)
    plan = Plan(options.runs, tuple(options.overrides), options.recipe)
    made = make(table, plan, whole_numbers("--seeds", options.seeds), options.jobs)
    out = options.out or options.runs / f"{options.table}.json"
    write_json(made, out)
    show(made)
    print(f"wrote {out}")  # noqa: T201


if __name__ == "__main__":
    main()
