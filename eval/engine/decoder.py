"""The one decoding loop: admit, draft, verify, accept, compact, observe, retire.

Plain decoding is this loop without a drafter, batch 1 is this loop with one row. A step is one
packed forward of the target over all rows: a new row brings its prompt or a part of it, a running
row its last committed token and the tree drafted behind it. Every step of a row commits what was
accepted and one bonus token.

Shapes: A newly cached tokens of a row, N packed tokens of all rows, H hidden; (1 + n) * H where the
drafter reads n layers of the target.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.batch import RowInput, pack, row_inputs, schedule
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.fallback import Fallback
from specdraft.eval.engine.grid import packed_target
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.request import Completion, Request, Step, Update, check_request
from specdraft.eval.engine.row import Row
from specdraft.eval.engine.timing import Stopwatch, Timing
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Tree
from specdraft.eval.engine.verdict import Verdict, accept, verdicts
from specdraft.models.feature_layers import Layers
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError

PREFILL = 1024  # prompt tokens that one step reads at most, over all rows
_HELD = nullcontext()  # what stands for a mode that is on already


class Decoder:
    """Decode requests with a target and, if given, a drafter, `rows` at a time.

    The output of a request is what plain decoding of the target gives, token for token, greedy or
    sampled, whatever the drafter, the number of rows, the neighbours and the order of admission.
    (Under a rule other than "gumbel" it is so in law; it depends on the drafter, on nothing else.)
    A row that is free takes the next request at the next step; its prompt is read together with
    the others' drafts, at most `prefill` prompt tokens a step.
    """

    # Of rows, capacity and the layers that the drafter reads.
    packing: Callable[[Target, int, int, Layers], PackedTarget] = staticmethod(packed_target)

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
        layers = getattr(drafter, "feature_layers", ())
        self.packed = self.packing(target, rows, capacity, layers)
        self.rows: list[Row | None] = [None] * rows
        self.timing = Timing()
        self._fallback = Fallback()
        self._no_draft = Tree.empty(target.device)

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
            with _inference_mode(), Stopwatch() as step:
                self._fill_gaps()
                inputs, updates = self._draft(), []
                features, answers = self._verify(inputs)
                for one, verdict in zip(inputs, answers, strict=True):
                    path, fresh = accept(one, verdict)
                    cached = self._compact(one, path, features)
                    self._observe(one, fresh, cached)
                    if update := self._commit(one, verdict, path, fresh):
                        updates.append(update)
                        if update.completion:
                            self.rows[one.row.slot] = None  # retire
            self.timing.total += step.seconds
            self.timing.forwards += 1
            yield from updates

    def _admit(self, waiting: Iterator[tuple[int, Request]]) -> Iterator[Update]:
        """Fill the free rows; yield what is refused on the way."""
        for slot, row in enumerate(self.rows):
            while row is None and (item := next(waiting, None)):
                try:
                    row = self.rows[slot] = self._start(slot, *item)
                except DataError as error:
                    yield Update(item[0], [], [], Completion(item[0], [], [], "refused", error))

    def _fill_gaps(self) -> None:
        """Move the last rows into those that stay free before them: neighbours attend in one call.

        It reads a row's cache once, as any step does; where 24 rows end one by one, steps of the
        last 16 take a fifth less for it (two CPU cores).
        """
        running = [row for row in self.rows if row]
        for slot, row in enumerate(self.rows[: len(running)]):
            if row is None:
                last = running.pop()
                self.packed.move(last.slot, slot)
                if last.is_drafting:
                    with self._fallback.of([last]):
                        self.drafter.move(last.slot, slot)
                self.rows[last.slot], self.rows[slot], last.slot = None, last, slot

    def _start(self, slot: int, index: int, request: Request) -> Row:
        """Move a request into a free row. Raises DataError for one that cannot be decoded."""
        drafter, packed = self.drafter, self.packed
        draft, rules = (drafter.max_nodes, drafter.rules) if drafter else (0, RULES)
        check_request(f"request {index}", request, self.target, packed.pool.capacity, draft, rules)
        eos = self.target.eos_ids if request.eos_ids is None else request.eos_ids
        row = Row(slot, index, request, list(request.prompt), eos, is_drafting=drafter is not None)
        packed.start(slot, request.source, request.source_padding)
        if drafter:
            with self._fallback.of([row]):
                drafter.start(slot, request)
        return row

    def _draft(self) -> list[RowInput]:
        """What every row reads in this step, with the trees drafted behind it."""
        shares, drafts = schedule(self.rows, self.prefill), {}
        if self.drafter:
            able = [row for row, count in shares if self._can_draft(row, count)]
            slots = [row.slot for row in able]
            with self._fallback.of(able):
                drafts = dict(zip(slots, self.drafter.draft(slots) if slots else (), strict=True))
        return row_inputs(shares, drafts, self._no_draft)

    def _can_draft(self, row: Row, count: int) -> bool:
        """Whether a draft can be made, and follows the `count` tokens that are read now."""
        known = row.tokens or self.drafter.from_tokens  # a new row has no features yet
        return bool(row.is_drafting and known and count == len(row.unread))

    def _verify(self, inputs: list[RowInput]) -> tuple[Tensor, list[Verdict | None]]:
        """Run the target over all rows: features [N, H], and what it says of each row's tree."""
        batch, timing = pack(inputs, self.packed), self.timing
        with Stopwatch() as forward:
            features = self.packed.forward(batch.ids, batch.positions, batch.segments)
            nodes = features if batch.nodes is None else features.index_select(0, batch.nodes)
            if self.packed.layers:  # lm_head reads the last feature
                nodes = nodes[:, : self.target.hidden_size].contiguous()
            logits = self.target.logits(nodes)
        timing.verify += forward.seconds
        timing.inputs += len(batch.ids)
        timing.input_pads += self.packed.inputs - len(batch.ids)
        timing.cached += batch.cached
        timing.cache_pads += batch.cache_pads
        return features, verdicts(inputs, batch.ids, logits, timing)

    def _compact(self, one: RowInput, path: list[int], features: Tensor) -> Tensor:
        """Keep the KV cache of what was accepted, and drop that of the other nodes; return the
        features [A, H], of [N, H], of what is kept."""
        before = one.count - 1  # tokens of a prompt before the root
        kept = [*range(before), *(before + node for node in path)] if before else path
        self.packed.keep(one.row.slot, kept)
        if kept[-1] < len(kept):  # a prefix of what was read: a view will do
            return features[one.first : one.first + len(kept)]
        places = [one.first + place for place in kept]
        return features.index_select(0, upload(places, features.device))

    def _observe(self, one: RowInput, fresh: list[int], features: Tensor) -> None:
        """Show the drafter what a row has gained: features [A, H], and the token after each."""
        row = one.row
        if not row.is_drafting:
            return
        prompt = row.unread[1 : one.count + 1]
        if prompt and self.drafter.from_tokens:
            prompt, features = [], features[len(prompt) :]
        if prompt or fresh:
            with self._fallback.of([row]):
                self.drafter.observe(row.slot, prompt + fresh, features)

    def _commit(
        self, one: RowInput, verdict: Verdict | None, path: list[int], fresh: list[int]
    ) -> Update | None:
        """Append the fresh tokens, as far as they stand: an end or the limit may cut them. None
        for a part of a prompt."""
        row = one.row
        row.unread = row.unread[one.count :] + fresh[-1:]
        if verdict is None:
            return None
        count, reason = row.cut(fresh, self.target.tokenizer)
        fresh = fresh[:count]
        step = Step.of(one.tree, verdict.tokens, path, len(fresh))
        row.tokens += fresh
        row.steps.append(step)
        completion = None
        if len(fresh) == count:
            completion = Completion(row.index, row.tokens, row.steps, reason, None, row.fallback)
        return Update(row.index, fresh, [step], completion)


def _inference_mode() -> AbstractContextManager:
    """To enter it costs as much as a handful of operations: who runs many steps may hold it."""
    return _HELD if torch.is_inference_mode_enabled() else torch.inference_mode()
