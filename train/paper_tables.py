"""The tables of the papers that can be made again, by name."""

from specdraft.recipes.errors import RecipeError
from specdraft.train.paper_budgets import BudgetTable
from specdraft.train.paper_cascades import CascadeTable
from specdraft.train.paper_falcon import FALCON_TABLES
from specdraft.train.paper_graphs import GraphTable
from specdraft.train.paper_padding import PaddingTable
from specdraft.train.paper_table import PaperTable

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
