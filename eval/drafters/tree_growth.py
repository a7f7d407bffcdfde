"""Which static tree suits a trained head: how often each rank is right at each depth, and the best
tree of N nodes under these shares.

With P[d, r] the share of rank r at depth d, a path is accepted with probability prod P, if depths
are independent, and the N most probable paths are the best tree of N nodes (Sequoia, arXiv
2402.12374, for a fixed drafter). They are prefix-closed: a parent is never less probable.

Shapes: D depths, W = WIDTH ranks.
"""

import heapq
from math import prod

import torch
from torch import Tensor

from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.models.eagle3 import Eagle3Head, vocabulary_of
from specdraft.models.falcon import FalconHead, block_index
from specdraft.models.medusa import MedusaHeads
from specdraft.models.target import Target

WIDTH = 20  # ranks counted


@torch.inference_mode()
def rank_shares(
    head: FalconHead | Eagle3Head,
    target: Target,
    texts: list[tuple[int, list[int]]],
    depth: int,
) -> Tensor:
    """Share of positions whose true token has rank r at depth d: [D, W], or fewer ranks where the
    head drafts among fewer tokens."""
    k, vocabulary = head.config.block_size, vocabulary_of(head, target)
    passes = -(-depth // k)
    found, seen = torch.zeros(passes * k, WIDTH), torch.zeros(passes * k)
    never = torch.full((passes,), WIDTH)
    for start, ids in texts:
        tokens = torch.tensor([ids], device=target.device)
        features = target.features(tokens, layers=head.config.feature_layers)[:, :-1]
        ahead = target.embed(tokens[:, 1:])
        for phase in range(1, k + 1):
            blocks = block_index(len(ids) - 1, k, phase).to(target.device)[None]
            rolled = head(ahead.float(), features.float(), blocks, passes=passes)[:, 0]
            for i in range(max(start - 1, passes * k), len(ids) - k - 1):
                place = (i - phase) % k
                scores = vocabulary.logits(rolled[:, i])  # [R, V]
                true = int(vocabulary.places(tokens[0, i + k + 1]))
                # A token that is never drafted has no rank.
                ranks = (scores > scores[:, true, None]).sum(-1) if true >= 0 else never
                for number, rank in enumerate(ranks.tolist()):
                    seen[number * k + place] += 1
                    if rank < WIDTH:
                        found[number * k + place, rank] += 1
    return (found / seen.clamp(min=1)[:, None])[:depth, : head.config.draft_vocab]


@torch.inference_mode()
def medusa_rank_shares(
    heads: MedusaHeads, target: Target, texts: list[tuple[int, list[int]]], depth: int
) -> Tensor:
    """The same of Medusa heads, whose head h drafts t_(i+1+h) at i: [D, W]."""
    drafter = MedusaDrafter(heads, target, StaticTree.chain(depth, depth))
    found, seen = torch.zeros(depth, WIDTH), 0
    for start, ids in texts:
        tokens = torch.tensor(ids, device=target.device)
        places = torch.arange(start - 1, len(ids) - depth - 1, device=target.device)
        scores = drafter.scores(target.features(tokens[None])[0, places])  # [N, depth, V]
        for number in range(depth):
            true = scores[:, number].gather(1, tokens[places + number + 2, None])
            ranks = (scores[:, number] > true).sum(-1).cpu()
            found[number] += torch.bincount(ranks, minlength=WIDTH)[:WIDTH]
        seen += len(places)
    return found / max(seen, 1)


def probability(shares: Tensor, path: tuple[int, ...]) -> float:
    """Probability that a path of ranks is accepted to its end."""
    return prod(float(shares[depth, rank]) for depth, rank in enumerate(path))


def best_paths(shares: Tensor, nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` most probable paths, most probable first. Ranks count as sorted: a better rank
    is never less probable, so siblings have no gaps."""
    shares = shares.sort(dim=-1, descending=True).values
    heap = [(-float(shares[0, 0]), (0,))]
    chosen = []
    while heap and len(chosen) < nodes:
        value, path = heapq.heappop(heap)
        chosen.append(path)
        *parent, rank = path
        if rank + 1 < shares.shape[1] and shares[len(parent), rank] > 0:
            own, next_best = shares[len(parent), rank : rank + 2].tolist()
            heapq.heappush(heap, (value / own * next_best, (*parent, rank + 1)))
        if len(path) < len(shares):
            heapq.heappush(heap, (value * float(shares[len(path), 0]), (*path, 0)))
    return chosen
