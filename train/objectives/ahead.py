"""Tokens further and further ahead: what one micro-batch of Medusa heads does in training.

    L = sum_h 0.8^h * ((1 - alpha) * CE(t_{i+1+h}, q_h) + alpha * KL(p(. | t_<=i+h) || q_h))

(Medusa, arXiv 2401.10774, section 2.2.1, with alpha 0), summed over positions i and
divided by the count of those that any head answers. A head counts where the mask has its token.

Shapes: D heads, B rows, T tokens, L = T - 1 positions, N supervised positions, H hidden.
"""

import torch
from torch import Tensor, nn

from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.run import Sums
from specdraft.train.objectives.chunked import Teacher
from specdraft.train.objectives.divergences import Mixture, ObjectiveSums, objective_sums
from specdraft.train.objectives.text import TextBatch, collate_text

DECAY = 0.8  # head h counts DECAY^h: the further ahead, the less there is to learn


class TokensAhead:
    """The `Objective` of Medusa heads.

    target: its `lm_head_weight` [V, H].
    """

    folder, copies = "medusa", 1
    collate = staticmethod(collate_text)

    def __init__(self, recipe: Recipe, target: TargetEmbeddings | Target):
        section = recipe.medusa
        self.count, self.target = section.heads, target
        soft = section.soft_weight
        self.mixture = Mixture(forward_kl=soft, cross_entropy=1.0 - soft)

    def plan(self, model: nn.Module, batch: TextBatch, progress: float) -> tuple[Tensor, Tensor]:
        """Return where each head has an answer [D, B, L], and where any of them has [B, L]."""
        # Position i + h of the mask is about t_(i+h+1), the token that head h drafts at i.
        answered = torch.stack(
            [nn.functional.pad(batch.supervised, (0, h))[:, h:] for h in range(1, self.count + 1)]
        )
        return answered, answered.any(0)

    def loss(self, model: nn.Module, batch: TextBatch, answered: Tensor, counted: Tensor) -> tuple:
        rows, positions = counted.nonzero(as_tuple=True)  # N positions
        answered = answered[:, rows, positions]  # [D, N]

        def loss(hidden: Tensor, lm_heads: Tensor | None) -> list[ObjectiveSums]:
            shared = [self.target.lm_head_weight] * self.count
            weights = shared if lm_heads is None else lm_heads.unbind()
            return [
                self._of_head(batch, hidden[n, kept], weight, rows[kept], positions[kept] + n + 1)
                for n, (weight, kept) in enumerate(zip(weights, answered, strict=True))
            ]

        sums = model(batch.features[rows, positions].float(), loss)
        total = sum(DECAY**h * part.total for h, part in enumerate(sums, start=1))
        names = self.mixture.weights()
        return total, {
            "loss": total.detach(),
            **{name: torch.stack([part.parts[name] for part in sums]) for name in names},  # [D]
            "agreed": torch.stack([part.agreed for part in sums]),  # [D]
            "answered": answered.sum(1),  # [D]
            "counted": counted.sum(),
        }

    def _of_head(
        self, batch: TextBatch, hidden: Tensor, lm_head: Tensor, rows: Tensor, before: Tensor
    ) -> ObjectiveSums:
        """The loss of one head; `before` is the position before the token that it drafts."""
        teacher, finish = None, self.target.finish
        if "forward_kl" in self.mixture.weights():
            teacher = Teacher(batch.features[rows, before], self.target.lm_head_weight, finish)
        tokens = batch.tokens[rows, before + 1]
        return objective_sums(hidden, lm_head, tokens, self.mixture, teacher, finish=finish)

    def report(self, sums: Sums) -> dict[str, float | list]:
        answered = sums["answered"].clamp(min=1)
        return {
            "loss": float(sums["loss"] / sums["counted"].clamp(min=1)),
            **{name: (sums[name] / answered).tolist() for name in self.mixture.weights()},
            "accuracy": (sums["agreed"] / answered).tolist(),  # by head
        }
