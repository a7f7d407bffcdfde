"""The one decoding loop: admit, draft, verify, accept, compact, observe, retire.

Plain decoding is this loop without a drafter, batch 1 is this loop with one row. A step is one
packed forward of the target over all rows: a new row brings its prompt or a part of it, a running
row its last committed token and the tree drafted behind it. Every step of a row commits what was
accepted and one bonus token.

Shapes: N packed tokens, H hidden, V vocabulary.
"""

import time
import warnings
from array import array
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.eval.engine.accept import RULES, walk
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.packed import PackedTarget, Segment
from specdraft.eval.engine.request import GUMBEL, Completion, Request, Step, Update
from specdraft.eval.engine.sampling import SeededChance, most_probable, sample, warp
from specdraft.eval.engine.stop import tokens_until_stop
from specdraft.eval.engine.transfer import download, upload
from specdraft.eval.engine.tree import Tree, behind
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, in_a_line

PREFILL = 1024  # prompt tokens that one step reads at most, over all rows


@dataclass(slots=True)
class Timing:
    """Seconds of the loop, and tokens that were real and pads, summed over steps.

    `verify` is the target's own forward, lm_head included, and `total` everything; what a drafter's
    model takes, the drafter counts. Time on a CUDA device counts where the host waits for it.
    """

    verify: float = 0.0
    total: float = 0.0
    forwards: int = 0
    inputs: int = 0
    input_pads: int = 0
    cached: int = 0
    cache_pads: int = 0


@dataclass(slots=True)
class Row:
    """A running request: what is committed, and what of it the target has not read."""

    index: int
    request: Request
    unread: list[int]
    eos_ids: frozenset[int]
    drafts: bool  # whether the drafter still knows this row
    fallback: str | None = None  # why it no longer does
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def read(self) -> int:
        """Tokens the target has read, and the position of the next one."""
        return len(self.request.prompt) + len(self.tokens) - len(self.unread)


class Part(NamedTuple):
    """One row's share of a packed forward: prompt tokens or a committed token, and a draft."""

    slot: int
    row: Row
    count: int  # unread tokens that are read now
    tree: Tree
    # Among the tokens of all rows: where its own begin, its tree, and those of the next row.
    first: int
    root: int
    stop: int

    @property
    def verifies(self) -> bool:
        """Whether the end of what is committed is reached, so that the target can speak."""
        return self.count == len(self.row.unread)


class Verdict(NamedTuple):
    """The target's answer on one row: what it read, and what it would say after each node."""

    tokens: list[int]  # of the nodes, the root included
    greedy: list[int]  # argmax after each node
    logits: Tensor | None = None  # [nodes, V] on the host; None for a greedy request
    probs: Tensor | None = None  # that the tree was drawn from, on the host; None: it was not


def _laws(parts: list[Part], logits: Tensor) -> dict[tuple[int, str], Tensor]:
    """Of the slots that sample, the `logits` and `probs` of their verdicts, on the device."""
    laws, first = {}, 0
    for part in parts:
        stop = first + part.stop - part.root
        if part.row.request.temperature > 0:
            laws[part.slot, "logits"] = logits[first:stop]
            if part.tree.draws:
                laws[part.slot, "probs"] = part.tree.draws.probs
        first = stop
    return laws


