"""The comparison at the end of a run: every method on every prompt, interleaved, as report.json.

Methods take turns prompt by prompt, so that a machine that slows down slows all of them down.
"""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdraft.data.prompts import Prompt
from specdraft.data.whole import write_whole
from specdraft.eval.drafters.trained import Trained, showcase
from specdraft.eval.engine.request import GUMBEL, Request
from specdraft.eval.measure.categories import add_speedups, by_category, macro
from specdraft.eval.measure.failure import Tolerant, reasons, told, trouble
from specdraft.eval.measure.identity import first_difference
from specdraft.eval.measure.methods import make_method, rule_of
from specdraft.eval.measure.metrics import Costs, counts, padding, times
from specdraft.eval.measure.outcome import DecodingMethod, Outcome
from specdraft.eval.measure.page import write_page
from specdraft.eval.measure.questions import make_requests, play_turns
from specdraft.eval.measure.show import print_sample, sample
from specdraft.eval.measure.turns import (
    Outcomes,
    Recall,
    batches,
    capacity_for,
    make_now,
    take_turns,
)
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe

SCHEMA = 1
SAMPLES = 2
REFERENCE = "plain"  # what outputs are compared with
BASES = {"speedup": REFERENCE, "speedup_over_generate": "generate"}
WIDEST = 400  # columns of a printed table


def evaluate(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    progress: bool = True,
    recall: Recall = make_now,
) -> dict:
    """Decode all prompts by all methods; return the report (see the README for its schema).

    A method that fails on a prompt goes on with the next one, and its row says so. `samples` are
    the first answers of our last method that drafts, cut into what was accepted.
    """
    with cpu_threads(recipe.eval.threads):
        prompts = play_turns(recipe, target, prompts)
        requests = make_requests(recipe.eval, prompts)
        makers = _makers(recipe, target, trained, requests, methods)
        runners = {name: Tolerant(make) for name, make in makers.items()}
        outcomes = take_turns(runners, requests, recipe.eval, progress, recall)
        where = environment(target)
    shown = showcase(methods)
    answers = [
        pair
        for some, part in _parts(recipe, prompts, outcomes, shown)
        for pair in zip(some, part.completions, strict=not part.failure)
    ]
    return {
        "schema": SCHEMA,
        "recipe": recipe.to_dict(),
        "environment": where,
        "runs": summarise(recipe, target, trained, prompts, outcomes),
        "samples": [
            {"method": shown} | sample(target.tokenizer, prompt.text, done)
            for prompt, done in answers[:SAMPLES]
        ],
    }


def decode_all(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    progress: bool = True,
) -> Outcomes:
    """Build every method and let them take turns on the prompts (eval/measure/turns.py)."""
    requests = make_requests(recipe.eval, prompts)
    makers = _makers(recipe, target, trained, requests, methods)
    runners = {name: make() for name, make in makers.items()}
    return take_turns(runners, requests, recipe.eval, progress)


def _makers(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    requests: Sequence[Request],
    methods: Sequence[str],
) -> dict[str, Callable[[], DecodingMethod]]:
    capacity = capacity_for(recipe.eval, requests)
    return {name: partial(make_method, name, recipe, target, trained, capacity) for name in methods}


def tokens_per_step(
    recipe: Recipe, target: Target, trained: Trained, prompts: Sequence[Prompt], method: str
) -> float:
    """Of one method alone, without a report: what a drafter is chosen by. It must not fail."""
    with cpu_threads(recipe.eval.threads):
        prompts = play_turns(recipe, target, prompts)
        outcomes = decode_all(recipe, target, trained, prompts, [method], progress=False)
    return counts(outcomes[method], Costs(0.0, None))["tokens_per_step"]


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Decode with `count` threads: a step of a small target is faster with one than with many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summarise(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    outcomes: Outcomes,
) -> list[dict]:
    """Turn outcomes into one row of figures per method: of all that it did, if not of all."""
    failed = {name for name, parts in outcomes.items() if any(part.failure for part in parts)}
    whole = {name: parts for name, parts in outcomes.items() if name not in failed}
    rows = {row["method"]: row for row in _figures(recipe, target, trained, prompts, whole)}
    bases = {name: whole[name] for name in BASES.values() if name in whole}
    for name in failed:
        some = bases | {name: outcomes[name]}
        rows[name] = _figures_of_done(recipe, target, trained, prompts, some)
    return [rows[name] | trouble(_parts(recipe, prompts, outcomes, name)) for name in outcomes]


