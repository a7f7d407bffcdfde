"""Glancing: which input pairs of a sequence the head may see ahead of time.

Falcon's Coupled Sequential Glancing Distillation, steps 2 and 3, as pure functions. A head that
drafts k tokens at once never sees the first of them while it drafts the second. In training some
blocks are shown their leading answers, feature and token together ("coupled") and in runs
("sequential"), so that the rest of the block learns what follows from them; the share shrinks
from `glance.start` to `glance.end` while the head learns to do without.

    block (k = 3)      i        i+1      i+2
    inputs             f_i      f_i+1    f_i+2       and the embeddings of the tokens one ahead
    run of 2           f_i+3    f_i+4    f_i+2       its own answers; the last one is never shown

Shapes: B rows, L input positions (tokens - 1), H hidden, V vocabulary, k block size. Position i
predicts feature f_(i+k) and token t_(i+k+1); `supervised[i]` says that both exist and count.
"""

import torch
from torch import Tensor

from specdraft.eval.engine.sampling import most_probable
from specdraft.models.sar.blocks import block_offsets


def glancing_ratio(start: float, end: float, progress: float) -> float:
    """Return lambda, falling linearly from `start` to `end`; progress 0..1 is steps / all steps."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


@torch.no_grad()
def wrong_per_row(
    predicted: Tensor,  # [B, L, H]
    lm_head: Tensor,  # [V, H]
    tokens: Tensor,  # [B, L] the token that position i should draft
    supervised: Tensor,  # [B, L] bool
    elements: int = 1 << 22,
) -> Tensor:
    """Return the Hamming distance [B] between the head's argmax and the tokens.

    Only supervised positions are counted, and at most `elements` logits exist at a time.
    """
    rows, positions = supervised.nonzero(as_tuple=True)
    wrong = torch.zeros(len(predicted), dtype=torch.long, device=predicted.device)
    chunk = max(1, elements // lm_head.shape[0])
    for row, position in zip(rows.split(chunk), positions.split(chunk), strict=True):
        logits = predicted[row, position].to(lm_head.dtype) @ lm_head.T  # [chunk, V]
        differs = most_probable(logits) != tokens[row, position]
        wrong.scatter_add_(0, row, differs.long())
    return wrong


def choose_runs(
    blocks: Tensor,  # [L] non-decreasing block index of one row
    supervised: Tensor,  # [L] bool
    budget: int,
    generator: torch.Generator,
) -> Tensor:
    """Choose at most `budget` positions of one row to reveal: [L] bool.

    Blocks are taken in random order. Of each, a run of random length is revealed from the block's
    first position on, over supervised positions only, and never the block's last position, which
    precedes nothing there. A run in the middle of a block would show the positions before it a
    feature from beyond their own answers.
    """
    offsets, sizes = block_offsets(blocks), blocks.bincount()
    # The longest run a block can take ends before its first unsupervised or its last position.
    barrier = torch.where(supervised, len(blocks), offsets)
    longest = (sizes - 1).scatter_reduce(0, blocks, barrier, "amin")
    candidates = longest.nonzero().squeeze(1)
    shuffled = candidates[torch.randperm(len(candidates), generator=generator)]
    uniform = torch.rand(len(shuffled), generator=generator)
    runs = 1 + (uniform * longest[shuffled]).long()  # uniform over 1..longest
    before = runs.cumsum(0) - runs
    runs = torch.minimum(runs, (budget - before).clamp(min=0))
    run_of_block = torch.zeros_like(sizes).index_put_((shuffled,), runs)
    return offsets < run_of_block[blocks]


def reveal(
    ahead: Tensor,  # [B, L, H] e(t_(i+1))
    features: Tensor,  # [B, L, H] f_i
    revealed: Tensor,  # [B, L] bool
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Replace revealed pairs (f_i, e(t_(i+1))) by their own answers, k positions further on."""
    here = revealed.unsqueeze(-1)
    # roll wraps around only at the last k positions, which have no answer and are never revealed.
    return (
        torch.where(here, ahead.roll(-block_size, dims=1), ahead),
        torch.where(here, features.roll(-block_size, dims=1), features),
    )
