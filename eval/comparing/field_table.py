"""One table of a report as papers print it, in Markdown or LaTeX.

A row is a method on a prompt set at a temperature: its draft (a chain, or a tree), tokens per step
with and without the bonus token, acceptance by position (of those that got so far, and of all
drafts), tokens/s at several rows decoded at once. The caption says target, prompts, lengths,
precision, hardware and versions: without these a figure stands beside nothing.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from specdraft.eval.page.cells import NOTHING, figure, markdown_table
from specdraft.recipes.errors import DataError

ROWS, TEMPERATURES = (1, 4, 16), (0.0, 1.0)  # that papers report
POSITIONS = 5  # of a draft whose acceptance is shown
MACHINE = ("cpu", "gpu", "threads", "torch", "transformers")
FIGURES = (
    *("temperature", "batch_size", "max_new_tokens", "tokens_per_second"),
    *("tokens_per_step", "accepted_per_step"),
)
SAME = ("outputs", "max_new_tokens", "tokens", "steps")  # where a run is only measured again
FIGURE_LISTS = ("acceptance_by_depth", "acceptance_by_node")
OF_ALL = "accepted_by_depth"  # not in reports of earlier versions
_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "#$%&_{}"}
    | {"~": r"\~{}", "^": r"\^{}", "τ": r"$\tau$"}
    | {"\\": r"\textbackslash{}", "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}"}
)


@dataclass(frozen=True)
class Table:
    """A caption, headings and cells, as text."""

    caption: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    missing: str | None  # what the reports lack, and what would measure it

    def markdown(self) -> str:
        """Return the table as Markdown, its caption below."""
        return f"{markdown_table(self.headings, self.lines, names=2)}\n\n{self.caption}"

    def latex(self) -> str:
        """Return the table as LaTeX (booktabs)."""
        head, *body = (
            " & ".join(cell.translate(_LATEX) for cell in row) + r" \\"
            for row in (self.headings, *self.lines)
        )
        columns = "ll" + "r" * (len(self.headings) - 2)
        begin = [r"\begin{table}", r"\centering\small", rf"\begin{{tabular}}{{{columns}}}"]
        end = [r"\bottomrule", r"\end{tabular}", rf"\caption{{{self.caption.translate(_LATEX)}}}"]
        rows = [r"\toprule", head, r"\midrule", *body]
        return "\n".join([*begin, *rows, *end, r"\end{table}"])


def field_table(files: Sequence[Path]) -> Table:
    """Make the table of one report, or of several of one target on one machine.

    Raises: DataError for a file that is no report, for another target or machine, and for two runs
    of one method in one setting that differ in more than their times.
    """
    reports = [_read(file) for file in files]
    for report, file in zip(reports, files, strict=True):
        for what, told in _of_one_kind(report).items():
            if told != (first := _of_one_kind(reports[0])[what]):
                raise DataError(
                    f"{file}: {what} is {told}, and {first} in {files[0]}; figures of two are no "
                    "comparison: give reports of one"
                )
    runs = [run for report in reports for run in report["runs"] if run["outputs"]]
    if not runs:
        raise DataError(f"{files[0]}: no method has decoded a prompt; measure with eval/bench.py")
    grouped: dict[tuple, dict[int, dict]] = {}  # set, temperature and method: run by rows
    for run in runs:
        before = grouped.setdefault(_place(run), {}).setdefault(run["batch_size"], run)
        if any(before.get(key) != run.get(key) for key in SAME):
            raise DataError(
                f"{run['method']} on {run['prompt_set']} at temperature {run['temperature']:g}, "
                f"{run['batch_size']} row(s), is in two of the reports, by other drafters or "
                "lengths: one would hide the other; give one of them, or compare drafters with: "
                "python eval/compare.py RUN RUN"
            )
    sizes = sorted({run["batch_size"] for run in runs})
    lines = [_line(place, by_rows, sizes) for place, by_rows in grouped.items()]
    headings = ["method", "draft", "prompts", "T", "τ", "τ - 1", "P(n given n - 1)", "P(n)"]
    headings += ["x plain", *(f"tokens/s at {size}" for size in sizes)]
    return Table(_caption(reports[0], runs), headings, lines, _missing(runs, files[0]))


def _read(file: Path) -> dict:
    try:
        report = json.loads(file.read_bytes())
        _of_one_kind(report)
        known = all(_is_run(run) for run in report["runs"])
        for run in filter(itemgetter("outputs"), report["runs"]):  # has all that is shown of it
            _line(_place(run), {run["batch_size"]: run}, ())
            _caption(report, [run])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise DataError(
            f"{file}: no report; give report.json of a run or a benchmark, or its folder"
        )
    return report


def _is_run(run: dict) -> bool:
    """Whether a run failed at every prompt, or has the figures of a line."""
    lists = all(isinstance(run.get(key), list) for key in FIGURE_LISTS)
    lists &= isinstance(run.get(OF_ALL, []), list)
    figures = all(isinstance(run.get(key), int | float) for key in FIGURES)
    # None: transformers does not tell how many nodes its drafts have.
    nodes = isinstance(run.get("drafted_per_step", ""), int | float | None)
    return run["outputs"] == 0 or (lists and figures and nodes)


def _of_one_kind(report: dict) -> dict:
    target, machine = report["recipe"]["target"], report["environment"]
    named = {key: machine.get(key) for key in MACHINE}
    return {"the target": target["model"], "the dtype": target["dtype"], "the machine": named}


def _place(run: dict) -> tuple[str, float, str]:
    """What a line of the table is of."""
    return run["prompt_set"], run["temperature"], run["method"]


def _line(place: tuple, by_rows: dict[int, dict], sizes: Iterable[int]) -> list[str]:
    prompts, temperature, method = place
    run = by_rows[min(by_rows)]
    given = run["acceptance_by_depth"][:POSITIONS]
    reached = run.get(OF_ALL, [])[:POSITIONS]
    by_position = (" ".join(f"{p:.2f}" for p in ps) for ps in (given, reached))
    return [
        method,
        _draft(run),
        prompts,
        f"{temperature:g}",
        figure(run["tokens_per_step"]),
        figure(run["accepted_per_step"]),
        *(figures or NOTHING for figures in by_position),
        figure(run.get("speedup")),
        *(figure(by_rows.get(size, {}).get("tokens_per_second"), 0) for size in sizes),
    ]


def _draft(run: dict) -> str:
    """What is drafted at a step: a chain or a tree, by the nodes that were, and its size."""
    nodes = run["acceptance_by_node"]
    if not nodes:
        return NOTHING
    shape = "tree" if any(max(node["path"]) for node in nodes) else "chain"
    return f"{shape}, {run['drafted_per_step']:.1f} nodes"


def _caption(report: dict, runs: Sequence[dict]) -> str:
    where, recipe = report["environment"], report["recipe"]
    hardware = where["gpu"] or f"{where['cpu']}, {where['threads']} thread(s)"
    outputs, lengths = (
        "/".join(map(str, sorted({run[key] for run in runs})))
        for key in ("outputs", "max_new_tokens")
    )
    rows = sorted({run["batch_size"] for run in runs})
    return (
        f"Target {recipe['target']['model']} in {recipe['target']['dtype']}; {outputs} answers of "
        f"up to {lengths} new tokens. τ: tokens per step with the bonus token, the prompt's "
        f"forward counted as a step; τ - 1: without. P(n given n - 1): position n = 1 to "
        f"{POSITIONS} accepted where the one before was and n was drafted; P(n): the first n "
        f"accepted, of all drafts, however deep. These and "
        f"x plain at {rows[0]} row(s); tokens/s of all rows together, by wall-clock. {hardware}; "
        f"specdraft on torch {where['torch']}, transformers {where['transformers']}."
    )


def _missing(runs: Sequence[dict], file: Path) -> str | None:
    """What papers report and these runs lack, with the command that measures it."""
    rows = [n for n in ROWS if n not in {run["batch_size"] for run in runs}]
    temperatures = [t for t in TEMPERATURES if t not in {run["temperature"] for run in runs}]
    if not rows and not temperatures:
        return None
    lacks = [f"{n} rows" for n in rows] + [f"temperature {t:g}" for t in temperatures]
    return (
        f"no figures at {', '.join(lacks)}; measure them with: python eval/bench.py RECIPE "
        f"--batch-sizes {','.join(map(str, ROWS))} --temperatures "
        f"{','.join(f'{t:g}' for t in TEMPERATURES)}"
    )
