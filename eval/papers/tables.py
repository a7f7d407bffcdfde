"""The tables that eval/paper.py makes, by name."""

from specdraft.eval.papers.bench_report import ReportTable
from specdraft.eval.papers.cs_drafting import CascadeTable, TunedCascades
from specdraft.eval.papers.ems import PaddingTable
from specdraft.eval.papers.expectation import ExpectationTable
from specdraft.eval.papers.falcon import ablations
from specdraft.eval.papers.gsd import GraphTable, TauTable
from specdraft.eval.papers.rivals import RivalTable
from specdraft.eval.papers.rsd import BudgetTable, SeededBudgetTable
from specdraft.eval.papers.suffix import SuffixTable
from specdraft.eval.papers.table import Table
from specdraft.recipes.errors import RecipeError


def all_tables() -> dict[str, Table]:
    """Every table, by its name."""
    tables = (
        *ablations(),
        RivalTable(),
        GraphTable(),
        TauTable(),
        CascadeTable(),
        TunedCascades(),
        SeededBudgetTable(),
        BudgetTable(),
        PaddingTable(),
        ExpectationTable(),
        SuffixTable(),
        ReportTable(),
    )
    return {table.name: table for table in tables}


def table_of(name: str) -> Table:
    """The table of a name; RecipeError for an unknown one."""
    if name not in (known := all_tables()):
        raise RecipeError(f"unknown table {name!r}; known: {', '.join(known)}")
    return known[name]
