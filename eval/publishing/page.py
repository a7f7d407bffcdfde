"""The page of kept results: eval/results/README.md, made of the files beside it and a template.

eval/results/README.md.jinja has the words; every figure in it is a placeholder that is filled from
a file: `table`, `cell`, `ratio`, `again`. A kept file that the template does not use is an error.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jinja2

from specdraft.data.atomic import write_atomic
from specdraft.eval.page.cells import markdown_table
from specdraft.eval.publishing.result import cell_text, grid_of, read_result, row_of
from specdraft.recipes.errors import DataError

RESULTS = Path(__file__).parents[1] / "results"  # of a checkout: the wheel has no results
NAME = "README.md"


def write_page(folder: Path = RESULTS) -> Path:
    """Write the page; DataError as `page_of`."""
    path = folder / NAME
    write_atomic(path, page_of(folder).encode())
    return path


def check_page(folder: Path = RESULTS) -> None:
    """DataError where the page is not what its files make."""
    path, made = folder / NAME, page_of(folder)
    if not path.is_file() or path.read_text(encoding="utf-8") != made:
        raise DataError(f"{path} is stale; make it again: python eval/paper.py --write")


def page_of(folder: Path) -> str:
    """Return the page of a folder of results. DataError for a placeholder that no file fills, a
    file that no placeholder uses, or a folder without a template."""
    template = folder / f"{NAME}.jinja"
    if not template.is_file():
        raise DataError(f"no {template}: results are kept in a checkout, not in the wheel")
    kept = {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}
    used: set[str] = set()
    language = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    ways = (table, cell, ratio, again)
    functions = {way.__name__: partial(_filled, kept, used, way) for way in ways}
    made = language.from_string(template.read_text(encoding="utf-8"))
    own = {"environments": lambda: environments(kept), "kept": kept.__contains__}
    text = made.render(functions | own)
    if unused := kept.keys() - used:
        raise DataError(f"{template}: has nothing of {', '.join(sorted(unused))}")
    return text


def _filled(kept: Mapping[str, dict], used: set[str], way, name: str, *words, **options) -> str:
    """What a placeholder says of the kept table of a name."""
    used.add(name)
    try:
        return way(kept[name] | {"name": name}, *words, **options)
    except KeyError as error:
        raise DataError(f"{NAME}.jinja: nothing kept as {error} ({name}, {words})") from None


def table(made: dict, *columns: str, rows: Sequence[str] = ()) -> str:
    """The rows in Markdown."""
    headings, *lines = grid_of(made, columns, rows)
    return markdown_table(headings, lines)


def cell(made: dict, row: str, column: str, digits: int = 2) -> str:
    """One figure, with its error where it has one."""
    return cell_text(row_of(made, row)["ours"][column], digits)


def ratio(made: dict, row: str, other: str, column: str, plus: float = 0.0) -> str:
    """A row's figure over another row's, `plus` added to both (accepted tokens + 1: all)."""
    ours, theirs = (row_of(made, name)["ours"][column]["mean"] + plus for name in (row, other))
    return f"{ours / theirs:.2f}"


def again(made: dict) -> str:
    """The command that makes a table, and its file."""
    return f"`{made['command']}` ([{made['name']}.json]({made['name']}.json))"


def environments(kept: Mapping[str, dict]) -> str:
    """Where each file's figures were measured, by commit."""
    lines = ["| file | machine, threads | torch | transformers | commit |", "|---|---|---|---|---|"]
    for name, made in kept.items():
        where = made.get("environment")
        if not where:
            lines.append(f"| [{name}]({name}.json) | not kept | | | |")
            continue
        machine = f"{where.get('gpu') or where['cpu']}, {where['cores']} cores, {where['threads']}"
        commit = (where.get("commit") or "-")[:10]
        versions = f"{where['torch']} | {where['transformers']}"
        lines.append(f"| [{name}]({name}.json) | {machine} | {versions} | {commit} |")
    return "\n".join(lines)
