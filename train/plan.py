"""What a run would do and cost, before it does anything: the plan that --dry-run prints.

Nothing is downloaded but configs, and no weights are made: a head is counted on the meta device.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdraft.data.chat import split_holdout
from specdraft.data.fingerprint import of_settings
from specdraft.data.sources import is_here
from specdraft.data.store.storage import Storage, feature_bytes
from specdraft.data.store.token_builder import token_settings
from specdraft.data.store.tokens import TokenCache
from specdraft.models.eagle3 import Apart
from specdraft.models.medusa import MedusaHeads
from specdraft.models.sar.fusion import FUSIONS
from specdraft.models.shapes import (
    BYTES,
    BYTES_PER_PARAMETER,
    LOGITS_BYTES,
    TargetShape,
    any_head,
    eagle3_config,
    head_config,
    medusa_config,
    target_shape,
)
from specdraft.models.target_files import load_tokenizer, model_folder, read_chat_template
from specdraft.models.weights.identity import identity_of
from specdraft.recipes.schema import Recipe
from specdraft.recipes.sections.target import BUNDLED
from specdraft.recipes.static_trees import AUTO
from specdraft.train.draft_cost import compared
from specdraft.train.fit.batches import rows_per_forward
from specdraft.train.fit.schedules import total_steps
from specdraft.train.student_plan import StudentPlan

LARGE_CACHE = 50e9  # bytes, from which on ways to store less are named
GPU_FLOPS = 125e12  # an A100 in bfloat16 at 40% of its peak, for plans made elsewhere


@dataclass(frozen=True)
class Plan:
    """Sizes and costs; bytes, parameters, tokens, seconds."""

    target: TargetShape
    target_from: str
    student: StudentPlan | None  # None: the drafter is a head
    drafter_parameters: int  # that are trained
    rows: int | None  # None: only known once the sources are read
    tokens: int | None
    exact: bool  # rows and tokens were counted, not bounded
    cache_bytes: int | None
    memory_per_gpu: int
    rows_per_forward: int
    checkpoint_bytes: int
    steps: int | None

    @property
    def at_most(self) -> str:
        """What rows, tokens and their costs are, where they were not counted."""
        return "" if self.exact else "at most "

    @property
    def head_layers(self) -> float:
        """The head's size in decoder layers of its target."""
        return self.drafter_parameters / self.target.layer_parameters


def make_plan(
    recipe: Recipe,
    ranks: int = 1,
    rows: int | None = None,
    tokens: int | None = None,
    stored: int | None = None,
) -> Plan:
    """Plan a run on `ranks` processes; rows and tokens where they are known (see `known_sizes`).

    stored: how many of the tokens have a feature on disk; None: not known, at most all.
    """
    shape, origin = target_shape(recipe)
    student = StudentPlan.of(recipe, shape)
    parameters = student.trained if student else _head_parameters(recipe, shape)
    exact = tokens is not None
    rows, tokens = _bounded(recipe, rows, tokens)
    cache_bytes = None
    if tokens is not None:
        kept = tokens if stored is None else stored
        cache_bytes = feature_bytes(tokens, kept, shape.hidden_size, Storage.of(recipe.data))
    train = recipe.train
    cut = train.batch_size, train.accumulation, ranks
    per_forward = rows_per_forward(*cut) if parameters else 1
    positions = _positions(recipe, per_forward)
    if student:
        memory = student.memory(positions)
    else:
        memory = head_memory(recipe, shape, parameters, positions)
    frozen = student.frozen_bytes if student else 0  # a checkpoint holds every weight
    known = train.steps is not None or (rows and train.epochs is not None)
    return Plan(
        target=shape,
        target_from=origin,
        student=student,
        drafter_parameters=parameters,
        rows=rows,
        tokens=tokens,
        exact=exact,
        cache_bytes=cache_bytes,
        memory_per_gpu=memory,
        rows_per_forward=per_forward,
        checkpoint_bytes=(12 * parameters + frozen) * (train.keep + 1),
        steps=total_steps(recipe, rows or 0) if known else None,
    )


def known_sizes(recipe: Recipe) -> tuple[int | None, int | None, int | None]:
    """Return rows, tokens and stored features of a recipe, as far as is known without a download.

    All from a finished token cache; of sources on this machine a bound of the rows.
    """
    name, data = recipe.target.model, recipe.data
    if not all(map(is_here, data.sources)):
        return None, None, None
    if name == BUNDLED or Path(name).is_dir():
        folder = model_folder(name)
        own = data.answers == "target"
        whose = identity_of(name, recipe.target.revision, folder) if own else None
        tokenizer = load_tokenizer(folder)
        if recipe.target.chat_template is not None:
            tokenizer.chat_template = read_chat_template(recipe.target.chat_template)
        settings = token_settings(recipe, tokenizer, whose)
        directory = Path(data.cache_dir) / f"tokens-{of_settings(settings)}"
        if directory.is_dir():
            cache = TokenCache.open(directory)
            return len(cache), cache.stats["tokens"], sum(Storage.of(data).counts(cache))
    return len(split_holdout(data)[0].conversations) * _samples(recipe), None, None


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
        ("checkpoints", f"{format_bytes(plan.checkpoint_bytes)} at {train.keep} kept"),
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
            kind += f", layers {', '.join(map(str, layers))} of the target"
        if head.window is not None:
            kind += f", a window of {head.window}"
        if head.draft_vocab is not None:
            kind += f", {head.draft_vocab} tokens drafted among"
        wanted = eagle3_config if head.fusion == "layers" else head_config
        target, drafted = recipe.target.dtype, recipe.eval.head_dtype
        drafted = target if drafted == AUTO else drafted
        costs = compared(wanted(recipe, plan.target), BYTES[drafted], BYTES[target])
    size = format_parameters(plan.drafter_parameters)
    line = f"{kind}: {size} = {plan.head_layers:.2f} decoder layers of the target"
    return [("head", line), *((name, f"reads {cost}") for name, cost in costs.items())]


