"""On-policy data: the student answers, and learns from what the target thinks of it.

A share lambda of the rows is cut where one of its answers begins, and the student, as it is at this
step, writes on from there by sampling (GKD, arXiv 2306.13649, algorithm 1; DistillSpec's on-policy
data). Which rows, where they are cut and how they are sampled follows from their place in training,
so a run that is resumed or cut into other micro-batches sees the same text.
"""

from functools import cached_property

import torch
from torch import Tensor

from specdraft.data.answers import Ask
from specdraft.eval.generation.answers import answer
from specdraft.models.student import Student
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.batches import Key, Rows, keyed_generator
from specdraft.train.objectives.text import TextBatch, collate_text

LOOKED_AT = 64  # rows of which one must have a prompt


class OnPolicy:
    """Rewrites rows of a micro-batch with answers of the student."""

    def __init__(self, recipe: Recipe, student: Student):
        self.section, self.max_length = recipe.distill, recipe.data.max_length
        self.student = student

    @cached_property
    def writer(self) -> Target:
        """The student as the decoder takes it; made once the student is on its device."""
        return self.student.as_target()

    def __call__(self, batch: TextBatch) -> TextBatch:
        """Return the batch with some rows rewritten; without features, which are another text's."""
        rows = [batch.row(number) for number in range(len(batch.lengths))]
        asks = [self._ask(row, key) for row, key in zip(rows, batch.keys, strict=True)]
        chosen = [number for number, ask in enumerate(asks) if ask]
        if chosen:
            for index, said in answer(self.writer, len(chosen), [asks[n] for n in chosen]):
                number = chosen[index]
                rows[number] = _row(asks[number], said.tokens)
        return collate_text(rows, batch.keys, written=len(chosen)).to(batch.tokens.device)

    def _ask(self, row: dict[str, Tensor], key: Key) -> Ask | None:
        """Return what the student is asked to continue; None where the row stays as it is."""
        generator = keyed_generator(*key, "policy")
        chance, place = torch.rand(2, generator=generator).tolist()
        starts = [n for n in answer_starts(row["loss_mask"]) if n < self.max_length]
        if chance >= self.section.on_policy or not starts:
            return None
        start = starts[int(place * len(starts))]
        return Ask(
            prompt_ids=row["input_ids"][:start].tolist(),
            max_new_tokens=min(self.section.max_new_tokens, self.max_length - start),
            temperature=self.section.sample_temperature,
            seed=int(torch.randint(1 << 31, (), generator=generator)),
            source=row["source_ids"].tolist() if "source_ids" in row else [],
        )


def answer_starts(mask: Tensor) -> list[int]:
    """Return where answers begin in a loss mask [T]; what is before each is a prompt."""
    mask = mask.bool()
    return ((mask[1:] & ~mask[:-1]).nonzero()[:, 0] + 1).tolist()


def check_prompts(rows: Rows) -> None:
    """Raise DataError when no row has a prompt of two tokens, or a source, that a student could
    continue."""
    looked_at = range(min(len(rows), LOOKED_AT))

    def asks(row: dict[str, Tensor]) -> bool:
        return any(n > 1 or "source_ids" in row for n in answer_starts(row["loss_mask"]))

    if not any(asks(rows[n]) for n in looked_at):
        raise DataError(
            f"distill.on_policy: none of the first {len(looked_at)} rows has a prompt that the "
            "student could continue; use chats, or set data.prompt_tokens for texts, e.g. 16"
        )


def _row(ask: Ask, tokens: list[int]) -> dict[str, Tensor]:
    ids = torch.tensor(ask.prompt_ids + tokens)
    row = {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(ask.prompt_ids)}
    return row | ({"source_ids": torch.tensor(ask.source)} if ask.source else {})
