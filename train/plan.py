"""What a run would do and cost, before it does anything; plan_lines.py prints it.

Nothing is downloaded but configs, and no weights are made: a head is counted on the meta device.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from specdraft.data.chat import split_holdout
from specdraft.data.fingerprint import of_settings
from specdraft.data.sources import is_here
from specdraft.data.store.storage import Storage, feature_bytes
from specdraft.data.store.token_builder import token_settings
from specdraft.data.store.tokens import TokenCache
from specdraft.data.template import Template
from specdraft.models.eagle3 import Apart
from specdraft.models.medusa import MedusaHeads
from specdraft.models.sar.fusion import FUSIONS
from specdraft.models.shapes import (
    BYTES,
    BYTES_PER_PARAMETER,
    LOGITS_BYTES,
    TargetShape,
    any_head,
    medusa_config,
    target_shape,
)
from specdraft.models.target_files import load_tokenizer, model_folder, read_chat_template
from specdraft.models.weights.identity import identity_of
from specdraft.recipes.schema import Recipe
from specdraft.recipes.sections.target import BUNDLED
from specdraft.train.fit.batches import rows_per_forward
from specdraft.train.fit.schedules import total_steps
from specdraft.train.student_plan import StudentPlan


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

    All from a finished token cache; of sources on this machine a bound of the rows. Raises
    DataError for chats that a target here has no template for.
    """
    name, data, tokenizer = recipe.target.model, recipe.data, None
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
    conversations = split_holdout(data)[0].conversations
    chats = data.format != "seq2seq" and any(one.text is None for one in conversations)
    if tokenizer and chats:
        Template(tokenizer)
    return len(conversations) * _samples(recipe), None, None


def measured_flops(device: torch.device, dtype: torch.dtype, width: int = 1024) -> float:
    """Return the FLOP/s of a square matmul on this device, from a tenth of a second of them."""
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    matrix @ matrix
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.1:
        (matrix @ matrix)[0, 0].item()  # waits for the device
        count += 1
    return count * 2.0 * width**3 / (time.perf_counter() - began)


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
