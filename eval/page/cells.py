"""What stands in the cells of a table of runs, on the page as on a terminal; tables in Markdown."""

from collections.abc import Iterable, Sequence

NOTHING = "-"  # of a figure that is not known


def figure(value: float | None, digits: int = 2) -> str:
    """A number with so many digits behind its point."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]], names: int = 1) -> str:
    """A table in Markdown: `names` columns on the left, and figures behind them."""
    rule = ["---"] * names + ["---:"] * (len(headings) - names)
    rows = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def identical_outputs(run: dict) -> str:
    """How many outputs of a run are those of plain decoding, and how many differ by a near-tie."""
    if run.get("identical") is None:
        return NOTHING
    near = f" (+{run['near_ties']} ties)" if run["near_ties"] else ""
    return f"{run['identical']}/{run['outputs']}{near}"


def failure_counts(run: dict) -> str:
    """How many prompts a run of a report failed on, and how many its drafter left."""
    counts = {"failed": run["failed"], "fell back": run["fallbacks"]}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def failure_reasons(run: dict) -> str:
    """What was raised in a run of a report, each with its prompts."""
    by_error: dict[str, list[str]] = {}
    for one in run["failures"]:
        turn = f" (turn {one['turn']})" if one["turn"] > 1 else ""
        by_error.setdefault(one["error"], []).append(f"{one['prompt']}{turn}")
    return "; ".join(f"{error} [{', '.join(where)}]" for error, where in by_error.items())