class Decoder:
    """Decode requests with a target and, if given, a drafter, `rows` at a time.

    The output of a request is what plain decoding of the target gives, token for token, greedy or
    sampled, whatever the drafter, the number of rows, the neighbours and the order of admission.
    (Under a rule other than "gumbel" it is so in law; it depends on the drafter, on nothing else.)
    A row that is free takes the next request at the next step; its prompt is read together with
    the others' drafts, at most `prefill` prompt tokens a step.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rows: int = 1,
        capacity: int = 2048,
        prefill: int = PREFILL,
    ):
        if prefill < 1:
            raise ValueError(f"prefill is {prefill}; at least one prompt token a step")
        self.target, self.drafter, self.prefill = target, drafter, prefill
        self.packed = self._pack(target, rows, capacity)
        self.rows: list[Row | None] = [None] * rows
        self.spare = drafter.max_nodes if drafter else 0  # cache slots a draft may need
        self.timing = Timing()
        self._warned = False
        self._nothing = Tree.empty(target.device)

    def _pack(self, target: Target, rows: int, capacity: int) -> PackedTarget:
        return PackedTarget(target, rows, capacity)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode all requests; yield each when it is finished, the refused ones too."""
        for update in self.stream(requests):
            if update.completion:
                yield update.completion

    def stream(self, requests: Iterable[Request]) -> Iterator[Update]:
        """Decode requests, taken from the iterable as rows become free; yield every row's
        new tokens after every step."""
        waiting = enumerate(requests)
        self.rows = [None] * len(self.rows)
        while True:
            if not all(self.rows):
                yield from self._admit(waiting)
                if not any(self.rows):
                    return
            yield from self.step()

    def _admit(self, waiting: Iterator[tuple[int, Request]]) -> Iterator[Update]:
        """Fill the free rows; yield what is refused on the way."""
        for slot, taken in enumerate(self.rows):
            while taken is None and (item := next(waiting, None)):
                index, request = item
                try:
                    self._check(index, request)
                except DataError as error:
                    yield Update(index, [], [], Completion(index, [], [], "refused", error))
                else:
                    taken = self._start(slot, index, request)

    def _start(self, slot: int, index: int, request: Request) -> Row:
        eos = self.target.eos_ids if request.eos_ids is None else request.eos_ids
        row = Row(index, request, list(request.prompt), eos, drafts=self.drafter is not None)
        self.rows[slot] = row
        self.packed.pool.lengths[slot] = 0
        if row.drafts:
            self._guard([slot], self.drafter.start, slot, request)
        return row

    def step(self) -> list[Update]:
        """Draft for, verify and advance every running row; return what each has gained."""
        # To enter it costs as much as a handful of operations: who runs many steps may hold it.
        held = torch.is_inference_mode_enabled()
        with nullcontext() if held else torch.inference_mode():
            began = time.perf_counter()
            parts = self._draft(self._share())
            verdicts, features = self._verify(parts)
            updates = []
            for part, verdict in zip(parts, verdicts, strict=True):
                update = self._advance(part, verdict, features)
                if update:
                    updates.append(update)
                    if update.completion:
                        self.rows[part.slot] = None
            self.timing.total += time.perf_counter() - began
            self.timing.forwards += 1
            return updates

    def _share(self) -> list[tuple[int, Row, int]]:
        """(slot, row, unread tokens to read now) of the rows that take part in this step.

        Prompts share the budget in the order of admission; the others always take part.
        """
        left, shares, prompts = self.prefill, [], []
        for slot, row in enumerate(self.rows):
            if row and row.tokens:
                shares.append((slot, row, 1))
            elif row:
                prompts.append((row.index, slot, row))
        if not prompts:
            return shares
        for _, slot, row in sorted(prompts):
            count = min(len(row.unread), left)
            left -= count
            if count:
                shares.append((slot, row, count))
        return sorted(shares)  # by slot, no two of which are equal

    def _draft(self, shares: list[tuple[int, Row, int]]) -> list[Part]:
        slots = [slot for slot, row, count in shares if row.drafts and self._can_draft(row, count)]
        trees = self._guard(slots, self.drafter.draft, slots) if slots else None
        drafts = dict(zip(slots, trees, strict=True)) if trees else {}
        parts, first = [], 0
        for slot, row, count in shares:
            tree, root = drafts.get(slot, self._nothing), first + count - 1
            stop = root + len(tree.topology)
            parts.append(Part(slot, row, count, tree, first, root, stop))
            first = stop
        return parts

    def _can_draft(self, row: Row, count: int) -> bool:
        """Whether a draft can be made, and follows what is read now."""
        known = row.tokens or self.drafter.from_tokens  # a new row has no features yet
        return bool(known) and count == len(row.unread)

    def _guard(self, slots: list[int], call, *arguments):
        """Call the drafter; rows on which it raises are finished by plain decoding."""
        try:
            return call(*arguments)
        except Exception as error:
            told = in_a_line(error, kind=True)
            for slot in slots:
                self.rows[slot].drafts, self.rows[slot].fallback = False, told
            if not self._warned:
                names = ", ".join(str(self.rows[slot].index) for slot in slots)
                warnings.warn(
                    f"the drafter raised {told}; request {names} goes on by plain decoding, with "
                    "the same output",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._warned = True
            return None

    def _verify(self, parts: list[Part]) -> tuple[list[Verdict | None], Tensor]:
        """Run the target over all rows, and ask it for its choice after every node. Returns the
        features [N, H], too."""
        ids, positions, segments, timing = [], [], [], self.timing
        asked, nodes = [], []
        for part in parts:
            unread, read = part.row.unread[: part.count], part.row.read
            topology = behind(part.count - 1, part.tree.topology)
            segments.append(segment := self.packed.segment(part.slot, topology))
            timing.cached += read
            timing.cache_pads += segment.start - read
            ids += [upload(unread, self.target.device), part.tree.tokens]
            positions += map(read.__add__, topology.depths)
            if part.verifies:
                asked.append(part)
                nodes += range(part.root, part.stop)
        count, device = part.stop, self.target.device
        nodes = upload(nodes, device) if len(nodes) < count else None
        ids, positions = torch.cat(ids), upload(positions, device)
        features, logits = self._timed(self._forward, ids, positions, segments, nodes)
        timing.inputs += count
        timing.input_pads += self.packed.inputs - count
        verdicts = self._verdicts(asked, ids, logits) if asked else {}
        return [verdicts.get(part.slot) for part in parts], features

    def _timed(self, call, *arguments):
        """Call what counts as the target's own forward."""
        began = time.perf_counter()
        result = call(*arguments)
        self.timing.verify += time.perf_counter() - began
        return result

    def _forward(
        self, ids: Tensor, positions: Tensor, segments: list[Segment], nodes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The features [N, H] of all tokens, and the logits after those at `nodes`, None: all."""
        features = self.packed.forward(ids, positions, segments)
        asked = features if nodes is None else features.index_select(0, nodes)
        return features, self.target.logits(asked)

    def _verdicts(self, asked: list[Part], ids: Tensor, logits: Tensor) -> dict[int, Verdict]:
        """By slot, of the parts that have reached their end."""
        laws = _laws(asked, logits)
        # The one synchronisation of the step; on CUDA the host waits here for the forward.
        wanted = (most_probable(logits), ids, *laws.values())
        choices, read, *known = self._timed(download, *wanted)
        choices, read, verdicts, first = choices.tolist(), read.tolist(), {}, 0
        for part in asked:
            stop = first + part.stop - part.root
            verdicts[part.slot] = Verdict(read[part.root : part.stop], choices[first:stop])
            first = stop
        for (slot, name), law in zip(laws, known, strict=True):
            verdicts[slot] = verdicts[slot]._replace(**{name: law})
        return verdicts

    def _advance(self, part: Part, verdict: Verdict | None, features: Tensor) -> Update | None:
        """Commit what one row has gained; tell the drafter. None for a part of a prompt."""
        slot, row = part.slot, part.row
        if verdict is None:
            self.packed.pool.lengths[slot] += part.count
            features = features[part.first : part.stop]
            self._tell(slot, row.unread[1 : part.count + 1], features, prompt=part.count)
            row.unread = row.unread[part.count :]
            return None
        path, bonus = self._accept(row, part.tree, verdict)
        before = part.count - 1  # tokens of a prompt before the root
        kept = [*range(before), *(before + node for node in path)] if before else path
        self.packed.pool.keep(slot, kept)
        fresh = [verdict.tokens[node] for node in path[1:]] + [bonus]
        if kept[-1] < len(kept):  # a prefix of what was read
            features = features[part.first : part.first + len(kept)]
        else:
            kept = [part.first + place for place in kept]
            features = features.index_select(0, upload(kept, features.device))
        self._tell(slot, row.unread[1:] + fresh, features, prompt=before)
        row.unread = [bonus]
        return self._commit(row, fresh, part.tree, verdict.tokens, path)

    def _accept(self, row: Row, tree: Tree, verdict: Verdict) -> tuple[list[int], int]:
        """The accepted nodes, the root first, and the bonus token."""
        if verdict.logits is None:
            return walk(tree.topology, verdict.tokens, verdict.greedy.__getitem__)
        request, length = row.request, row.read + len(row.unread)
        warping = (request.temperature, request.top_k, request.top_p)
        if request.rule == GUMBEL:

            def pick(node: int) -> int:
                position = length + tree.topology.depths[node]
                return sample(verdict.logits[node], position, request.seed, *warping)

            return walk(tree.topology, verdict.tokens, pick)

        def law(node: int) -> Tensor:
            return warp(verdict.logits[node], *warping).double().softmax(-1)

        # Nothing drafted: any rule only has the bonus to draw.
        name = request.rule if len(tree.topology) > 1 else "walk"
        if verdict.probs is not None:
            tree = tree._replace(draws=replace(tree.draws, probs=verdict.probs))
        chance = SeededChance(request.seed, length)
        return RULES[name].rule(tree, verdict.tokens, law, chance)

    def _tell(self, slot: int, tokens: list[int], features: Tensor, prompt: int) -> None:
        """Tell the drafter what a row has gained; the first `prompt` tokens are of its prompt."""
        if not self.rows[slot].drafts:
            return
        if prompt and self.drafter.from_tokens:
            tokens, features = tokens[prompt:], features[prompt:]
        if tokens:
            self._guard([slot], self.drafter.observe, slot, tokens, features)

    def _commit(
        self, row: Row, fresh: list[int], tree: Tree, drafted: list[int], path: list[int]
    ) -> Update:
        """Append the fresh tokens, as far as they stand: an end or the limit may cut them."""
        cut, reason = self._end(row, fresh)
        fresh, size = fresh[:cut], len(drafted) - 1
        copied = sum(node > size - tree.copies for node in path) if tree.copies else 0
        draft = array("q", drafted[1:])  # kept for every step of a run: eight bytes a token
        shape = (tree.topology.parents, draft, tuple(path), tree.copies)
        step = Step(len(fresh), size, tree.topology.depth, len(path) - 1, copied, *shape)
        row.tokens += fresh
        row.steps.append(step)
        completion = None
        if len(fresh) == cut:
            said = (row.index, row.tokens, row.steps, reason)
            completion = Completion(*said, fallback=row.fallback)
        return Update(row.index, fresh, [step], completion)

    def _end(self, row: Row, fresh: list[int]) -> tuple[int, str]:
        """After how many fresh tokens a row ends, the last one included, and why: the first of an
        end-of-sequence token, a stop string and the limit, which may lie beyond them."""
        request = row.request
        cut, reason = request.max_new_tokens - len(row.tokens), "length"
        if request.stop:
            stop = tokens_until_stop(self.target.tokenizer, row.tokens, fresh, request.stop)
            if stop is not None and stop <= cut:
                cut, reason = stop, "stop"
        if not row.eos_ids.isdisjoint(fresh):
            eos = next(n for n, token in enumerate(fresh, start=1) if token in row.eos_ids)
            if eos <= cut:
                cut, reason = eos, "eos"
        return cut, reason

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
        known = {GUMBEL, "walk"} | (self.drafter.rules if self.drafter else set(RULES))
        if request.rule not in known:
            raise DataError(
                f"{name}: rule {request.rule!r} is not for these drafts; "
                f"allowed: {', '.join(sorted(known))}"
            )
        if request.stop and (self.target.tokenizer is None or not all(request.stop)):
            raise DataError(f"{name}: stop strings need a tokenizer and must not be empty")
