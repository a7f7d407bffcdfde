"""What a run has, at the size of a larger model: what it costs is measured with real drafts.

Target and drafters become those of a shape (models/enlarged/), a student that of the recipes for
such targets. What they say and draft stays.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import TypeVar

import torch

from specdraft.eval.costing.room import bytes_of, check_room, row_bytes
from specdraft.eval.costing.shapes import STUDENT, Shape
from specdraft.eval.measure.measurement import Entrant
from specdraft.eval.methods.trained import Trained
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.embeddings import DTYPES
from specdraft.models.enlarged.heads import (
    enlarged_falcon_config,
    enlarged_head,
    enlarged_medusa,
    enlarged_medusa_config,
    enlarged_table,
)
from specdraft.models.enlarged.target import ENLARGED, enlarged_config, enlarged_target
from specdraft.models.falcon import FalconHead
from specdraft.models.medusa import MedusaHeads
from specdraft.models.shapes import BYTES, TargetShape
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import say

E = TypeVar("E", bound=Entrant)


def enlarge(
    shape: Shape, recipe: Recipe, target: Target, trained: Trained
) -> tuple[Target, Trained]:
    """Return a recipe's target, and what was trained for it, at the sizes of a shape.

    Raises RecipeError as `enlarge_all`.
    """
    large, (drafters,) = enlarge_all(shape, recipe, target, [trained])
    return large, drafters


def enlarge_entrants(shape: Shape, entrants: Sequence[E], target: Target) -> tuple[Target, list[E]]:
    """Return the target of some entrants, and each of them with its drafter, at the sizes of a
    shape. Raises RecipeError as `enlarge_all`."""
    every = [one.trained for one in entrants]
    large, drafters = enlarge_all(shape, entrants[0].recipe, target, every)
    enlarged = zip(entrants, drafters, strict=True)
    return large, [replace(one, trained=trained) for one, trained in enlarged]


def enlarge_all(
    shape: Shape, recipe: Recipe, target: Target, every: Sequence[Trained]
) -> tuple[Target, list[Trained]]:
    """Return a recipe's target, and all that was trained for it, at the sizes of a shape.

    Raises RecipeError, before anything is allocated, for what cannot be enlarged to it, and where
    all of it together has no room.
    """
    sizes, name = sizes_of(shape), f"{target.name}{ENLARGED}{shape.name}"
    own = TargetShape.of(enlarged_config(target, sizes, name))
    students = [one.student and student_sizes(one.student, own) for one in every]
    needed = own.parameters * BYTES[recipe.target.dtype]
    needed += sum(map(_bytes_of_drafters, every, repeat(own), students))
    prepacked = PrepackedWeights(recipe.target.prepack_gib * 2**30)
    copies = min(needed, int(prepacked.most)) if target.device.type == "cpu" else 0
    cache = row_bytes(own, target.context or 2048, recipe.target.dtype)
    check_room(f"{name}, {recipe.target.dtype}", needed + copies + cache, target.device)
    say(f"{name}: {own.parameters / 1e9:.2f} billion parameters on {target.device}")
    how = DTYPES[recipe.target.dtype], target.device
    large = enlarged_target(target, sizes, name, *how, prepacked)
    return large, [*map(_drafters, every, repeat(large), students)]


def sizes_of(shape: Shape) -> TargetShape:
    """The sizes of a shape. Raises RecipeError where it is no Llama's."""
    config = shape.config
    sizes = TargetShape.of(config)
    if config.model_type != "llama" or config.head_dim * sizes.heads != sizes.hidden_size:
        raise RecipeError(
            f"--shape {shape.name}: a {config.model_type}; models are enlarged to a Llama with "
            "head_dim = hidden_size / heads; give the config.json of one"
        )
    return sizes


def student_sizes(student: Target, target: TargetShape) -> TargetShape:
    """The sizes of a student beside a target: those of the recipes', with as many layers at least
    as it has."""
    layers = max(STUDENT.layers, student.config.num_hidden_layers)
    shape = replace(STUDENT, layers=layers, vocab_size=target.vocab_size)
    return TargetShape.of(enlarged_config(student, shape, "the student"))


def _bytes_of_drafters(trained: Trained, shape: TargetShape, student: TargetShape | None) -> int:
    """Bytes of all that drafts, once enlarged; shape: of the target, student: of a student. Raises
    RecipeError for what cannot be enlarged."""
    if isinstance(trained.head, Eagle3Head):
        raise RecipeError("--shape: an EAGLE-3 head cannot be enlarged; leave its methods out")
    if any(one is not trained.student for one in trained.cascade):
        raise RecipeError("--shape: cascade.students cannot be enlarged; leave their methods out")
    needed = 0
    with torch.device("meta"):
        if trained.head:
            needed += bytes_of(FalconHead(enlarged_falcon_config(trained.head.config, shape, {})))
        if trained.medusa:
            config = enlarged_medusa_config(trained.medusa.config, shape, {})
            needed += bytes_of(MedusaHeads(config))
    if student:
        needed += student.parameters * trained.student.embedding.weight.element_size()
    return needed


def _drafters(trained: Trained, target: Target, shape: TargetShape | None) -> Trained:
    """Enlarge all that was trained for an enlarged target; shape: of the student."""
    student = trained.student
    if student:
        how = student.dtype, target.device
        student = enlarged_target(student, shape, f"{student.name}, enlarged", *how)
    return Trained(
        head=trained.head and enlarged_head(trained.head, target),
        table=trained.table and enlarged_table(trained.table, target.vocab_size),
        student=student,
        cascade=(student,) if trained.cascade else (),
        medusa=trained.medusa and enlarged_medusa(trained.medusa, target),
    )
