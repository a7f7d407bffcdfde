"""Reproduce a table of a paper: our figures beside the paper's. Without TABLE: list them.

    python eval/paper.py [TABLE] [section.key=value ..] [table.key=value ..] [--recipe FILE.yaml]
        [--seeds 0,1,2] [--jobs 2] [--runs runs/paper] [--out FILE.json]
    python eval/paper.py --write        the page of kept results, eval/results/README.md
    python eval/paper.py --check        whether that page is what the kept files make of it

With --jobs 2 most take less than half an hour on two cores. Every run is a command of train/ or
eval/ with overrides; one that has its report is not made again, and tables share them. Overrides
here are those of every run, but for table.key, which sets what the table itself compares.
`tuned_cascades`, `budgets` and `tau` measure what a recipe's own runs have trained, `report` shows
a report.json. Wall-clock is worth reading only with --jobs 1 on an idle machine.
"""

from specdraft.recipes.entry import entry

import argparse
from pathlib import Path

from specdraft.eval.page.png import save_png
from specdraft.eval.papers.jobs import TABLE
from specdraft.eval.papers.table import Plan, with_settings
from specdraft.eval.papers.tables import all_tables, table_of
from specdraft.eval.publishing.page import check_page, write_page
from specdraft.eval.publishing.result import show, write_result
from specdraft.recipes.arguments import Parser, check_writable, whole, whole_numbers
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Make a table, the page of all kept ones, or a list of what can be made."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="TABLE [section.key=value ..]")
    parser.add_argument("--recipe", help="what is trained or measured; default: the table's")
    parser.add_argument("--seeds", help="comma-separated; default: 0,1,2 where anything is random")
    parser.add_argument(
        "--jobs", type=whole(1, 256), default=1, help="runs at a time, one thread each"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--out", type=Path, help="default: TABLE.json in --runs")
    parser.add_argument("--write", action="store_true", help="render the page of kept results")
    parser.add_argument("--check", action="store_true", help="check that this page is up to date")
    options = parser.parse_intermixed_args()
    if options.write:
        tell(f"wrote {write_page()}")
    elif options.check:
        check_page()
    elif options.words:
        make(options)
    else:
        for table in all_tables().values():
            tell(f"{table.name:17}{table.source}")


def make(options: argparse.Namespace) -> None:
    """Run what is missing, then write and show the table."""
    name, *overrides = options.words
    settings = tuple(each for each in overrides if each.startswith(TABLE))
    table = with_settings(table_of(name), settings)
    if options.seeds and not table.seeds:
        raise RecipeError(f"--seeds {options.seeds}: nothing is drawn for {name}; leave it out")
    seeds = whole_numbers("--seeds", options.seeds) if options.seeds else table.seeds
    others = tuple(each for each in overrides if each not in settings)
    given = [*others, *([f"--recipe {options.recipe}"] if options.recipe else [])]
    if given and not table.reads_recipe:
        own = ", ".join(f"{TABLE}{key}" for key in table.settings())
        raise RecipeError(f"{given[0]:.100}: {name} reads no recipe; it has {own}")
    out = options.out or options.runs / f"{name}.json"
    check_writable(out, ".json")
    made = table.make(Plan(options.runs, others, options.recipe, settings), seeds, options.jobs)
    write_result(made, out)
    show(made)
    tell(f"wrote {out}")
    for file, drawn in table.pictures(made).items():
        tell(f"wrote {save_png(drawn, out.with_name(file))}")


if __name__ == "__main__":
    main()
