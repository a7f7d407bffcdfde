"""Draft with a small causal LM: its cache between steps, and SSD, which drafts a chain with it.

The student keeps its own KV cache. A draft begins by reading what has been committed since the last
one; drafted tokens that are read while drafting go behind it. When the target has verified a draft,
the entries of its accepted tokens stay and the others are dropped, so nothing accepted is ever read
twice. What shape a draft has is `grow`, the part of a strategy; everything else is shared by all.

Shapes: R rows, N packed tokens, A of them with logits, D distributions, V vocabulary.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.eval.drafters.drawing import REJECTION_RULES, draw, draws_of, ranking, wants_samples
from specdraft.eval.engine.grid import packed_target
from specdraft.eval.engine.plan import CAUSAL, Segment
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.sampling import most_probable
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.transfer import upload
from specdraft.eval.engine.tree import Tree, chain
from specdraft.eval.families.support import check_can_be_cut, position_limit
from specdraft.models.target import Target


@dataclass(slots=True)
class Memory:
    """What one row has committed and drafted. The pool's length says how much of it is cached."""

    request: Request
    tokens: list[int]  # committed
    draft: Tree | None = None
    cached: list[int] = field(default_factory=list)  # nodes of the draft in their slots' order


class LMDrafter:
    """A `Drafter` around a draft LM with the target's tokens; subclasses say how a draft grows.

    depth: of the deepest node that `grow` may read. max_nodes: of a whole tree.
    """

    rules: frozenset[str] = frozenset()  # deterministic candidates, unless a strategy draws
    from_tokens = True

    def __init__(self, student: Target, rows: int, capacity: int, depth: int, max_nodes: int):
        check_can_be_cut(student, "a draft model")
        self.student, self.depth = student, depth
        slots = capacity + max_nodes
        self.packed = packed_target(student, rows, min(slots, position_limit(student) or slots))
        self.pool = self.packed.pool
        # Beyond its own context a student has learned nothing.
        context = student.context or slots
        self.max_committed = min(self.pool.capacity - max_nodes, context - depth)
        self.memory: list[Memory | None] = [None] * rows
        self.forwards, self.seconds, self.max_nodes = 0, 0.0, max_nodes
        self.greedy = True  # whether every request of the draft being made is
        self._no_draft = Tree.empty(student.device)

    def grow(self, rows: list[int], logits: Tensor) -> list[Tree]:
        """Draft behind the committed tokens of each row, given the logits [R, V] after them."""
        raise NotImplementedError

    # -- the Drafter protocol --------------------------------------------------------------------

    def start(self, row: int, request: Request) -> None:
        self.memory[row] = Memory(request, list(request.prompt))
        self.packed.start(row, request.source, request.source_padding)

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        """Commit tokens; keep the cache entries of those that a draft has foreseen."""
        memory = self.memory[row]
        memory.tokens += tokens
        if memory.cached:
            self.pool.keep(row, self._accepted_slots(memory, tokens))
        memory.draft, memory.cached = None, []

    def move(self, row: int, to: int) -> None:
        self.memory[to] = self.memory[row]
        self.packed.move(row, to)

    def draft(self, rows: list[int]) -> list[Tree]:
        able, self.greedy = [], True
        for row in self.worthwhile(rows):
            memory = self.memory[row]
            if len(memory.tokens) <= self.max_committed:
                able.append(row)
                self.greedy = self.greedy and memory.request.temperature == 0
        trees = dict(zip(able, self.grow(able, self._read(able)), strict=True)) if able else {}
        for row, tree in trees.items():
            self.memory[row].draft = tree
        return [trees.get(row, self._no_draft) for row in rows]

    def worthwhile(self, rows: list[int]) -> list[int]:
        """The rows, of those that run, which are drafted for."""
        return rows

    # -- what a strategy draws on ----------------------------------------------------------------

    def forward(
        self,
        ids: Tensor,
        positions: list[int],
        segments: list[Segment],
        logits_to_keep: Tensor | slice | None = None,
    ) -> Tensor:
        """Run packed ids [N] of the segments' rows; return logits [A, V] after some, None: all."""
        with Stopwatch() as watch:
            places = upload(positions, self.student.device)
            features = self.packed.forward(ids, places, segments)
            kept = features if logits_to_keep is None else features[logits_to_keep]
            logits = self.student.logits(kept)
        self.seconds += watch.seconds
        self.forwards += len(segments)
        return logits

    def num_committed_tokens(self, row: int) -> int:
        """How many tokens of a row are committed: the position of a drafted token at depth 1."""
        return len(self.memory[row].tokens)

    def rank(self, counts: dict[int, int], logits: Tensor, depth: int) -> Tensor:
        """`ranking` [D, V] of the candidates at a depth; `counts` of the D belong to each row."""
        if self.greedy:
            return logits.float()
        parts = zip(counts, logits.split([*counts.values()]), strict=True)
        ranked = [
            ranking(part, self.memory[row].request, self._positions(row, depth, len(part)))
            for row, part in parts
        ]
        return torch.cat(ranked)

    def draw(
        self, row: int, logits: Tensor, depth: int, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """`drawing.draw` behind D nodes of a row: tokens [D, W] and, of samples, q [D, V]."""
        positions = self._positions(row, depth, len(logits))
        step = (self.num_committed_tokens(row), depth)
        return draw(logits, self.memory[row].request, positions, step, width)

    def _positions(self, row: int, depth: int, count: int) -> Tensor:
        position = self.num_committed_tokens(row) + depth - 1
        return torch.full((count,), position, device=self.student.device)

    def extend(self, rows: list[int], tokens: Tensor, depth: int) -> Tensor:
        """Read one drafted token per row, at a depth of a chain; return the logits [R, V]."""
        lengths = self.pool.lengths
        # In a chain a token sees all that is before it: there is nothing to hide.
        segments = [Segment(row, lengths[row] + depth - 1, 1, CAUSAL) for row in rows]
        positions = [segment.start for segment in segments]
        return self.forward(tokens, positions, segments)

    # -- reading and keeping ---------------------------------------------------------------------

    def _read(self, rows: list[int]) -> Tensor:
        """Read what is committed and not cached; return the logits [R, V] after it."""
        ids, positions, segments, lasts = [], [], [], []
        for row in rows:
            start = self.pool.lengths[row]
            unread = self.memory[row].tokens[start:]
            segments.append(self.packed.segment(row, chain(len(unread) - 1)))
            ids += unread
            positions += range(start, start + len(unread))
            lasts.append(len(ids) - 1)
            self.pool.lengths[row] = len(self.memory[row].tokens)
        device = self.student.device
        logits_to_keep = slice(-1, None) if len(rows) == 1 else upload(lasts, device)
        return self.forward(upload(ids, device), positions, segments, logits_to_keep)

    @staticmethod
    def _accepted_slots(memory: Memory, tokens: list[int]) -> list[int]:
        """Slots, behind the cache, of the drafted nodes that the committed tokens run through."""
        drafted = [None, *memory.draft.tokens.tolist()]
        slots = {node: slot for slot, node in enumerate(memory.cached)}
        children, node, kept = memory.draft.topology.children, 0, []
        for token in tokens:
            for child in children[node]:
                if drafted[child] == token and child in slots:
                    break
            else:
                break
            kept.append(slots[node := child])
        return kept


class SSD(LMDrafter):
    """Standard speculative drafting: a chain of gamma tokens, one forward each.

    theta: the draft ends behind the first token that the student gives a lower probability; 0 never
    ends one. That token stays in the draft: whether a later one is drawn may depend on it, but a
    sample that was dropped for its value would be none. (Leviathan et al., arXiv 2211.17192; early
    exit as GSD prunes.)
    """

    rules = REJECTION_RULES

    def __init__(self, student: Target, rows: int, capacity: int, gamma: int, theta: float = 0.0):
        super().__init__(student, rows, capacity, depth=gamma, max_nodes=gamma)
        self.gamma, self.theta = gamma, theta

    def grow(self, rows: list[int], logits: Tensor) -> list[Tree]:
        probs: dict[int, list[Tensor]] = {row: [] for row in rows}  # filled where drawn
        growing, levels, grown = rows, [], []
        for depth in range(1, self.gamma + 1):
            tokens, sure = self._choose(growing, logits, depth, probs)
            levels.append(tokens)
            grown += growing
            if not sure or depth == self.gamma:
                break
            if len(sure) < len(growing):
                numbers = [growing.index(row) for row in sure]
                tokens = tokens.index_select(0, upload(numbers, tokens.device))
                growing = sure
            logits = self.extend(growing, tokens, depth)
        drafted = torch.cat(levels)
        if len(rows) == 1:
            return [self._tree(rows[0], drafted, probs[rows[0]])]
        places: dict[int, list[int]] = {row: [] for row in rows}  # of its tokens among all levels'
        for place, row in enumerate(grown):
            places[row].append(place)
        order = upload([place for row in rows for place in places[row]], drafted.device)
        parts = drafted.index_select(0, order).split([len(places[row]) for row in rows])
        return [self._tree(row, part, probs[row]) for row, part in zip(rows, parts, strict=True)]

    def _choose(
        self, rows: list[int], logits: Tensor, depth: int, probs: dict[int, list[Tensor]]
    ) -> tuple[Tensor, list[int]]:
        """The next token of each row [R], and the rows whose draft goes on behind it."""
        ranked = logits if self.greedy else self.rank(dict.fromkeys(rows, 1), logits, depth)
        if self.theta and depth < self.gamma:
            chances, tokens = ranked.softmax(-1, dtype=torch.float32).max(-1)
        else:
            chances, tokens = None, most_probable(ranked)
        if not self.greedy:
            for number, row in enumerate(rows):
                if wants_samples(self.memory[row].request):
                    drawn, law = self.draw(row, logits[number, None], depth, width=1)
                    tokens[number] = drawn[0, 0]
                    probs[row].append(law)
                    if chances is not None:
                        chances[number] = law[0, drawn[0, 0]]
        if chances is None:  # no threshold, or the end: the host need not wait for the device
            return tokens, rows
        known = zip(rows, chances.tolist(), strict=True)
        return tokens, [row for row, chance in known if chance >= self.theta]

    def _tree(self, row: int, tokens: Tensor, probs: list[Tensor]) -> Tree:
        count = tokens.numel()
        self.memory[row].cached = [*range(1, count)]  # the last one was not read
        draws = draws_of(self.memory[row].request, probs, [*range(count), -1])
        return Tree(chain(count), tokens, draws)