def _figures_of_done(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    outcomes: Outcomes,
) -> dict:
    """The row of the last method, which failed on some batches: all figures are of the others.

    One that failed on all has no figures.
    """
    name = [*outcomes][-1]
    done = [n for n, part in enumerate(outcomes[name]) if not part.failure]
    if not done:
        none = {"outputs": 0, "identical": None, "near_ties": None, "differences": []}
        return _setting(recipe, name) | none | {"categories": []}
    taken = batches(name, prompts, recipe.eval.batch_size)
    some = [prompt for n in done for prompt in taken[n]]
    parts = {key: [every[n] for n in done] for key, every in outcomes.items()}
    return _figures(recipe, target, trained, some, parts)[-1]


def _parts(
    recipe: Recipe, prompts: Sequence[Prompt], outcomes: Outcomes, name: str
) -> Iterable[tuple[Sequence[Prompt], Outcome]]:
    """What a method was given at a time, and what became of it."""
    return zip(batches(name, prompts, recipe.eval.batch_size), outcomes[name], strict=True)


def _figures(
    recipe: Recipe,
    target: Target,
    trained: Trained,
    prompts: Sequence[Prompt],
    outcomes: Outcomes,
) -> list[dict]:
    plain_ms = None
    if REFERENCE in outcomes:
        plain_ms = times(outcomes[REFERENCE], 1)["verify_ms_per_step"]
    rows = []
    for name, parts in outcomes.items():
        share = _parameter_share(parts, trained.models(name), target)
        costs = Costs(share, _measured_cost(parts, plain_ms))
        row = {
            **_setting(recipe, name),
            **_identity(recipe, target, prompts, outcomes, name),
            **counts(parts, costs),
            **padding(parts),
        }
        row |= times(parts, row["tokens"]) | macro(prompts, parts)
        rows.append(row | {"categories": by_category(prompts, parts)})
    speeds = {row["method"]: row["tokens_per_second"] for row in rows}
    plain = next((row for row in rows if row["method"] == REFERENCE), None)
    for row in rows:
        add_speedups(row, plain)
        row["speedup_repeats"] = paired(row, plain)
        for key, base in BASES.items():
            row[key] = row["tokens_per_second"] / speeds[base] if base in speeds else None
    return rows


def _setting(recipe: Recipe, name: str) -> dict:
    return {
        "method": name,
        "prompt_set": recipe.eval.prompts,
        "batch_size": recipe.eval.batch_size,
        "temperature": recipe.eval.temperature,
        "max_new_tokens": recipe.eval.max_new_tokens,
        "acceptance": rule_of(name, recipe.eval) if recipe.eval.temperature else "greedy",
        "spread": recipe.eval.spread,
        "dtype": recipe.target.dtype,
    }


def paired(row: dict, plain: dict | None) -> list[float]:
    """Speedups over plain decoding of every repeat by itself; none without repeats."""
    key = "tokens_per_second_repeats"
    return [a / b for a, b in zip(row[key], plain[key], strict=True)] if plain else []


def _identity(recipe, target, prompts: Sequence[Prompt], outcomes: Outcomes, name: str) -> dict:
    """Count outputs equal to plain decoding's; list every other one with its near-tie or fault."""
    in_law_only = recipe.eval.temperature > 0 and rule_of(name, recipe.eval) != GUMBEL
    if REFERENCE not in outcomes or in_law_only:
        return {"identical": None, "near_ties": None, "differences": []}
    plain, ours = _tokens(outcomes[REFERENCE]), _tokens(outcomes[name])
    found = [
        (prompt, first_difference(target, prompt.input_ids, a, b))
        for prompt, a, b in zip(prompts, plain, ours, strict=True)
    ]
    differences = [
        {"prompt": prompt.id, "turn": prompt.turn, **d.to_dict()} for prompt, d in found if d
    ]
    return {
        "identical": len(found) - len(differences),
        "near_ties": sum(d["near_tie"] for d in differences),
        "differences": differences,
    }


def _tokens(parts: Sequence[Outcome]) -> list[list[int]]:
    return [done.tokens for part in parts for done in part.completions]


def _measured_cost(parts: Sequence[Outcome], plain_ms: float | None) -> float | None:
    forwards = sum(part.drafter_forwards for part in parts)
    if plain_ms is None:
        return None
    draft_ms = 1e3 * sum(part.drafter_seconds for part in parts)
    return draft_ms / forwards / plain_ms if forwards else 0.0


