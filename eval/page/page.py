"""report.html: a report as one page that needs nothing else, for phones too.

`write_report` makes it of what report.json holds; a figure that an older report lacks is left out.
The template (page.html.jinja) escapes whatever comes from models and prompts, and a content
security policy lets no script run but its own.
"""

import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from itertools import cycle, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from specdraft.data.atomic import write_atomic
from specdraft.eval.engine.tree import Topology
from specdraft.eval.page.canvas import Plot, to_svg, write_png
from specdraft.eval.page.cells import (
    failure_counts,
    failure_reasons,
    figure,
    identical_outputs,
)
from specdraft.eval.page.colours import SERIES, method_colours
from specdraft.eval.page.plots import bars, curves, depth_first, node_tree, stacks

Run = dict[str, Any]
COLUMNS = {  # key in report.json: (heading, digits); what matters most stands on a phone, too
    "speedup": ("x plain", 2),
    "tokens_per_step": ("tokens /step", 2),
    "acceptance_rate": ("acceptance rate", 2),
    "drafted_per_step": ("nodes /step", 1),
    "tokens_per_second": ("tokens/s", 0),
    "speedup_over_generate": ("x generate", 2),
    "macro_speedup": ("x plain, by question", 2),
    "draft_ms_per_step": ("draft ms", 2),
    "verify_ms_per_step": ("verify ms", 2),
    "overhead_ms_per_step": ("rest ms", 2),
}
TIMES = {"draft": "draft_ms", "verify": "verify_ms", "rest": "overhead_ms"}


def write_page(report: dict, folder: Path, plots: Sequence[Plot] = ()) -> Path:
    """Write report.html into a folder, whole or not at all; with matplotlib, a PNG of each plot.

    plots: of all settings together, before those that the page draws itself.
    """
    sections = [_section(runs, report["runs"]) for runs in _settings(report["runs"])]
    across = [*plots, *_batch_curves(report["runs"])]
    page = folder / "report.html"
    write_atomic(page, render(report, sections, across).encode())
    if importlib.util.find_spec("matplotlib"):
        costs = [plot for plot in (cost_plot(report.get("fit")),) if plot]
        shown = [plot for section in sections for plot in section["plots"]]
        for plot in (*shown, *across, *training_plots(report), *costs):
            write_png(plot, folder)
    return page


def render(report: dict, sections: list[dict], across: list[Plot]) -> str:
    """Fill the template."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"svg": to_svg, "figure": figure, "hash": _hash}
    environment.filters |= {"draft_lines": draft_lines, "category": _category}
    environment.filters |= {"identical": identical_outputs}
    environment.filters |= {"trouble": failure_counts, "reasons": failure_reasons}
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    recipe = report.get("recipe", {})
    return environment.from_string(template).render(
        name=_run_name(recipe),
        date=report.get("date", "")[:10],
        target=report.get("target") or recipe.get("target", {}).get("model", ""),
        environment={k: v for k, v in report.get("environment", {}).items() if v is not None},
        advice=report.get("advice"),
        headline=_headline(report),
        fastest=_fastest(report),
        training=training_plots(report),
        columns=COLUMNS,
        sections=sections,
        across=across,
        fit=report.get("fit"),
        costs=cost_plot(report.get("fit")),
        samples=report.get("samples", []),
        recipe=json.dumps(recipe, indent=1, ensure_ascii=False),
    )


def _settings(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that can be compared: of one prompt set, temperature and batch size."""
    setting = itemgetter("prompt_set", "temperature", "batch_size")
    return [list(group) for _, group in groupby(sorted(runs, key=setting), setting)]


def _run_name(recipe: dict) -> str:
    """What a report is titled by: the folder of its run."""
    folder = recipe.get("output", {}).get("dir") or recipe.get("name") or "report"
    return Path(folder).name


def _headline(report: dict) -> Run | None:
    """The run that stands for what was trained, in the first setting, fast or not; the fastest
    where none does."""
    compared = [run for run in report["runs"] if run.get("speedup")]
    ours = [run for run in compared if run["method"] == report.get("headline")]
    return ours[0] if ours else max(compared, key=itemgetter("speedup"), default=None)


def _fastest(report: dict) -> Run | None:
    """A run that is faster than the headline's, in its setting."""
    if not (ours := _headline(report)):
        return None
    beside = next(runs for runs in _settings(report["runs"]) if ours in runs)
    best = max(beside, key=lambda run: run.get("speedup") or 0)
    return best if best["speedup"] > ours["speedup"] else None


def _section(runs: list[Run], every: Sequence[Run]) -> dict:
    """What the page shows of one setting. Columns that no run has a figure for are left out."""
    colours = method_colours(run["method"] for run in every)
    prompts = _names(every)[runs[0]["prompt_set"]]
    columns = [key for key in COLUMNS if any(run.get(key) is not None for run in runs)]
    entries = [entry for run in runs for entry in run.get("categories", [])]
    categories = list(dict.fromkeys(entry["category"] for entry in entries))
    return {
        "prompts": prompts,
        "runs": runs,
        "columns": columns,
        "plots": _plots(prompts, runs, colours),
        "categories": categories if len(categories) > 1 else [],
        "troubled": [run for run in runs if run.get("failures")],
    }


