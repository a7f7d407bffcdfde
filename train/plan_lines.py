"""A plan as lines: what --dry-run prints of a run's sizes and costs."""

from dataclasses import replace

import torch

from specdraft.data.store.storage import Storage, feature_bytes
from specdraft.models.shapes import BYTES, eagle3_config, head_config
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import AUTO
from specdraft.train.draft_cost import compared
from specdraft.train.objectives.unread import unread_settings
from specdraft.train.plan import Plan

LARGE_CACHE = 50e9  # bytes, from which on ways to store less are named
GPU_FLOPS = 125e12  # an A100 in bfloat16 at 40% of its peak, for plans made elsewhere


def plan_lines(plan: Plan, recipe: Recipe, ranks: int, flops: float) -> list[tuple[str, str]]:
    """Return the plan as (what, how much); flops: this device's measured speed."""
    shape, train, spread = plan.target, recipe.train, recipe.target.device_map
    target = f"{recipe.target.model}: {format_parameters(shape.parameters)}, "
    target += f"{shape.layers} layers x {shape.hidden_size}, vocabulary {shape.vocab_size}"
    lines = [("target", f"{target} ({plan.target_from})")]
    if spread:
        held = format_bytes(shape.parameters * BYTES[recipe.target.dtype])
        placement = f"target.device_map = {spread}: {held} over the devices of one process"
        lines.append(("placement", placement))
    lines += plan.student.lines() if plan.student else _head_lines(plan, recipe)
    lines += [("not read", unread) for unread in unread_settings(recipe)]
    output = ("output", str(recipe.output.dir))
    if not plan.drafter_parameters:
        return [*lines, output]
    data = "counted when the sources are read (set data.limit for a bound)"
    if plan.tokens is not None:
        data = f"{plan.at_most}{plan.rows:,} rows, {plan.tokens:,} tokens"
    return [
        *lines,
        ("data", data),
        ("feature cache", _cache_line(plan, recipe, ranks, flops)),
        *_less_disk(plan, recipe),
        ("steps", _steps_line(plan, recipe, ranks)),
        ("memory", f"about {format_bytes(plan.memory_per_gpu)} per process while training"),
        ("checkpoints", f"{format_bytes(plan.checkpoint_bytes)}: {train.keep} and 1 in progress"),
        output,
    ]


def _head_lines(plan: Plan, recipe: Recipe) -> list[tuple[str, str]]:
    head, medusa = recipe.head, recipe.medusa
    kind, costs = f"k = {head.block_size}, {head.fusion}", {}
    if medusa.given:
        kind = f"{medusa.heads} Medusa heads, {medusa.lm_heads} lm_heads"
    else:
        kind += f", reads {head.reads}, coupling {head.coupling}" if head.block_size > 1 else ""
        if layers := recipe.data.feature_layers:
            kind += f", layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} of the target"
        if head.window is not None:
            kind += f", a window of {head.window}"
        if head.draft_vocab is not None:
            kind += f", drafting among {head.draft_vocab} tokens"
        wanted = eagle3_config if head.fusion == "layers" else head_config
        target, drafted = recipe.target.dtype, recipe.eval.head_dtype
        drafted = target if drafted == AUTO else drafted
        costs = compared(wanted(recipe, plan.target), BYTES[drafted], BYTES[target])
    size = format_parameters(plan.drafter_parameters)
    line = f"{kind}: {size} ({plan.head_layers:.2f} decoder layers of the target)"
    return [("head", line), *((name, f"reads {cost}") for name, cost in costs.items())]


def _steps_line(plan: Plan, recipe: Recipe, ranks: int) -> str:
    train = recipe.train
    steps = f"{plan.at_most}{plan.steps:,}" if plan.steps else "counted when the sources are read"
    if train.steps is not None:
        steps = f"{train.steps:,}"
    parts = f"accumulation {train.accumulation} x processes {ranks} x rows per forward"
    return f"{steps}, of {train.batch_size} rows each ({parts} {plan.rows_per_forward})"


def _cache_line(plan: Plan, recipe: Recipe, ranks: int, flops: float) -> str:
    online = recipe.data.features == "online"
    if plan.student.runs_target if plan.student else online:
        held = format_bytes(plan.target.parameters * BYTES[recipe.target.dtype])
        where = "over all devices" if recipe.target.device_map else "in every process"
        return f"none: the target runs in training, {held} {where}"
    if plan.student and not plan.student.features:
        return "none: unused"
    storage = Storage.of(recipe.data)
    cache = f"{storage.token_bytes(plan.target.hidden_size)} bytes per token"
    if count := len(storage.layers):
        cache += f", {count} layer{'s' * (count > 1)} beside the feature"
    if plan.tokens is None:
        return cache
    needed = 2.0 * plan.target.parameters * plan.tokens / ranks
    here, there = needed / flops, needed / GPU_FLOPS
    cache = f"{plan.at_most}{format_bytes(plan.cache_bytes)} ({cache}); building it: {plan.at_most}"
    cache += f"{format_seconds(here)} here ({ranks} x {flops / 1e12:.2g} TFLOP/s measured)"
    if not torch.cuda.is_available():
        cache += f", {format_seconds(there)} on {ranks} x A100"
    return cache


def _less_disk(plan: Plan, recipe: Recipe) -> list[tuple[str, str]]:
    """What a feature cache that is large could do with."""
    data = recipe.data
    unused = data.features == "online" or (plan.student and not plan.student.features)
    if unused or (plan.cache_bytes or 0) < LARGE_CACHE:
        return []
    ways = ["data.features=online: none, the target runs in training"]
    smaller = Storage.of(replace(data, feature_dtype="int8"))
    size = feature_bytes(plan.tokens, plan.tokens, plan.target.hidden_size, smaller)
    if size < plan.cache_bytes:
        ways.insert(0, f"data.feature_dtype=int8: {plan.at_most}{format_bytes(size)}")
    return [("on less disk", "; ".join(ways))]


def format_bytes(count: float) -> str:
    """Format bytes."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_parameters(count: float) -> str:
    """Format parameters, of small models too."""
    return f"{count / 1e9:.2f} B parameters" if count >= 1e9 else f"{count / 1e6:.3g} M parameters"


def format_seconds(seconds: float) -> str:
    """Format seconds in the unit one would say."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
