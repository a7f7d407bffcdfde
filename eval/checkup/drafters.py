"""Whether what was trained is whole, made for this target, and changes no token of its output."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdraft.data.prompts import Prompt
from specdraft.eval.checkup.finding import Finding, failed, judged, passed, skipped
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.identity import differences
from specdraft.eval.measure.measurement import REFERENCE, Measurement, measure
from specdraft.eval.methods.registry import load_trained, needs
from specdraft.eval.methods.trained import Trained
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.feature_layers import cache_command
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, TargetError, UntrainedError, UserError
from specdraft.recipes.find import drafter_of
from specdraft.recipes.schema import Recipe

RETRAIN = "train one for this target with the same recipe"


def check_drafters(
    recipe: Recipe, target: Target, manifest: dict[str, Any] | None
) -> tuple[dict[str, Trained], list[Finding]]:
    """Load what each method of the recipe drafts with; return what could be loaded, by method.

    manifest: of the feature cache, whose scales a head must have; None: there is none.
    """
    loaded: dict[str, Trained] = {}
    findings: dict[str, list[Finding]] = {}
    for method in recipe.eval.methods:
        need = " and ".join(needs(method))
        if not need:
            loaded[method] = Trained()
            continue
        trained, found = _check_drafter(recipe, method, target, manifest)
        findings[need] = found
        if trained is not None:
            loaded[method] = trained
    return loaded, [finding for found in findings.values() for finding in found]


def _check_drafter(
    recipe: Recipe, method: str, target: Target, manifest: dict[str, Any] | None
) -> tuple[Trained | None, list[Finding]]:
    need = " and ".join(needs(method))
    places = " and ".join(_place(recipe, kind) for kind in needs(method))
    whole, owner = f"{need} files", f"{need}'s target"
    try:
        trained = load_trained(recipe, target, [method])
    except (HeadError, TargetError) as error:
        problem, _, remedy = str(error).partition("; ")
        if isinstance(error, UntrainedError):
            return None, [skipped(whole, problem, remedy), skipped(owner, "nothing is trained")]
        # A student that cannot be read is told with its cause, one of another target without.
        if isinstance(error, TargetError) and error.__cause__ is None:
            return None, [passed(whole, f"whole at {places}"), failed(owner, problem, remedy)]
        run = Path(recipe.output.dir)
        made_here = all(run in Path(_place(recipe, kind)).parents for kind in needs(method))
        remedy = f"delete it and {RETRAIN}" if made_here else "take a copy that is whole"
        return None, [failed(whole, problem, remedy), skipped(owner, "its files are damaged")]
    findings = [passed(whole, f"whole at {places}"), passed(owner, f"made for {target.name}")]
    if trained.head is not None:
        findings.append(check_shape(trained.head, target, manifest))
    return trained, findings


def _place(recipe: Recipe, kind: str) -> str:
    """Where a recipe has what its methods draft with: in its run, or where it says."""
    if kind == "cascade" and recipe.cascade.students is not None:
        return " and ".join(recipe.cascade.students)
    return str(drafter_of(recipe, "student" if kind == "cascade" else kind))


def check_shape(
    head: FalconHead | Eagle3Head, target: Target, manifest: dict[str, Any] | None
) -> Finding:
    """The head has the target's sizes and the cache's scales."""
    config = head.config
    pairs = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "vocabulary": (config.vocab_size, target.vocab_size),
    }
    if manifest is not None and isinstance(head, FalconHead):
        for name in ("feature_scale", "embed_scale"):
            # A longer cache of the same kind has another scale, by a little.
            same = 0.9 < getattr(config, name) / manifest[name] < 1.1
            pairs[name] = (getattr(config, name), getattr(config, name) if same else manifest[name])
    wrong = [f"{name} {a:g}, wanted {b:g}" for name, (a, b) in pairs.items() if a != b]
    stored = list(config.feature_layers)
    if manifest is not None:
        stored = manifest["settings"].get("layers", [])
    if stored != list(config.feature_layers):
        add = cache_command(config.feature_layers)
        wrong.append(f"reads layers {list(config.feature_layers)}, the cache has {stored} ({add})")
    note = (
        ", ".join(wrong) or f"hidden size {config.hidden_size}, {config.block_size} tokens a pass"
    )
    return judged("head shape", not wrong, note, RETRAIN)


def check_methods(
    recipe: Recipe, target: Target, loaded: dict[str, Trained], prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Decode the prompts greedily by every method and compare with plain decoding."""
    recipe = recipe.with_eval(temperature=0.0, spread=1.0, repeats=1)
    with cpu_threads(recipe.eval.threads):
        done = measure(recipe, target, Trained(), prompts, [REFERENCE])
        plain = done.tokens(REFERENCE)
        for method in recipe.eval.methods:
            line = f"{method} = plain"
            if method == REFERENCE:
                continue
            if method not in loaded:
                yield skipped(line, f"its {' and '.join(needs(method))} could not be loaded")
                continue
            try:
                ours = measure(recipe, target, loaded[method], prompts, [method])
            except UserError as error:
                problem, _, remedy = str(error).partition("; ")
                yield failed(line, problem, remedy or "mend it, or change eval.methods")
            else:
                yield _compared(line, method, plain, ours)


def _compared(line: str, method: str, plain: list[list[int]], measured: Measurement) -> Finding:
    completions = measured.completions(method)
    if why := next((done.fallback for done in completions if done.fallback), None):
        # Answered by plain decoding from there on: identical, and no draft.
        return failed(line, f"its drafter failed: {why}", "report it with the recipe")
    ours = measured.tokens(method)
    found = differences(measured.target, measured.requests, plain, ours)
    faults = sum(not difference.near_tie for _, difference in found)
    note = f"{len(ours) - len(found)} of {len(ours)} answers are identical"
    note += f", {len(found) - faults} differ by a near-tie" if len(found) > faults else ""
    return judged(line, faults == 0, note, "a fault of the decoder: report it with the recipe")
