"""The tables of the papers that can be made again, by name."""

from specdraft.eval.papers.paper_budgets import BudgetTable
from specdraft.eval.papers.paper_cascades import CascadeTable
from specdraft.eval.papers.paper_falcon import FALCON_TABLES
from specdraft.eval.papers.paper_graphs import GraphTable
from specdraft.eval.papers.paper_padding import PaddingTable
from specdraft.eval.papers.paper_table import PaperTable
from specdraft.recipes.errors import RecipeError

TABLES: dict[str, PaperTable] = {
    **FALCON_TABLES,
    "gsd": GraphTable(),
    "cascades": CascadeTable(),
    "rsd_budgets": BudgetTable(),
    "ems": PaddingTable(),
}


def table_of(name: str) -> PaperTable:
    """The table of a name; RecipeError for an unknown one."""
    if name not in TABLES:
        raise RecipeError(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    return TABLES[name]
