"""Coupled Sequential Glancing Distillation: what one micro-batch does in training.

Falcon (AAAI 2025), in two passes. `plan` runs the head without gradient, counts where it is wrong
and chooses the input pairs to reveal; `loss` runs it with gradient on the revised inputs. Counts
come first and losses are sums, so the caller divides by the count of the whole optimiser step.

Shapes: R passes of a rollout, B rows, L input positions, H hidden, V vocabulary, k block size.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from specdraft.models.embeddings import DraftVocabulary, TargetEmbeddings
from specdraft.models.falcon import FalconConfig
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.batches import Key
from specdraft.train.fit.run import Sums
from specdraft.train.objectives.depth import Drafts
from specdraft.train.objectives.glance import choose_runs, glancing_ratio, reveal, wrong_per_row
from specdraft.train.objectives.head_batch import HeadBatch, collate
from specdraft.train.objectives.losses import head_loss


class CoupledGlancing:
    """The `Objective` of a Falcon head.

    target: its `embed(ids)` and `lm_head_weight` [V, H]. draft_ids: the tokens that the head drafts
    among, None: all; the others have no rank and no CE, and p is what it is among these.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetEmbeddings | Target,
        config: FalconConfig,
        draft_ids: Tensor | None = None,
    ):
        self.recipe, self.target, self.folder = recipe, target, recipe.head.kind
        self.vocabulary = DraftVocabulary(draft_ids, target)
        self.feature_scale, self.block_size = config.feature_scale, config.block_size
        self.hidden_size = config.hidden_size
        self.copies = self.block_size if recipe.train.alignments == "all" else 1

    def collate(self, rows: list[dict], keys: list[Key]) -> HeadBatch:
        """Pad rows {"input_ids" [T], "loss_mask" [T], "features" [T, H]} to a micro-batch."""
        return collate(rows, keys, self.block_size, all_alignments=self.copies > 1)

    def plan(self, head: nn.Module, batch: HeadBatch, progress: float) -> tuple[Tensor, Tensor]:
        """Return the revealed positions [B, L] and the positions that carry loss [B, L].

        progress is the share of the training that lies behind, 0..1.
        """
        glance, revealed = self.recipe.glance, torch.zeros_like(batch.supervised)
        ratio = glancing_ratio(glance.start, glance.end, progress)
        if glance.enabled and ratio > 0 and batch.block_size > 1:
            revealed = self._glance(head, batch, ratio)
        if glance.supervise_revealed:
            return revealed, batch.supervised
        return revealed, batch.supervised & ~revealed

    @torch.no_grad()
    def _glance(self, head: nn.Module, batch: HeadBatch, ratio: float) -> Tensor:
        ahead, features = self._inputs(batch)
        predicted = head(ahead, features, batch.blocks, batch.valid)[0]  # [B, L, H]
        answers = batch.tokens.roll(-batch.block_size - 1, dims=1)[:, :-1]
        answers, lm_head = self.vocabulary.places(answers), self.vocabulary.lm_head
        wrong = wrong_per_row(predicted, lm_head, answers, batch.supervised)
        revealed = torch.zeros_like(batch.supervised, device="cpu")
        blocks, supervised = batch.blocks.cpu(), batch.supervised.cpu()
        for row, (distance, generator) in enumerate(
            zip(wrong.tolist(), batch.generators("glance"), strict=True)
        ):
            inside = slice(0, batch.lengths[row] - 1)
            revealed[row, inside] = choose_runs(
                blocks[row, inside], supervised[row, inside], round(ratio * distance), generator
            )
        return revealed.to(batch.supervised.device)

    def loss(self, head: nn.Module, batch: HeadBatch, revealed: Tensor, counted: Tensor) -> tuple:
        loss, k = self.recipe.loss, batch.block_size
        predicted = self._predicted(head, batch, revealed)
        rows, positions = counted.nonzero(as_tuple=True)  # N positions
        tokens = self.vocabulary.places(batch.tokens[rows, positions + k + 1])
        offsets = batch.offsets[rows, positions]
        drafts = Drafts(rows, positions, offsets, tokens >= 0, k, counted.shape)
        sums = head_loss(
            predicted[:, rows, positions],
            batch.features[rows, positions + k, : self.hidden_size],
            tokens,
            self.vocabulary.lm_head,
            self.target.finish,
            feature_scale=self.feature_scale,
            feature_weight=loss.feature_weight,
            distill_weight=loss.distill_weight,
            soft_weight=loss.soft_weight,
            lk_weight=loss.lk_weight,
            weigh=drafts.weighing(loss),
            partial=self.vocabulary.ids is not None,
        )
        answered = one_hot(offsets, k).to(torch.float32)  # [N, k]
        return sums.total, {
            "loss": sums.total.detach(),
            "feature": sums.feature,
            "soft": sums.soft,
            "hard": sums.hard,
            "correct": sums.correct.to(torch.float32) @ answered,  # [R, k]
            "answered": answered.sum(0),  # [k]
            "revealed": revealed.sum(),
            "supervised": batch.supervised.sum(),
            "counted": counted.sum(),
        }

    def _predicted(self, head: nn.Module, batch: HeadBatch, revealed: Tensor) -> Tensor:
        """Run the head on the revised inputs: [R, B, L, H]."""
        given = self._inputs(batch)
        revised = reveal(*given, revealed, batch.block_size)
        isolated = self.recipe.glance.isolated
        return head(
            *(given if isolated else revised),
            batch.blocks,
            batch.valid,
            keep=None if isolated else revealed,
            passes=self.recipe.train.rollout,
            revised=(*revised, revealed) if isolated and revealed.any() else None,
            drafted=given[0],
        )

    def _inputs(self, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        # Noise stands for the error of the predicted features that drafting feeds back.
        amplitude = self.recipe.loss.feature_noise * self.feature_scale
        features = batch.features[:, :-1].float()
        if amplitude > 0:
            features = features + batch.noise(amplitude, self.hidden_size)
        return self.target.embed(batch.tokens[:, 1:]).float(), features

    @staticmethod
    def report(sums: Sums) -> dict[str, float | list]:
        counted = sums["counted"].clamp(min=1)
        accuracy = sums["correct"] / sums["answered"].clamp(min=1)
        return {
            **{name: float(sums[name] / counted) for name in ("loss", "feature", "soft", "hard")},
            "accuracy": accuracy[0].tolist(),  # by block position, of the first pass
            "rollout_accuracy": accuracy[1:].tolist(),
            "glanced": float(sums["revealed"] / sums["supervised"].clamp(min=1)),
        }
