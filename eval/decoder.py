"""The one decoding loop: admit, draft, verify, accept, compact, observe, retire.

Plain decoding is this loop without a drafter, batch 1 is this loop with one row. A step is one
packed forward of the target over all rows: a new row brings its prompt, a running row its last
committed token and the tree drafted behind it. Every step of a row commits what was accepted and
one bonus token.

Shapes: N packed tokens, H hidden, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specdraft.eval.accept import walk
from specdraft.eval.packed import PackedTarget
from specdraft.eval.sampling import sample
from specdraft.eval.tree import Topology, Tree, chain
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """What one verification of one row did, for metrics and replays."""

    emitted: int  # tokens committed, the bonus included
    drafted: int  # nodes of the verified tree, the root not counted
    depth: int  # depth of the deepest drafted node
    accepted: int  # depth of the accepted path, before a stop cut it


@dataclass
class Completion:
    """A finished request. `tokens` are the new ones, the end-of-sequence token included."""

    index: int
    tokens: list[int]
    steps: list[Step]


@dataclass
class Timing:
    """Seconds spent in each phase of the loop, summed over steps."""

    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0
    forwards: int = 0


class Drafter(Protocol):
    """Proposes a tree per row. State per row lives here, never on a model."""

    forwards: int  # passes of its own model so far
    max_nodes: int  # of a tree it may return, the root not counted

    def start(self, row: int, request: Request) -> None:
        """A request moves into a row."""

    def draft(self, rows: list[int]) -> list[Tree]:
        """Draft behind the last committed token of each row."""

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        """The target has read a row on: `features` [A, H] of the newly cached tokens, and
        `tokens` [A], the token that follows each of them."""


@dataclass
class Row:
    """A running request: what is committed, and what of it the target has not read."""

    index: int
    request: Request
    unread: list[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


class Decoder:
    """Decode requests with a target and, if given, a drafter, `rows` at a time.

    The output of a request is what plain decoding of the target gives, token for token, greedy or
    sampled, whatever the drafter, the number of rows and the neighbours.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, rows: int = 1, capacity: int = 2048
    ):
        self.target = target
        self.drafter = drafter
        self.packed = PackedTarget(target, rows, capacity)
        self.rows: list[Row | None] = [None] * rows
        self.spare = drafter.max_nodes if drafter else 0  # cache slots a draft may need
        self.timing = Timing()

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode all requests; yield each when it is finished."""
        waiting = deque(enumerate(requests))
        for index, request in waiting:
            self._check(index, request)
        self.rows = [None] * len(self.rows)
        while waiting or any(self.rows):
            self._admit(waiting)
            yield from self.step()

    def stream(self, request: Request) -> Iterator[Row]:
        """Decode one request; yield its row after every step, for whoever watches."""
        self._check(0, request)
        self.rows = [None] * len(self.rows)
        self._admit(deque([(0, request)]))
        row = self.rows[0]
        while any(self.rows):
            self.step()
            yield row

    def _admit(self, waiting: deque[tuple[int, Request]]) -> None:
        for slot, row in enumerate(self.rows):
            if row is None and waiting:
                index, request = waiting.popleft()
                self.rows[slot] = Row(index, request, unread=list(request.prompt))
                self.packed.pool.lengths[slot] = 0
                if self.drafter:
                    self.drafter.start(slot, request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draft for, verify and advance every running row; return what finished."""
        active = [slot for slot, row in enumerate(self.rows) if row]
        began = time.perf_counter()
        trees = self._draft(active)
        drafted = time.perf_counter()
        verdicts = self._verify(active, trees)
        verified = time.perf_counter()
        finished = []
        for slot, verdict in zip(active, verdicts, strict=True):
            row = self.rows[slot]
            self._advance(slot, row, verdict)
            if self._is_done(row):
                finished.append(Completion(row.index, row.tokens, row.steps))
                self.rows[slot] = None
        self.timing.draft += drafted - began
        self.timing.verify += verified - drafted
        self.timing.rest += time.perf_counter() - verified
        self.timing.forwards += 1
        return finished

    def _draft(self, active: list[int]) -> list[Tree]:
        nothing = Tree(chain(0), torch.empty(0, dtype=torch.long, device=self.target.device))
        # A row that has just been admitted has nothing to draft from: no feature yet.
        running = [slot for slot in active if self.rows[slot].tokens] if self.drafter else []
        drafts = dict(zip(running, self.drafter.draft(running), strict=True)) if running else {}
        return [drafts.get(slot, nothing) for slot in active]

    def _verify(self, active: list[int], trees: list[Tree]) -> "list[Verdict]":
        """Run the target over all rows, and ask it for its choice after every node."""
        device = self.target.device
        ids, positions, segments = [], [], []
        for slot, tree in zip(active, trees, strict=True):
            unread, start = self.rows[slot].unread, self.packed.pool.lengths[slot]
            topology = tree.topology if len(unread) == 1 else chain(len(unread) - 1)
            segments.append(self.packed.segment(slot, topology))
            ids += [torch.tensor(unread, device=device), tree.tokens]
            positions += [start + depth for depth in topology.depths]
        ids = torch.cat(ids)
        features = self.packed.forward(ids, torch.tensor(positions, device=device), segments)
        by_row = features.split([segment.count for segment in segments])
        sizes = [len(tree.topology) for tree in trees]
        nodes = [part[-size:] for part, size in zip(by_row, sizes, strict=True)]
        logits = self.target.logits(nodes[0] if len(nodes) == 1 else torch.cat(nodes))
        # The one synchronisation of the step: drafts and greedy choices come over together.
        host = torch.cat((logits.argmax(-1), *(tree.tokens for tree in trees))).tolist()
        greedy, drafts = host[: len(logits)], iter(host[len(logits) :])
        verdicts, first = [], 0
        for slot, tree, size, part in zip(active, trees, sizes, by_row, strict=True):
            tokens = [self.rows[slot].unread[-1], *(next(drafts) for _ in range(size - 1))]
            row = slice(first, first + size)
            verdicts.append(Verdict(tree.topology, tokens, greedy[row], logits[row], part))
            first += size
        return verdicts

    def _advance(self, slot: int, row: Row, verdict: "Verdict") -> None:
        """Commit the accepted path and the bonus token of one row; tell the drafter."""
        request, length = row.request, row.length

        def pick(node: int) -> int:
            if request.temperature == 0.0:
                return verdict.greedy[node]
            position = length + verdict.topology.depths[node]
            return sample(
                verdict.logits[node],
                position,
                request.seed,
                request.temperature,
                request.top_k,
                request.top_p,
            )

        path, bonus = walk(verdict.topology, verdict.tokens, pick)
        read = len(row.unread) - 1  # tokens of a prompt before the root
        kept = [*range(read), *(read + node for node in path)]
        self.packed.pool.keep(slot, kept)
        fresh = [*(verdict.tokens[node] for node in path[1:]), bonus]
        emitted = self._until_stop(request, len(row.tokens), fresh)
        row.tokens += fresh[:emitted]
        depths = verdict.topology.depths
        row.steps.append(Step(emitted, len(depths) - 1, max(depths), len(path) - 1))
        if self.drafter:
            features = verdict.features
            if len(kept) < len(features):
                features = features[torch.tensor(kept, device=features.device)]
            self.drafter.observe(slot, row.unread[1:] + fresh, features)
        row.unread = [bonus]

    def _until_stop(self, request: Request, before: int, fresh: list[int]) -> int:
        """How many of the fresh tokens stand: up to an end-of-sequence token or the limit."""
        for count, token in enumerate(fresh, start=1):
            if token in self.target.eos_ids or before + count == request.max_new_tokens:
                return count
        return len(fresh)

    def _is_done(self, row: Row) -> bool:
        full = len(row.tokens) == row.request.max_new_tokens
        return full or row.tokens[-1] in self.target.eos_ids

    def _check(self, index: int, request: Request) -> None:
        """Raise DataError, naming the request, for one that cannot be decoded."""
        name, capacity = f"request {index}", self.packed.pool.capacity
        if not request.prompt:
            raise DataError(f"{name}: the prompt is empty; give at least one token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.target.vocab_size:
            raise DataError(
                f"{name}: token ids {min(request.prompt)}..{max(request.prompt)} are outside the "
                f"vocabulary 0..{self.target.vocab_size - 1}"
            )
        if request.max_new_tokens < 1:
            raise DataError(f"{name}: max_new_tokens is {request.max_new_tokens}; give at least 1")
        if len(request.prompt) + request.max_new_tokens + self.spare > capacity:
            raise DataError(
                f"{name}: {len(request.prompt)} prompt + {request.max_new_tokens} new tokens + "
                f"{self.spare} for drafts exceed the capacity of {capacity}; raise it or shorten"
            )
        if request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
            raise DataError(
                f"{name}: temperature {request.temperature}, top_k {request.top_k}, top_p "
                f"{request.top_p}; allowed: temperature >= 0, top_k >= 0, 0 < top_p <= 1"
            )


@dataclass(frozen=True)
class Verdict:
    """The target's answer on one row: what it read, and what it would say after each node."""

    topology: Topology
    tokens: list[int]  # of the nodes, the root included
    greedy: list[int]  # argmax after each node
    logits: Tensor  # [nodes, V]
    features: Tensor  # [unread + drafted, H]
