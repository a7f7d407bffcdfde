"""Print a report as one table to paste into a paper, in Markdown or LaTeX.

    python eval/table.py runs/tiny [more/report.json ..] [--latex]

Takes report.json of a run or of a benchmark, or the folder that it lies in; several are one table
where they are of one target on one machine. What papers report and these lack is said, with the
command that measures it.
"""

from specdraft.recipes.entry import entry

from pathlib import Path

from specdraft.eval.comparing.field_table import field_table
from specdraft.recipes.arguments import Parser
from specdraft.recipes.terminal import say, tell


@entry
def main() -> None:
    """Parse, read the reports, print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "reports", nargs="+", type=Path, metavar="REPORT", help="report.json, or its folder"
    )
    parser.add_argument("--latex", action="store_true", help="LaTeX, not Markdown")
    options = parser.parse_intermixed_args()
    files = [path / "report.json" if path.is_dir() else path for path in options.reports]
    table = field_table(files)
    tell(table.latex() if options.latex else table.markdown())
    if table.missing:
        say(f"note: {table.missing}")


if __name__ == "__main__":
    main()
