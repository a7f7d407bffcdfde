"""One row's pass in one function: from what it reads to the best tokens of every slot.

On a host that launches operations no faster than a small head runs them, half of a draft is what
lies between them. Where one row drafts greedily behind its most probable path, nothing is hidden
from any input of a pass and every choice is the best one, so that a pass is a plain function of its
inputs, and torch.compile can make one call of it (`eval.compile`). Everything else, and all that
several rows draft, goes through the packed passes of eval/drafters/head.py.

Shapes: M inputs, Q queries of a block, K block size, S siblings, H hidden, n layers of the target,
C slots, D head dimension, V tokens drafted among.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.embeddings import DraftVocabulary
from specdraft.models.falcon import FalconHead
from specdraft.models.passes.places import Start, places_from
from specdraft.models.sar.fusion import LinearFusion
from specdraft.models.sar.layer import Rope
from specdraft.models.target import Target
from specdraft.recipes.errors import in_a_line

Cache = tuple[Tensor, Tensor]  # keys and values of a layer, [1, kv_heads, C, D] each
FIRST = 2  # place from which on a graph serves all
FEWEST = 4  # siblings, if there are as many: a number of one's own would be a graph of its own
# Tokens among which probabilities are shared out: at that temperature hardly any is left for
# others, and to sum over a vocabulary takes as long as the attention of a pass.
WEIGHED = 8
KEPT = 2**26  # bytes of what is made of each token, once; more are worked out anew in every pass


class Block(NamedTuple):
    """The K levels that a pass drafts, each behind the best token of the one before."""

    hidden: Tensor  # [K, H], what each level's distribution is made of
    chances: Tensor | None  # [K, S], of its best tokens, descending; None: nobody asks
    tokens: Tensor  # [K, S]


def weighed(scores: Tensor, count: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """Chances of the best tokens, descending, and which these are, [.., count] each, given scores
    [.., V], which are multiplied by the sharpness."""
    best, places = best_of(scores, count)
    return shares(best, count, sharpness), places[..., :count]


def best_of(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best scores of [.., V], descending, and their places: as many as share chances out."""
    return scores.topk(min(max(count, WEIGHED), scores.shape[-1]))


def shares(best: Tensor, count: int, sharpness: float) -> Tensor:
    """Chances of the first ones, [.., count], given the best logits."""
    return (sharpness * best).softmax(-1)[..., :count]


def reads_alone(head: FalconHead | Eagle3Head, target: Target) -> bool:
    """Whether a head's pass over one row can be a `RowPass`: its fusion carries no state, it sees
    all before it, its keys and values are made of its inputs, and the target's embedding and
    lm_head, a plain matrix, lie where it runs."""
    return (
        isinstance(head, FalconHead)
        and isinstance(target, Target)  # or a model served elsewhere
        and not head.fuse.start(1, target.device)
        and head.config.window is None
        and (head.config.reads != "own" or head.config.layers == 1)
        and target.embedding.weight.device == target.lm_head.weight.device == target.device
        and getattr(target.lm_head, "bias", None) is None
    )


