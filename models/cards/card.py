"""The model card of a drafter: what it is, for whose tokens, how good, and how to use it.

Everything is read from the run: its recipe, the drafter's config, its reports.
"""

from collections.abc import Iterable, Iterator, Sequence

import yaml
from huggingface_hub import EvalResult, ModelCardData

from specdraft.models.cards.lines import INSTALL, Card, alone, serving, usage
from specdraft.models.hub import is_hub_id
from specdraft.recipes.find import HEADS, drafter_of
from specdraft.recipes.fitted_tree import Fit, size_of
from specdraft.recipes.schema import Recipe
from specdraft.recipes.sections.target import BUNDLED
from specdraft.recipes.terminal import visible

PICTURE = "training_curve.png"
COLUMNS = {
    "tokens_per_step": ("tokens/step", ".2f"),
    "acceptance_rate": ("acceptance rate", ".2f"),
    "drafted_per_step": ("nodes/step", ".1f"),
    "speedup": ("x plain", ".2f"),
    "speedup_over_generate": ("x generate", ".2f"),
}
# Of a run of a report, what runs in one table have in common.
SETTING = ("prompt_set", "temperature", "batch_size", "max_new_tokens", "dtype")
METRICS = {"tokens_per_step": "tokens per step", "speedup": "times plain decoding"}


def model_card(
    recipe: Recipe,
    card: Card,
    config: dict,  # the drafter's own
    reports: Sequence[dict],  # report.json of the training, and of benchmarks since
    picture: bool,  # whether PICTURE lies beside the card
    fit: Fit | None = None,  # of the tree beside the weights
) -> str:
    """Return README.md for the repository `hub.repo_id`, or for the drafter's own folder."""
    name = recipe.hub.repo_id or f"{recipe.name}/{card.kind}"
    repo = recipe.hub.repo_id or str(drafter_of(recipe, card.kind))
    chat = any(report.get("chat") for report in reports[:1])
    by_itself = (  # what a repository brings to `generate`
        "Or, with nothing but specdraft installed (`trust_remote_code` runs "
        "`custom_generate/generate.py` of this repository):",
        f"```python\n{alone(recipe)}```",
    )
    parts = [
        f"---\n{yaml.safe_dump(metadata(recipe, card, reports), sort_keys=False)}---",
        f"# {name}",
        f"{card.noun} that drafts for **{recipe.target.model}** in speculative "
        "decoding: the target checks every drafted token, so its output is what it would be "
        "without drafts. "
        "Trained and measured with specdraft; `recipe.yaml` reproduces it.",
        facts(recipe, card, config, repo, fit),
        "## Use",
        f"```bash\n{INSTALL}```",
        f"```python\n{usage(recipe, card, repo, chat)}```",
        *(by_itself if recipe.hub.repo_id else ()),
        "In vLLM, which verifies chains:",
        f"```bash\n{serving(recipe, card, repo)}```",
        "## Results",
        results(reports, fit),
    ]
    if picture:
        parts += ["## Training", f"![training curve]({PICTURE})"]
    return visible("\n\n".join(parts)) + "\n"


def metadata(recipe: Recipe, card: Card, reports: Sequence[dict]) -> dict:
    """Return what the Hub reads from a card's front matter; model-index has the figures."""
    names = (recipe.target.model, *recipe.data.sources)
    base, *datasets = (name if name != BUNDLED and is_hub_id(name) else None for name in names)
    datasets = [name.partition(":")[0] for name in datasets if name and not set(name) & {*"*?["}]
    figures = list(eval_results(reports))
    return ModelCardData(
        library_name=card.library,
        license=recipe.hub.license,
        base_model=base,
        datasets=datasets or None,
        tags=["speculative-decoding", "draft-model", card.tag],
        model_name=(recipe.hub.repo_id or recipe.name) if figures else None,
        eval_results=figures or None,
    ).to_dict()


def eval_results(reports: Sequence[dict]) -> Iterator[EvalResult]:
    """Yield the figures of the method that drafts with the drafter, in every setting."""
    for report in reports:
        own = {sample["method"] for sample in report.get("samples", [])}
        for run in report["runs"]:
            for key, name in METRICS.items():
                if run["method"] in own and run.get(key) is not None:
                    yield EvalResult(
                        task_type="text-generation",
                        dataset_type=run["prompt_set"],
                        dataset_name=f"{run['prompt_set']}, temperature {run['temperature']:g}, "
                        f"batch {run['batch_size']}",
                        metric_type=key,
                        metric_name=f"{name} ({run['method']})",
                        metric_value=round(run[key], 3),
                    )


