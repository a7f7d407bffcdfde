"""Tokens further and further ahead: what one micro-batch of Medusa heads does in training.

    L = sum_h 0.8^h * ((1 - alpha) * CE(t_{i+1+h}, q_h) + alpha * KL(p(. | t_<=i+h) || q_h))

(Medusa, arXiv 2401.10774, section 2.2.1, with alpha 0), summed over positions i and
divided by the count of those that any head answers. A head counts where the mask has its token.

Shapes: D heads, B rows, T tokens, L = T - 1 positions, N tokens that are answered, H hidden.
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
        """Return the tokens that heads answer [B, L], and where any of them answers one [B, L]."""
        answers = batch.supervised.clone()
        answers[:, 0] = False  # the first head reads what is before the last token known
        ahead = range(1, self.count + 1)  # head h drafts at i what is about position i + h
        drafted = [nn.functional.pad(answers, (0, h))[:, h:] for h in ahead]
        return answers, torch.stack(drafted).any(0)

    def loss(self, model: nn.Module, batch: TextBatch, answers: Tensor, counted: Tensor) -> tuple:
        # N tokens, each drafted by every head from a feature further before it: what the target
        # says of a token is the same for all.
        rows, last = answers.nonzero(as_tuple=True)
        ahead = torch.arange(1, self.count + 1, device=last.device)[:, None]
        read = last - ahead  # [D, N]
        answered = read >= 0
        counts = answered * DECAY**ahead
        features = batch.features[rows, read.clamp(min=0)].float()
        tokens, teacher = batch.tokens[rows, last + 1], None
        own, finish = self.target.lm_head_weight, self.target.finish
        if "forward_kl" in self.mixture.weights():
            teacher = Teacher(batch.features[rows, last], own, finish)

        def loss(hidden: Tensor, lm_heads: Tensor | None) -> ObjectiveSums:
            heads = own if lm_heads is None else lm_heads
            options = {"counts": counts, "finish": finish}
            return objective_sums(hidden, heads, tokens, self.mixture, teacher, **options)

        sums = model(features, loss)
        return sums.total, {
            "loss": sums.total.detach(),
            **sums.parts,  # [D]
            "agreed": sums.agreed,  # [D]
            "answered": answered.sum(1),  # [D]
            "counted": counted.sum(),
        }

    def report(self, sums: Sums) -> dict[str, float | list]:
        answered = sums["answered"].clamp(min=1)
        return {
            "loss": float(sums["loss"] / sums["counted"].clamp(min=1)),
            **{name: (sums[name] / answered).tolist() for name in self.mixture.weights()},
            "accuracy": (sums["agreed"] / answered).tolist(),  # by head
        }