def _parameter_share(
    parts: Sequence[Outcome], models: Sequence[torch.nn.Module], target: Target
) -> float:
    """Parameters of a drafter's forward over the target's; of several models, by their forwards."""
    forwards = sum(part.drafter_forwards for part in parts)
    if not models or not forwards:
        return 0.0
    passes = (sum(counts) for counts in zip(*(part.drafter_passes for part in parts), strict=True))
    read = sum(n * _parameters(model) for n, model in zip(passes, models, strict=True))
    return read / forwards / _parameters(target.model)


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def environment(target: Target) -> dict:
    """Where the figures were measured."""
    return {
        "device": str(target.device),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if target.device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_report(report: dict, folder: Path) -> Path:
    """Write report.json into a folder, whole or not at all, and report.html of it beside it."""
    path = folder / "report.json"
    write_json(report, path)
    write_page(report, folder)
    return path


def write_json(content: dict, path: Path) -> None:
    """Write figures as JSON, whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(content, indent=1)}\n".encode())


def print_report(report: dict, console: Console | None = None) -> None:
    """Show the runs of a report side by side, and its sample answers."""
    runs = report["runs"]
    first = runs[0]
    table = Table(
        title=f"{first['prompt_set']}: {first['outputs'] + first['failed']} prompts, up to "
        f"{first['max_new_tokens']} new tokens, temperature {first['temperature']}, batch "
        f"{first['batch_size']}, {first['dtype']}",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    names = ("method", "tokens\n/step", "accept\nrate", "nodes\n/step", "tokens\n/s", "x\nplain")
    names += ("x gen-\nerate", "draft\nms", "verify\nms", "rest\nms", "iden-\ntical")
    troubled = [run for run in runs if run["failures"]]
    names += ("trouble",) * bool(troubled)
    for name in names:
        left = name == "method"
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for run in runs:
        table.add_row(
            run["method"],
            _shown(run.get("tokens_per_step")),
            _shown(run.get("acceptance_rate")),
            _shown(run.get("drafted_per_step"), 1),
            _speed(run),
            _shown(run.get("speedup")),
            _shown(run.get("speedup_over_generate")),
            _shown(run.get("draft_ms_per_step")),
            _shown(run.get("verify_ms_per_step")),
            _shown(run.get("overhead_ms_per_step")),
            agreement(run),
            *([told(run)] if troubled else []),
        )
    console = console or Console()
    # A column that does not fit would be left out: on a narrow terminal, lines wrap instead.
    needed = console.measure(table, options=console.options.update_width(WIDEST))
    console.width = max(console.width, needed.maximum)
    console.print(table)
    for run in troubled:
        console.print(Text(f"{run['method']}: {reasons(run)}", "red"))
    for answer in report["samples"]:
        print_sample(answer, console)


def print_curves(runs: Sequence[dict], console: Console | None = None) -> None:
    """Show tokens/s over plain decoding of the same rows, by batch size (EMS-SD, Table 2)."""
    sizes = sorted({run["batch_size"] for run in runs})
    if len(sizes) < 2:
        return
    settings: dict[str, dict[str, dict[int, float | None]]] = {}
    for run in runs:
        setting = f"{run['prompt_set']}, temperature {run['temperature']}"
        speeds = settings.setdefault(setting, {}).setdefault(run["method"], {})
        speeds[run["batch_size"]] = run.get("speedup")
    console = console or Console()
    for setting, methods in settings.items():
        console.print(f"x plain decoding, by batch size: {setting}")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for size in sizes:
            table.add_column(str(size), justify="right")
        for name, speeds in methods.items():
            table.add_row(name, *(_shown(speeds.get(size)) for size in sizes))
        console.print(table)


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(run: dict) -> str:
    """Tokens per second; with repeats, the slowest and the fastest of them, too."""
    repeats = run.get("tokens_per_second_repeats")
    spread = f" ({min(repeats):.0f}-{max(repeats):.0f})" if repeats else ""
    return _shown(run.get("tokens_per_second"), 0) + spread


def agreement(run: dict) -> str:
    """How many outputs of a run are those of plain decoding, and how many differ by a near-tie."""
    if run["identical"] is None:
        return "-"
    near = f" (+{run['near_ties']} ties)" if run["near_ties"] else ""
    return f"{run['identical']}/{run['outputs']}{near}"
