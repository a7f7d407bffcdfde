"""Distillation of a student: what one micro-batch does in training.

`plan` lets the student write its share of the rows (on-policy data); `loss` compares its
distributions with the target's after every supervised position. The target's come from cached
features, or from running it on the rows.

Shapes: B rows, T tokens, N supervised positions, H hidden.
"""

import torch
from torch import Tensor, nn

from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.families.finish import finish_of
from specdraft.models.student import Student
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.run import Sums
from specdraft.train.objectives.chunked import Teacher
from specdraft.train.objectives.divergences import Mixture, objective_sums
from specdraft.train.objectives.on_policy import OnPolicy
from specdraft.train.objectives.text import TextBatch, collate_text


class Distillation:
    """The `Objective` of a student.

    target: runs on rows that bring no features; its embeddings are enough where they do.
    """

    folder, copies = "student", 1
    collate = staticmethod(collate_text)

    def __init__(self, recipe: Recipe, student: Student, target: Target | TargetEmbeddings):
        self.mixture, self.target = Mixture.of(recipe.distill), target
        self.finish = finish_of(student.model)
        self.compares = recipe.distill.divergences
        self.on_policy = OnPolicy(recipe, student) if recipe.distill.on_policy else None

    def plan(self, model: nn.Module, batch: TextBatch, progress: float) -> tuple:
        """Return the rows as they are learned from, and the positions that carry loss [B, L]."""
        if self.on_policy:
            batch = self.on_policy(batch)
        return batch, batch.supervised

    def loss(self, model: nn.Module, _: TextBatch, batch: TextBatch, counted: Tensor) -> tuple:
        positions = counted.nonzero(as_tuple=True)  # N positions
        tokens = batch.tokens[:, 1:][positions]
        teacher = self._teacher(batch, positions) if self.compares else None

        def loss(hidden: Tensor, lm_head: Tensor):
            return objective_sums(
                hidden, lm_head, tokens, self.mixture, teacher, finish=self.finish
            )

        sums = model(batch.tokens[:, :-1], positions, loss, **batch.encoder_inputs)
        written = torch.tensor((batch.written, len(batch.lengths)), device=counted.device)
        return sums.total, {
            "loss": sums.total.detach(),
            **sums.parts,
            "agreed": sums.agreed,
            "counted": counted.sum(),
            "written": written[0],
            "rows": written[1],
        }

    def _teacher(self, batch: TextBatch, positions: tuple) -> Teacher:
        """The target, with its features [N, H] at the positions."""
        features = batch.features
        if features is None:
            # Padding of tokens is seen by no one.
            features = self.target.features(batch.tokens, **batch.encoder_inputs)
        return Teacher(features[positions], self.target.lm_head_weight, self.target.finish)

    def report(self, sums: Sums) -> dict[str, float | list]:
        counted = sums["counted"].clamp(min=1)
        written = {"on_policy": float(sums["written"] / sums["rows"])} if self.on_policy else {}
        return {
            **{name: float(sums[name] / counted) for name in ("loss", *self.mixture.weights())},
            "accuracy": [float(sums["agreed"] / counted)],  # of the target's own greedy choices
            **written,
        }
