"""Training-time test: what one micro-batch of an EAGLE-3 head does in training.

    L = sum_r gamma^r * sum_i (alpha * KL(p_i || q_ri) + (1 - alpha) * CE(t_{i+2}, q_ri))

EAGLE-3 (arXiv 2503.01840, section 3.2): every pass r reads what the pass before has made, as
drafting does; tokens alone are asked for, never features, and all of it through the head's own
lm_head. It is divided by sum_r gamma^r; p is the target's distribution over the tokens drafted
among. (gamma 0.8 and alpha 1 are those of published trainers; LK may take a part of KL, losses.py.)

Shapes: R passes, B rows, L input positions, N supervised positions, H hidden.
"""

import torch
from torch import Tensor, nn

from specdraft.models.eagle3 import Eagle3Config
from specdraft.models.embeddings import DraftVocabulary, TargetEmbeddings
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.batches import Key
from specdraft.train.fit.run import Sums
from specdraft.train.objectives.chunked import Teacher, chunked_loss
from specdraft.train.objectives.head_batch import HeadBatch, collate
from specdraft.train.objectives.losses import DistilledTokens, chunk_size


class TrainingTimeTest:
    """The `Objective` of an EAGLE-3 head.

    target: its `embed(ids)` and `lm_head_weight` [V, H]. draft_ids: the tokens that the head drafts
    among, None: all.
    """

    folder, copies = "eagle3", 1

    def __init__(
        self,
        recipe: Recipe,
        target: TargetEmbeddings | Target,
        config: Eagle3Config,
        draft_ids: Tensor | None = None,
    ):
        loss = recipe.loss
        self.recipe, self.target, self.hidden_size = recipe, target, config.hidden_size
        self.vocabulary = DraftVocabulary(draft_ids, target)
        self.formula = DistilledTokens(loss.soft_weight, loss.lk_weight, draft_ids is not None)
        self.by_pass = [loss.depth_decay**number for number in range(recipe.train.rollout)]

    def collate(self, rows: list[dict], keys: list[Key]) -> HeadBatch:
        """Pad rows {"input_ids" [T], "loss_mask" [T], "features" [T, (1 + n) * H]}."""
        return collate(rows, keys, block_size=1)

    def plan(self, head: nn.Module, batch: HeadBatch, progress: float) -> tuple[None, Tensor]:
        """Nothing is decided; return the positions that carry loss [B, L]."""
        return None, batch.supervised

    def loss(self, head: nn.Module, batch: HeadBatch, plan: None, counted: Tensor) -> tuple:
        rows, positions = counted.nonzero(as_tuple=True)  # N positions
        tokens = self.vocabulary.places(batch.tokens[rows, positions + 2])
        features = batch.features[rows, positions + 1, : self.hidden_size]
        frozen = self.vocabulary.lm_head

        def loss(answers: Tensor, lm_head: Tensor) -> tuple:
            return chunked_loss(
                answers[:, rows, positions],
                lm_head,
                tokens,
                Teacher(features, frozen, self.target.finish),
                self.formula,
                size=chunk_size(frozen, len(answers)),
                dtype=frozen.dtype,  # the product as the target does it
                counts=features.new_tensor(self.by_pass, dtype=torch.float32)[:, None],
            )

        ahead = self.target.embed(batch.tokens[:, 1:]).float()
        inputs = (ahead, batch.features[:, :-1].float(), batch.blocks, batch.valid)
        total, parts, correct = head(*inputs, passes=len(self.by_pass), loss=loss)
        total = self.recipe.loss.distill_weight * total / sum(self.by_pass)
        return total, {
            "loss": total.detach(),
            **{name: part.sum() / len(part) for name, part in parts.items()},
            "correct": correct.sum(1),  # [R]
            "counted": counted.sum(),
        }

    @staticmethod
    def report(sums: Sums) -> dict[str, float | list]:
        counted = sums["counted"].clamp(min=1)
        first, *later = (sums["correct"] / counted).tolist()
        return {
            **{name: float(sums[name] / counted) for name in ("loss", "soft", "hard")},
            "accuracy": [first],
            "rollout_accuracy": [[accuracy] for accuracy in later],
        }
