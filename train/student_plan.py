"""What a student will be and cost, before there is one: its part of the plan."""

from dataclasses import dataclass

from specdraft.models.shapes import (
    BYTES,
    BYTES_PER_PARAMETER,
    LOGITS_BYTES,
    TargetShape,
    student_shape,
)
from specdraft.recipes.schema import Recipe
from specdraft.train.objectives.divergences import Mixture


@dataclass(frozen=True)
class StudentPlan:
    """Shape and use of a recipe's student; bytes and parameters."""

    recipe: Recipe
    target: TargetShape
    shape: TargetShape

    @classmethod
    def of(cls, recipe: Recipe, target: TargetShape) -> "StudentPlan | None":
        """Plan the recipe's student; None where it trains a head."""
        if not recipe.student.given:
            return None
        return cls(recipe, target, student_shape(recipe, target))

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        section, shape = self.recipe.student, self.shape
        if section.training == "full":
            frozen = shape.embedding_parameters if section.embeddings == "shared" else 0
            return shape.parameters - frozen
        if section.training == "none":
            return 0
        sizes = shape.linear_layers
        adapted = (sum(sizes[name]) for name in section.lora_targets if name in sizes)
        return section.lora_rank * shape.layers * sum(adapted)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights that are not trained: of a pretrained student in the target's dtype,
        else in float32."""
        section = self.recipe.student
        dtype = self.recipe.target.dtype if section.model is not None else "float32"
        own = 0 if section.training == "lora" else self.trained  # adapters are none of its own
        return BYTES[dtype] * (self.shape.parameters - own)

    @property
    def features(self) -> bool:
        """Whether a feature cache is made."""
        distill = self.recipe.distill
        cached = self.recipe.data.features == "cached"
        return self.trained > 0 and distill.divergences and not distill.on_policy and cached

    @property
    def runs_target(self) -> bool:
        """Whether the target itself runs in training."""
        return self.recipe.distill.divergences and not self.features

    def memory(self, positions: int) -> int:
        """Estimate the bytes one process holds while training on so many tokens at a time."""
        recipe, shape, dtype = self.recipe, self.shape, BYTES[self.recipe.target.dtype]
        # All of the target but where features stand in for it and nobody measures with it.
        whole = not self.features or recipe.train.eval_every is not None
        held = self.target.parameters if whole else self.target.embedding_parameters
        # Kept for backward per position: per decoder layer about 12H and the MLP's 4I.
        layer = 12 * shape.hidden_size + 4 * shape.intermediate_size
        floats = shape.layers * layer
        if recipe.train.checkpointing:  # one layer at a time, and the input of each
            floats = shape.layers * shape.hidden_size + layer
        activations = positions * floats * BYTES[recipe.train.precision]
        slopes = 4 * shape.vocab_size * shape.hidden_size  # of lm_head, taken with the loss
        weights = BYTES_PER_PARAMETER * self.trained + self.frozen_bytes + dtype * held
        return weights + activations + slopes + LOGITS_BYTES

    def lines(self) -> list[tuple[str, str]]:
        """Return what is trained and on what, as (what, how much)."""
        section, shape, distill = self.recipe.student, self.shape, self.recipe.distill
        origin = section.model or "a config of its own"
        if section.keep_layers is not None:
            origin = f"layers {', '.join(map(str, section.keep_layers))} of the target"
        student = f"{origin}: {shape.parameters / 1e6:.1f} M parameters, {shape.layers} layers x "
        student += f"{shape.hidden_size} = {shape.parameters / self.target.parameters:.1%} of the "
        student += f"target; trained: {self.trained / 1e6:.1f} M ({section.training})"
        if section.training == "none":
            return [("student", student)]
        weights = Mixture.of(distill).weights()
        objective = " + ".join(f"{weight:g} x {name}" for name, weight in weights.items())
        writers = "the target" if self.recipe.data.answers == "target" else "the data set"
        text = f"answers of {writers}"
        if distill.on_policy:
            text = f"{distill.on_policy:.0%} answers of the student, else {text}"
        return [("student", student), ("objective", f"{objective}, on {text}")]