def _steps_line(plan: Plan, recipe: Recipe, ranks: int) -> str:
    train = recipe.train
    steps = f"{plan.at_most}{plan.steps:,}" if plan.steps else "known with the rows"
    if train.steps is not None:
        steps = f"{train.steps:,}"
    rows = f"{train.batch_size} rows = {train.accumulation} x {ranks} x {plan.rows_per_forward}"
    return f"{steps} x {rows} (accumulation x processes x rows per forward)"


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
    if storage.layers:
        cache += f", {len(storage.layers)} layers beside the feature"
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


def measured_flops(device: torch.device, dtype: torch.dtype, width: int = 1024) -> float:
    """Return the FLOP/s of a square matmul on this device, from a tenth of a second of them."""
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    matrix @ matrix
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.1:
        (matrix @ matrix)[0, 0].item()  # waits for the device
        count += 1
    return count * 2.0 * width**3 / (time.perf_counter() - began)


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


def _bounded(recipe: Recipe, rows: int | None, tokens: int | None) -> tuple[int | None, int | None]:
    """Return rows and tokens; where these are not known, the most that a recipe lets them be."""
    if rows is None and recipe.data.limit is not None:
        rows = recipe.data.limit * _samples(recipe)  # of what the holdout has left
    if rows is not None and tokens is None:
        tokens = rows * recipe.data.max_length
    return rows, tokens


def _samples(recipe: Recipe) -> int:
    return recipe.data.samples if recipe.data.answers == "target" else 1


def _head_parameters(recipe: Recipe, shape: TargetShape) -> int:
    with torch.device("meta"):
        if recipe.medusa.given:
            head = MedusaHeads(medusa_config(recipe, shape))
        else:
            head = any_head(recipe, shape)
    return sum(p.numel() for p in head.parameters())


def _positions(recipe: Recipe, rows: int) -> int:
    """Tokens that a forward over `rows` rows of a recipe holds at most."""
    train, longest = recipe.train, recipe.data.max_length
    if train.alignments == "all" and not (recipe.medusa.given or recipe.student.given):
        longest *= recipe.head.block_size
    return min(rows * longest, max(train.forward_tokens or rows * longest, longest))


def head_memory(recipe: Recipe, shape: TargetShape, parameters: int, positions: int) -> int:
    """Estimate the bytes one process holds while training a head, `positions` to a forward."""
    width, data, size = shape.hidden_size, recipe.data, BYTES[recipe.train.precision]
    # Whoever measures while it trains keeps all of the target.
    whole = data.features == "online" or recipe.train.eval_every is not None
    target = shape.parameters if whole else shape.embedding_parameters
    # As read, float32, noise, revised; the other forwards of this step and the next wait as read.
    waiting = (2 * recipe.train.accumulation - 1) * BYTES.get(data.feature_dtype, 4)
    features = positions * Storage.of(data).parts * width * (4 * 4 + waiting)
    casts = size if size < 4 else 0  # autocast keeps its copies of weights for backward
    weights = (BYTES_PER_PARAMETER + casts) * parameters + BYTES[recipe.target.dtype] * target
    held = weights + features + LOGITS_BYTES
    if recipe.medusa.given:
        # Kept for backward per position: of every block its input, W x + b and SiLU; and the slopes
        # of the lm_heads, which are taken with the loss.
        floats = recipe.medusa.heads * recipe.medusa.layers * 3 * width
        slopes = 4 * parameters if recipe.medusa.lm_heads == "own" else 0
        return held + slopes + positions * floats * 4
    head, passes = recipe.head, recipe.train.rollout
    if head.fusion == "layers":  # the slope of its lm_head is taken with the loss
        held += 4 * (head.draft_vocab or shape.vocab_size) * width
    # Bytes kept for backward per position. Inputs 2H, and in float32 what the fusion keeps; of a
    # coupled slot 8H, of one that reads the newest 2H.
    slots = 8 * (head.coupling != "none") + 2 * (head.reads != "own")
    fused = ((2 + slots) * size + FUSIONS.get(head.fusion, Apart).KEPT * 4) * width
    # Per decoder layer 6H of norms and sums in float32, 6H more and the MLP's 4I; keys and values.
    inner = head.intermediate or shape.intermediate_size
    layer, seen = 6 * width * 4 + (6 * width + 4 * inner) * size, 2 * width * size
    # A pass has keys and values of all before it once more.
    layers = passes * layer + passes * (passes - 1) // 2 * seen
    if recipe.train.checkpointing:  # one pass at a time, and keys and values of all
        layers = layer + 2 * passes * seen
    joined = 2 * len(data.feature_layers) * width * 4
    masks = passes * (passes + 1) // 2 * data.max_length * size
    return held + positions * (passes * fused + head.layers * layers + joined + masks)
