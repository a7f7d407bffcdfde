"""One line of the doctor: what was looked at, how it is, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from rich.text import Text

from specdraft.recipes.terminal import Screen

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"
STYLES = {PASS: "bold green", FAIL: "bold red", SKIPPED: "yellow"}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; one that passes needs no remedy."""

    line: str
    outcome: str  # PASS, FAIL or SKIPPED
    note: str  # what was found, or why nothing was looked at
    remedy: str = ""


def passed(line: str, note: str) -> Finding:
    return Finding(line, PASS, note)


def failed(line: str, note: str, remedy: str) -> Finding:
    return Finding(line, FAIL, note, remedy)


def skipped(line: str, note: str, remedy: str = "") -> Finding:
    return Finding(line, SKIPPED, note, remedy)


def judged(line: str, good: bool, note: str, remedy: str) -> Finding:
    """Pass or fail with the same note."""
    return passed(line, note) if good else failed(line, note, remedy)


def print_findings(findings: Sequence[Finding], console: Screen) -> None:
    """Print one line each, the remedy below it, and how many there were of each outcome. A terminal
    has long ones wrapped below where they begin."""
    width = max(len(finding.line) for finding in findings)
    for finding in findings:
        outcome = Text(f"{finding.outcome:8}", STYLES[finding.outcome])
        line = f"{finding.outcome:8}{finding.line:{width}}  {finding.note}"
        told = _wrapped(line, width, console)
        console.print(Text.assemble(outcome, told[len(outcome) :]))
        if finding.remedy:
            remedy = f"{'':8}{'':{width}}  -> {finding.remedy}"
            console.print(Text(_wrapped(remedy, width, console), "cyan"))
    counts = {o: sum(finding.outcome == o for finding in findings) for o in STYLES}
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def _wrapped(line: str, width: int, console: Screen) -> str:
    """A line with a note in its third column, as lines of a terminal's."""
    if not console.is_terminal:
        return line
    # No narrower than words are: a terminal of few columns wraps by itself.
    columns = max(console.width, width + 40)
    return fill(line, columns, subsequent_indent=" " * (width + 10), break_on_hyphens=False)
