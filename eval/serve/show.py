"""What a comparison with an engine has found, on a terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specdraft.eval.measure.table import print_whole
from specdraft.recipes.terminal import Screen

REPAIRED = (
    "this vLLM's samples are noise where it verifies drafts on a CPU without Triton; that was "
    "repaired for this comparison alone: serve greedily there, or with Triton"
)


def print_parity(report: dict, console: Screen) -> None:
    """Show one method: a table of both sides, then where they part."""
    title = f"{report['method']} in {report['engine']}: {report['prompts']} prompts"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    headings = ("T", "side", "tokens\n/step", "drafts", "accepted by position")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for run in report["runs"]:
        for side in ("engine", "ours"):
            shares = " ".join(f"{share:.3f}" for share in run["acceptance"][side])
            steps, drafts = f"{run['tokens_per_step'][side]:.3f}", f"{run['drafts'][side]:g}"
            table.add_row(f"{run['temperature']:g}", side, steps, drafts, shares)
    print_whole(table, console)
    if report["repaired"]:
        console.print(Text(REPAIRED, "yellow"))
    for run in report["runs"]:
        console.print(Text(outcome(run, report["prompts"]), "green" if run["passed"] else "red"))
    if cause := report["cause"]:
        how = f": {cause['how']}" if cause["how"] else ""
        line = f"the first draft differs in {cause['tensor']} at input {cause['input']}: "
        console.print(Text(f"{line}{cause['what']}{how}", "red"))


def outcome(run: dict, prompts: int) -> str:
    """One line on a temperature."""
    worst = max((gap["gap"] for gap in run["gaps"]), default=0.0)
    line = f"T = {run['temperature']:g}: acceptance differs by {worst:.3f} at most"
    if "identical" not in run:
        errors = max((gap["errors"] for gap in run["gaps"]), default=0.0)
        return f"{line}, {errors:.1f} standard errors"
    line += f"; {run['identical']} of {prompts} outputs equal the engine's without speculation"
    line += f", {run['near_ties']} more up to a near-tie" if run["near_ties"] else ""
    line += f"; {run['identical_to_ours']} equal ours"
    if step := run["first_step"]:
        line += (
            f"; they first differ at prompt {step['prompt']}, step {step['step']}, position "
            f"{step['position']}: {step['engine']} tokens there, {step['ours']} here"
        )
    return line
