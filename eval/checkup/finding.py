"""One line of the doctor: what was looked at, how it is, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Print one line each, the remedy below it, and how many there were of each outcome."""
    width = max(len(finding.line) for finding in findings)
    for finding in findings:
        outcome = Text(f"{finding.outcome:8}", STYLES[finding.outcome])
        console.print(Text.assemble(outcome, f"{finding.line:{width}}  {finding.note}"))
        if finding.remedy:
            console.print(Text(f"{'':8}{'':{width}}  -> {finding.remedy}", "cyan"))
    counts = {o: sum(finding.outcome == o for finding in findings) for o in STYLES}
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