class RowPass:
    """The passes of a head over a single row.

    rope: of every position. siblings: tokens of a level. sharpness: of their chances, what logits
    are multiplied by; None: nobody asks for them. compiles: whether a pass becomes one graph, when
    it is first called, for any number of inputs and any place.
    """

    def __init__(
        self,
        head: FalconHead,
        target: Target,
        vocabulary: DraftVocabulary,
        rope: Rope,
        siblings: int,
        sharpness: float | None = None,
        compiles: bool = False,
    ):
        self.head, self.rope, self.siblings = head, rope, siblings
        self.dtype = rope[0].dtype
        self.embedding, self.finish = target.embedding, target.finish
        self.lm_head, self.ids = vocabulary.lm_head.detach(), vocabulary.ids
        self.scale, self.sharpness = head.config.feature_scale, sharpness
        self._graphs: dict[Callable, Callable] = {}
        # What the fusion is brought by each token of the target, [.., H], and what slots hear of
        # each that is drafted, [V, W], at its place; None: worked out in every pass.
        self.brought, self.heard = self._brought(), self._heard()
        if compiles:
            # The graphs of each head count apart: of all together no more than eight are made.
            options = {"fullgraph": True, "dynamic": True, "isolate_recompiles": True}
            self._graphs = {part: torch.compile(part, **options) for part in (read, go_on)}

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens [..], as precise as the head: [.., H]."""
        return self.embedding(tokens).to(self.dtype)

    @torch.no_grad()
    def _brought(self) -> Tensor | None:
        tokens = torch.arange(len(self.embedding.weight))
        small = self._keeps(len(tokens) * self.head.config.hidden_size)
        if not (small and isinstance(self.head.fuse, LinearFusion)):
            return None
        return self.head.fuse.brought(self.embed(tokens) / self.head.config.embed_scale)

    @torch.no_grad()
    def _heard(self) -> Tensor | None:
        coupling = self.head.coupling
        # Of a token 2H at most.
        if coupling is None or not self._keeps(2 * self.lm_head.numel()):
            return None
        drafted = torch.arange(len(self.lm_head)) if self.ids is None else self.ids
        return coupling.heard(self.embed(drafted) / self.head.config.embed_scale)

    def _keeps(self, numbers: int) -> bool:
        """Whether so many are kept. A GPU works them out in the time of its launches."""
        small = numbers * self.dtype.itemsize <= KEPT
        return small and self.lm_head.device.type == "cpu"

    def fuse(self, tokens: Tensor, features: Tensor) -> Tensor:
        """What is fused of tokens one ahead [M] and of features at unit scale [M, H]: [M, H]."""
        if self.brought is None:
            return self.head.fuse(self.head.pairs(self.embed(tokens), features)[None])[0][0]
        return self.head.fuse.joins(F.embedding(tokens, self.brought), features)

    def couple(self, hidden: Tensor, before: Tensor, place: Tensor) -> Tensor:
        """What slots predict, given those before them, all [.., H], and the places [..] of the
        tokens drafted from these."""
        if self.heard is None:
            return self.head.couple(hidden, before, self.embed(_tokens(self, place)))
        return self.head.coupling.hears(hidden, before, F.embedding(place, self.heard))

    def make(self, caches: Sequence[Cache]) -> None:
        """Compile now, so that the first request does not wait; overwrites the caches."""
        device, layers = self.lm_head.device, len(self.head.config.feature_layers)
        tokens = torch.zeros(self.head.reading.reach + 1, dtype=torch.long, device=device)
        features = torch.zeros(len(tokens), (1 + layers) * self.head.config.hidden_size)
        with torch.inference_mode():
            block = self.read(tokens, features.to(self.lm_head), caches, FIRST)
            self.go_on(block, caches, FIRST + len(tokens))

    def read(self, tokens: Tensor, features: Tensor, caches: Sequence[Cache], start: int) -> Block:
        """Read what was committed, tokens one ahead [M] and features [M, (1 + n) * H], at the
        positions and slots from `start` on."""
        if not self._graphs or len(tokens) == 1 or start < FIRST:  # each its own graph
            return read(self, tokens, features, caches, start)
        # Whole tensors, since parts of others would have a graph of their own, too.
        return self._call(read, tokens.clone(), features.clone(), caches, start)

    def go_on(self, block: Block, caches: Sequence[Cache], start: int) -> Block:
        """Read the best tokens of a block in turn."""
        return self._call(go_on, block.tokens, block.hidden, caches, start)

    def _call(self, part: Callable, *inputs) -> Block:
        """Run a part, compiled where it can be; else a warning says once why it cannot."""
        if not self._graphs:
            return part(self, *inputs)
        try:
            return self._graphs[part](self, *inputs)
        except Exception as error:  # whatever comes of a compiler that is not there
            self._graphs = {}
            reason = in_a_line(error, kind=True)
            warnings.warn(f"eval.compile: drafts as before: {reason}", UserWarning, stacklevel=2)
            return part(self, *inputs)


def read(own: RowPass, tokens: Tensor, features: Tensor, caches: Sequence[Cache], start: Start):
    features = own.head.join(features.to(own.dtype)) / own.scale
    return _draft(own, own.fuse(tokens, features), caches, start)


def go_on(own: RowPass, tokens: Tensor, hidden: Tensor, caches: Sequence[Cache], start: Start):
    return _draft(own, own.fuse(tokens[:, 0], hidden), caches, start)


def _draft(own: RowPass, fused: Tensor, caches: Sequence[Cache], start: Start) -> Block:
    """Read fused inputs [M, H]; draft the block that they end with."""
    slots = _decode(own.head, own.rope, fused, caches, start)
    # Scores of features at unit scale, not finished: logits but for what changes no order.
    drawn, scores, best = [], [], []  # best: the places of each level's, as far as one asks
    for hidden in slots.split(1):
        if drawn and own.head.coupling is not None:
            best.append(scores[-1].argmax(-1))
            hidden = own.couple(hidden, drawn[-1], best[-1])
        drawn.append(hidden)
        scores.append(F.linear(hidden.to(own.lm_head.dtype), own.lm_head))
    chances = None
    if own.sharpness is not None:
        found, places = best_of(torch.cat(scores), own.siblings)
        logits = own.finish(own.scale * found.float())
        chances, places = shares(logits, own.siblings, own.sharpness), places[:, : own.siblings]
    elif own.siblings > 1:
        places = torch.cat(scores).topk(own.siblings).indices
    else:
        best += [part.argmax(-1) for part in scores[len(best) :]]
        places = torch.cat(best)[:, None]
    return Block(torch.cat(drawn), chances, _tokens(own, places))


def _tokens(own: RowPass, places: Tensor) -> Tensor:
    """The target's tokens at places among those that are drafted."""
    return places if own.ids is None else own.ids[places]


def _decode(
    head: FalconHead, rope: Rope, fused: Tensor, caches: Sequence[Cache], start: Start
) -> Tensor:
    """Put fused inputs [M, H] into the cache and give the slots [K, H] of the block at their end,
    from which nothing is hidden."""
    count, reach = len(fused), head.reading.reach
    place = places_from(start, count)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for cached, fresh in zip(caches[layer], (key, value), strict=True):
            place.write(cached, fresh)
        keys, values = map(place.before, caches[layer])
        mask, grouped = place.mask(keys), query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=grouped)

    queries = head.reading.queries(fused[None, -reach:])
    at, newest = (tuple(place.last(table, n) for table in rope) for n in (count, reach))
    return head.reading.slots(head.decode(queries, newest, attend, (fused[None], at)))[0]