def facts(recipe: Recipe, card: Card, config: dict, repo: str, fit: Fit | None) -> str:
    """Return target, data and licence as a table."""
    target, data = recipe.target, recipe.data
    weights = config.get("target", {}).get("weights")
    rows = {
        "target": f"{target.model}, revision {target.revision or 'main'}, decoded in "
        + target.dtype + (f", weights {weights[:12]}" if weights else ""),
        "data": f"{', '.join(data.sources)}; answers by the {data.answers}, up to "
        f"{data.max_length} tokens"
        + (f", {data.limit} conversations at most" if data.limit else ""),
        **({"head": head_facts(config)} if card.kind in HEADS else {}),
        **({"tree": tree_facts(fit, repo)} if fit else {}),
        "licence": recipe.hub.license
        or "none chosen (`hub.license`); the target's may apply to what is made from it",
    }  # fmt: skip
    cells = {name: " ".join(text.split()).replace("|", r"\|") for name, text in rows.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in cells.items())])


def head_facts(config: dict) -> str:
    """Return what a Falcon or EAGLE head's config says of its form, in a line."""
    size, fusion = config.get("block_size", 1), config.get("fusion", "of layers (EAGLE-3)")
    parts = [f"{size} token{'s' * (size > 1)} a pass", f"fusion {fusion}"]
    if size > 1:
        parts += [f"slots read {config['reads']}, coupling {config['coupling']}"]
    if layers := config.get("feature_layers"):
        plural = "s" * (len(layers) > 1)
        parts += [f"also reads layer{plural} {', '.join(map(str, layers))} of the target"]
    if window := config.get("window"):
        parts += [f"sees {window} tokens"]
    if drafted := config.get("draft_vocab"):
        parts += [f"drafts among {drafted:,} of {config['vocab_size']:,} tokens"]
    return "; ".join(parts)


def tree_facts(fit: Fit, repo: str) -> str:
    """Return what the tree beside the weights is, and what it brought where it was fitted."""
    own, rows = fit.tried()[0], f"{fit.rows} row{'s' * (fit.rows > 1)}"
    return (
        f"{own}, fitted on {fit.place} for {rows}: {own.measured:.2f} x plain decoding there, "
        f"{own.expected:.2f} x expected; for another machine: `specdraft fit {repo}`"
    )


def results(reports: Sequence[dict], fit: Fit | None = None) -> str:
    """Return the runs of reports, a table for every setting, and what its columns mean."""
    tables = [
        f"{_setting(runs[0], report['environment'])}{_earlier(report, fit)}:\n\n{_table(runs)}"
        for report in reports
        for runs in _by_setting(report["runs"])
    ]
    if not tables:
        return "Not measured yet."
    meaning = (
        "A step is one target forward; *identical* counts outputs that equal plain decoding token "
        "for token."
    )
    return "\n\n".join([*tables, meaning])


def _earlier(report: dict, fit: Fit | None) -> str:
    """Name the fitted tree that a report was measured with, where another one lies there now."""
    now = fit and fit.tried()[0]
    of_now = now and f"fitted, {size_of(now.nodes, now.depth)}"
    trees = {run["method"]: run.get("tree") for run in report["runs"]}
    others = {name: tree for name, tree in trees.items() if now and tree and tree != of_now}
    return "".join(f"; `{name}` with another tree, {tree}" for name, tree in others.items())


def _by_setting(runs: Sequence[dict]) -> Iterable[list[dict]]:
    """The runs that can be compared with each other, those of a setting together."""
    grouped: dict[tuple, list[dict]] = {}
    for run in runs:
        grouped.setdefault(tuple(run.get(key) for key in SETTING), []).append(run)
    return grouped.values()


def _setting(run: dict, where: dict) -> str:
    """What a table was measured on."""
    prompts = {"tiny_chat": "the bundled prompts", "holdout": "the data's held-out rows"}
    asked = prompts.get(run["prompt_set"], run["prompt_set"])
    return (
        f"{run['outputs']} answers to {asked}, up to {run['max_new_tokens']} new tokens, "
        f"temperature {run['temperature']:g}, batch {run['batch_size']}, {run['dtype']}; "
        f"{where['gpu'] or where['cpu']}, torch {where['torch']}, transformers "
        f"{where['transformers']}"
    )


def _table(runs: Sequence[dict]) -> str:
    names = [name for name, _ in COLUMNS.values()]
    lines = [f"| method | {' | '.join(names)} | identical |", "|---" * (len(names) + 2) + "|"]
    for run in runs:
        values = ((run.get(key), form) for key, (_, form) in COLUMNS.items())
        cells = ["-" if value is None else f"{value:{form}}" for value, form in values]
        same = "-" if run["identical"] is None else f"{run['identical']}/{run['outputs']}"
        lines.append(f"| `{run['method']}` | {' | '.join(cells)} | {same} |")
    return "\n".join(lines)
