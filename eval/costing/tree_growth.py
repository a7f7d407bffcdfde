"""Which static tree suits a trained head: the rank that each true token has in a draft before it,
and the best tree of N nodes under how often each rank is right at each depth.

With P[d, r] the share of rank r at depth d, a path is accepted with probability prod P, if depths
are independent, and the N most probable paths are the best tree of N nodes (Sequoia, arXiv
2402.12374, for a fixed drafter). They are prefix-closed: a parent is never less probable.

Shapes: T tokens of a text, D depths, W ranks, R passes, K block size, V vocabulary.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.models.eagle3 import Eagle3Head, vocabulary_of
from specdraft.models.falcon import FalconHead
from specdraft.models.medusa import MedusaHeads
from specdraft.models.sar.blocks import block_index
from specdraft.models.target import Target

WIDTH = 20  # ranks that are told apart
UNKNOWN = -1  # the rank of what is behind the end of a text


class Text(NamedTuple):
    """A prompt and its answer."""

    start: int  # tokens of the prompt
    ids: list[int]  # all
    source: Sequence[int] = ()  # what an encoder-decoder's encoder reads

    def source_on(self, device: torch.device) -> Tensor | None:
        """The source [1, S] as a target takes it."""
        return torch.tensor([list(self.source)], device=device) if self.source else None


Texts = Sequence[Text]


@torch.inference_mode()
def rank_traces(
    head: FalconHead | Eagle3Head, target: Target, texts: Texts, depth: int
) -> list[Tensor]:
    """Ranks of true tokens in a head's drafts: [T, D] of every text.

    At [p, d - 1] that of the token at p + d, where p is the last committed one and what is drafted
    between them is true; WIDTH for one beyond the ranks that are told apart, or never drafted.
    """
    head = head.to(target.device)
    k, vocabulary = head.config.block_size, vocabulary_of(head, target)
    passes, traces = -(-depth // k), []
    for text in texts:
        ids, read = text.ids, text.source_on(target.device)
        tokens = torch.tensor([ids], device=target.device)
        features = target.features(tokens, layers=head.config.feature_layers, source=read)[:, :-1]
        ahead, trace = target.embed(tokens[:, 1:]), _no_ranks(len(ids), passes * k)
        places = torch.arange(max(len(ids) - 1 - k, 0))
        for phase in range(1, k + 1):  # of the blocks: a draft begins behind a whole one
            blocks = block_index(len(ids) - 1, k, phase).to(target.device)[None]
            rolled = head(ahead.float(), features.float(), blocks, passes=passes)[:, 0]
            slots = (places - phase) % k
            for number, predicted in enumerate(rolled[:, : len(places)]):
                ranks = _ranks(vocabulary.logits(predicted), vocabulary.places(tokens[0, k + 1 :]))
                roots = places - slots + (1 - number) * k
                whole = roots >= k
                trace[roots[whole], number * k + slots[whole]] = ranks[whole]
        traces.append(trace[:, :depth])
    return traces


@torch.inference_mode()
def medusa_rank_traces(
    heads: MedusaHeads, target: Target, texts: Texts, depth: int
) -> list[Tensor]:
    """`rank_traces` for Medusa heads, whose head d drafts t_(p + d) from the feature at p - 1."""
    drafter, traces = MedusaDrafter(heads, target, StaticTree.chain(depth, depth)), []
    for text in texts:
        tokens = torch.tensor(text.ids, device=target.device)
        trace, read = _no_ranks(len(tokens), depth), text.source_on(target.device)
        scores = drafter.scores(target.features(tokens[None], source=read)[0])  # [T, D, V]
        for d in range(1, depth + 1):
            true = tokens[1 + d :]
            trace[1 : 1 + len(true), d - 1] = _ranks(scores[: len(true), d - 1], true)
        traces.append(trace)
    return traces


def _no_ranks(length: int, depth: int) -> Tensor:
    """The ranks [T, D] of a text in whose drafts no token is right: WIDTH, and UNKNOWN behind the
    text's end."""
    ahead = torch.arange(length)[:, None] + torch.arange(1, depth + 1)
    return torch.where(ahead < length, WIDTH, UNKNOWN)


def _ranks(scores: Tensor, true: Tensor) -> Tensor:
    """Ranks [T] of tokens, -1 for what is never drafted, under scores [T, V]; on the CPU."""
    own = scores.gather(1, true.clamp(min=0)[:, None])
    ranks = (scores > own).sum(-1).clamp(max=WIDTH)
    return torch.where(true < 0, WIDTH, ranks).cpu()


def shares_of(traces: Sequence[Tensor], texts: Texts, width: int | None = None) -> Tensor:
    """Shares of the ranks by depth, of drafts that begin in the texts' answers: [D, W].

    width: tokens that are drafted among, where they are fewer than WIDTH.
    """
    ranks = torch.cat([trace[text.start :] for trace, text in zip(traces, texts, strict=True)])
    found = torch.stack([(ranks == rank).sum(0) for rank in range(min(width or WIDTH, WIDTH))], 1)
    return found / (ranks != UNKNOWN).sum(0).clamp(min=1)[:, None]


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
