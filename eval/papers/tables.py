"""The tables that eval/paper.py makes, by name: what tables.yaml describes, of the right kind."""

from specdraft.eval.papers.bench_report import ReportTable
from specdraft.eval.papers.contexts import ContextTable
from specdraft.eval.papers.cs_drafting import CascadeTable, TunedCascades
from specdraft.eval.papers.ems import PaddingTable
from specdraft.eval.papers.expectation import ExpectationTable
from specdraft.eval.papers.falcon import FalconTable
from specdraft.eval.papers.gsd import GraphTable, TauTable
from specdraft.eval.papers.prepacking import PrepackingTable
from specdraft.eval.papers.rivals import RivalTable
from specdraft.eval.papers.rsd import BudgetTable, SeededBudgetTable
from specdraft.eval.papers.suffix import SuffixTable
from specdraft.eval.papers.table import Table, described
from specdraft.eval.papers.trees import TreeTable
from specdraft.recipes.errors import RecipeError

KINDS = {
    "rivals": RivalTable,
    "heads": RivalTable,
    "heads_stories": RivalTable,
    "heads_deep": RivalTable,
    "heads_7b": RivalTable,
    "minutes": RivalTable,
    "gsd": GraphTable,
    "tau": TauTable,
    "cascades": CascadeTable,
    "tuned_cascades": TunedCascades,
    "t5_cascades": TunedCascades,
    "rsd_budgets": SeededBudgetTable,
    "budgets": BudgetTable,
    "ems": PaddingTable,
    "ewif": ExpectationTable,
    "suffix": SuffixTable,
    "prepacked": PrepackingTable,
    "contexts": ContextTable,
    "trees": TreeTable,
    "report": ReportTable,
}


def all_tables() -> dict[str, Table]:
    """Every table, by its name."""
    return {name: KINDS.get(name, FalconTable)(name=name, **of) for name, of in described().items()}


def table_of(name: str) -> Table:
    """The table of a name; RecipeError for an unknown one."""
    if name not in (known := all_tables()):
        raise RecipeError(f"unknown table {name!r}; known: {', '.join(known)}")
    return known[name]