def _plots(prompts: str, runs: list[Run], colours: dict[str, str]) -> list[Plot]:
    first = runs[0]
    tag = _slug(f"{prompts}-t{first['temperature']:g}-b{first['batch_size']}")
    speeds, lengths = _by_method(runs, "speedup"), _by_method(runs, "tokens_per_step")
    repeats, rates = _by_method(runs, "speedup_repeats"), _by_method(runs, "acceptance_by_depth")
    spreads = {method: (min(values), max(values)) for method, values in repeats.items()}
    depths = {method: dict(enumerate(values, start=1)) for method, values in rates.items()}
    times = {
        run["method"]: {name: run[f"{key}_per_step"] for name, key in TIMES.items()}
        for run in runs
        if run.get("verify_ms_per_step")
    }
    plots = []
    if speeds:
        title = "Speedup over plain decoding" + (", spread of repeats" if spreads else "")
        plots.append(bars(f"speedup-{tag}", title, speeds, spreads, colours))
    if lengths:
        plots.append(bars(f"tokens-{tag}", "Tokens per step", lengths, {}, colours))
    if depths:
        title = "Acceptance by depth, given the depth before"
        plots.append(curves(f"depth-{tag}", title, depths, colours, "depth", highest=1.0))
    if times:
        plots.append(stacks(f"time-{tag}", "Milliseconds per step", times))
    for method, nodes in _by_method(runs, "acceptance_by_node").items():
        if any(node["path"][-1] > 0 for node in nodes):  # a chain is its curve by depth
            title = f"Tree of {method}: how often a node is accepted"
            plots.append(node_tree(_slug(f"tree-{method}-{tag}"), title, nodes, colours[method]))
    return plots


def _by_method(runs: Sequence[Run], key: str) -> dict[str, Any]:
    """A figure of every run that has it."""
    return {run["method"]: run[key] for run in runs if run.get(key)}


def _batch_curves(runs: Sequence[Run]) -> list[Plot]:
    """Speedup by batch size, one plot for each prompt set and temperature with several sizes."""

    def setting(run: Run) -> tuple:
        return names[run["prompt_set"]], run["temperature"]

    names = _names(runs)
    colours = method_colours(run["method"] for run in runs)
    plots = []
    for (prompts, temperature), group in groupby(sorted(runs, key=setting), setting):
        series: dict[str, dict[int, float]] = {}
        spreads: dict[tuple[str, int], Sequence[float]] = {}
        for run in group:
            if run.get("speedup"):
                series.setdefault(run["method"], {})[run["batch_size"]] = run["speedup"]
                spreads[run["method"], run["batch_size"]] = run.get("speedup_repeats", ())
        if len({size for points in series.values() for size in points}) > 1:
            tag = _slug(f"{prompts}-t{temperature:g}")
            title = f"Speedup by batch size, {prompts}, temperature {temperature:g}"
            plots.append(
                curves(f"batch-{tag}", title, series, colours, "batch size", spreads=spreads)
            )
    return plots


def training_plots(report: dict) -> list[Plot]:
    """What was learnt, over the steps of training: loss, accuracy, tokens per step."""
    points = report.get("training") or []

    def over_steps(key: str) -> dict[int, Any]:
        return {one["step"]: one[key] for one in points if key in one}

    shares, speeds = over_steps("accuracy"), over_steps("tokens_per_step")
    guessed = {
        f"token {n + 1}": {step: some[n] for step, some in shares.items()}
        for n in range(min(map(len, shares.values()), default=0))
    }
    wanted = [
        ("loss", "Training: loss", {"loss": over_steps("loss")}, None),
        ("accuracy", "Training: accuracy by depth", guessed, 1.0),
        ("tokens", "Training: tokens per step", {"validation prompts": speeds}, None),
    ]
    return [
        curves(f"training-{name}", title, series, _in_turn(series), "step", highest)
        for name, title, series, highest in wanted
        if max(map(len, series.values()), default=0) > 1
    ]


def cost_plot(fit: dict | None) -> Plot | None:
    """Milliseconds of verifying by nodes, measured and fitted: what a tree's size costs."""
    if not fit or not fit["verify_ms"]:
        return None
    kinds = ("measured", "curve")
    series = {kind: {one["nodes"]: one[kind] for one in fit["verify_ms"]} for kind in kinds}
    title = "Milliseconds to verify, by nodes"
    return curves("costs", title, series, _in_turn(kinds), "nodes")


def _in_turn(names: Iterable[str]) -> dict[str, str]:
    """Colours of what is no method."""
    return dict(zip(names, cycle(SERIES), strict=False))


def draft_lines(draft: dict) -> list[dict]:
    """The nodes of a draft as indented lines, every node below its parent."""
    tree, texts, accepted = Topology(draft["parents"]), draft["texts"], draft["accepted"]
    return [
        {"text": texts[node], "depth": tree.depths[node] - 1, "accepted": node in accepted}
        for node in depth_first(tree)[1:]
    ]


def _category(run: Run, name: str) -> dict:
    """A run's figures of a category; none where it failed on all of it."""
    return next((entry for entry in run["categories"] if entry["category"] == name), {})


def _hash(script: str) -> str:
    """The hash by which a content security policy knows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _names(runs: Sequence[Run]) -> dict[str, str]:
    """The name of each prompt set: without the place of its file, where no other is called so."""
    short = {run["prompt_set"]: Path(run["prompt_set"].partition(":")[0]).stem for run in runs}
    names = [*short.values()]
    return {every: name if names.count(name) == 1 else every for every, name in short.items()}


def _slug(text: str) -> str:
    """A file name of a text: its last part, without what a shell or a browser would trip over."""
    return re.sub(r"[^\w.-]+", "-", text)[-80:].strip("-.")
