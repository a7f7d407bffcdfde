"""Draft with a cascade: every drafter reviews what smaller ones propose, Max-Gram at the bottom.

CS Drafting (arXiv 2312.11462), Algorithm 1. Drafters are numbered 1..n, from the largest student to
the smallest and then Max-Gram; 0 is the target. Row i of K says how many tokens each smaller
drafter contributes to what i reviews: K[i][j] come from drafter j + 1, so that only j >= i can be
above 0. Larger drafters come first in a draft (horizontal: a late token counts only if all before
it are accepted), and each contributes in steps of the same kind (vertical): smaller drafters
propose by its own row, one forward reviews that, and its own next token is added. So no student
ever generates token by token. The last step of a contribution may bring more than was asked for;
what has been reviewed is kept.

Where text repeats itself for long a student adds little to a copy, which costs nothing: with
`copy_match`, ours, a row whose end has occurred before by that many tokens drafts what followed,
and no student is asked.

A review (`accept.review`) keeps what the student would choose itself or, leniently, gives enough
probability. Max-Gram's tokens have none and are never kept leniently, and the target reviews by its
own rules: the output is the target's for any leniency. Where the target's choice sees Gumbel noise,
every student's does, too.

Shapes: R rows, P tokens proposed to one review of one row, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from specdraft.eval.drafters.drawing import draw
from specdraft.eval.engine.accept import review
from specdraft.eval.engine.grid import packed_target
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.transfer import download, upload
from specdraft.eval.engine.tree import Tree, chain
from specdraft.eval.families.support import check_can_be_cut, position_limit
from specdraft.eval.lookup.maxgram import MaxGramDrafter
from specdraft.models.target import Target


class Reviewer:
    """A student that reads what others propose. Its cache outlives drafts, row by row."""

    def __init__(self, student: Target, rows: int, capacity: int, max_nodes: int):
        check_can_be_cut(student, "a draft model")
        self.student = student
        # Beyond its own context a student has learned nothing, and some cannot run at all.
        slots = capacity + max_nodes
        most = min(student.context or slots, position_limit(student) or slots)
        self.packed = packed_target(student, rows, min(slots, most))
        self.max_committed = self.packed.pool.capacity - max_nodes
        self.forwards, self.seconds = 0, 0.0
        self.cached: list[list[int]] = [[] for _ in range(rows)]  # token ids
        self.settled = [0] * rows  # of them, those that have been compared once committed

    def start(self, row: int, request: Request) -> None:
        self.cached[row], self.settled[row] = [], 0
        self.packed.start(row, request.source, request.source_padding)

    def move(self, row: int, to: int) -> None:
        """A row's request goes on in another row, whose own has ended."""
        self.packed.pool.lengths[row] = len(self.cached[row])  # more than the last read began with
        self.packed.move(row, to)
        self.cached[to], self.settled[to] = self.cached[row], self.settled[row]

    def read(
        self, rows: list[int], tokens: list[list[int]], committed: list[int], starts: list[int]
    ) -> list[Tensor]:
        """Read rows to their end; return the logits [P + 1, V] after each token from starts - 1 on.

        tokens: of each row, the `committed` ones first. What is cached of the same beginning is not
        read again, except for a last token before `starts`, whose logits are asked for.
        """
        pool, device = self.packed.pool, self.student.device
        ids, positions, segments, logits_to_keep = [], [], [], []
        with Stopwatch() as watch:
            for row, known, fixed, start in zip(rows, tokens, committed, starts, strict=True):
                kept = min(self._agreed(row, known, fixed), start - 1)
                pool.lengths[row] = kept
                segments.append(self.packed.segment(row, chain(len(known) - kept - 1)))
                logits_to_keep += range(len(ids) + start - 1 - kept, len(ids) + len(known) - kept)
                ids += known[kept:]
                positions += range(kept, len(known))
                self.cached[row][kept:] = known[kept:]
            placed = upload(ids, device), upload(positions, device), segments
            features = self.packed.forward(*placed)[upload(logits_to_keep, device)]
            logits = self.student.logits(features)
        self.forwards += len(rows)
        self.seconds += watch.seconds
        return list(logits.split([len(k) - s + 1 for k, s in zip(tokens, starts, strict=True)]))

    def _agreed(self, row: int, known: list[int], committed: int) -> int:
        """How many cached tokens the row still begins with."""
        cached, agreed = self.cached[row], self.settled[row]
        end = min(len(cached), len(known))
        while agreed < end and cached[agreed] == known[agreed]:
            agreed += 1
        self.settled[row] = min(agreed, committed)
        return agreed


@dataclass
class Memory:
    """What one row has committed and, behind it while a draft is made, drafted."""

    request: Request
    tokens: list[int]
    committed: int = 0
    # Of each drafted token, the probability that its last proposer or reviewer gave it; None: it is
    # Max-Gram's, or nobody is lenient.
    probs: list[float | None] = field(default_factory=list)


class CascadeDrafter:
    """A `Drafter` made of drafters; a draft is a chain.

    students: from the largest to the smallest. counts: K, a row and a column more than students.
    maxgram: the deterministic drafter below them, with a table, so that it always has a proposal.
    copy_match: tokens of the shortest repeated suffix behind which Max-Gram drafts alone, its own
    count; None: never.
    """

    rules: frozenset[str] = frozenset()  # its drafts are candidates, not samples
    from_tokens = True

    def __init__(
        self,
        students: Sequence[Target],
        maxgram: MaxGramDrafter,
        counts: Sequence[Sequence[int]],
        leniency: float = 1.0,
        rows: int = 1,
        capacity: int = 2048,
        copy_match: int | None = None,
    ):
        size = len(students) + 1
        if not students or [len(row) for row in counts] != [size] * size:
            raise ValueError(
                f"{len(students)} students with a K of {len(counts)} rows; allowed: at least one "
                "student, and a square K with one row more than students"
            )
        if maxgram.next_id is None:
            raise ValueError("a cascade needs a Max-Gram drafter with a table")
        self.counts, self.leniency, self.maxgram = counts, leniency, maxgram
        self.copy_match = copy_match
        self.max_nodes = max(self._most(0), maxgram.count if copy_match else 0)
        self.reviewers = [Reviewer(student, rows, capacity, self.max_nodes) for student in students]
        self.max_committed = min(reviewer.max_committed for reviewer in self.reviewers)
        self.device = students[0].device
        self.memory: list[Memory | None] = [None] * rows

    @property
    def passes(self) -> list[int]:
        """Forwards of each student, the largest first."""
        return [reviewer.forwards for reviewer in self.reviewers]

    @property
    def forwards(self) -> int:
        return sum(self.passes)

    @property
    def seconds(self) -> float:
        return sum(reviewer.seconds for reviewer in self.reviewers)

    # -- the Drafter protocol --------------------------------------------------------------------

    def start(self, row: int, request: Request) -> None:
        self.memory[row] = Memory(request, list(request.prompt))
        self.maxgram.start(row, request)
        for reviewer in self.reviewers:
            reviewer.start(row, request)

    def observe(self, row: int, tokens: list[int], features: Tensor) -> None:
        self.memory[row].tokens += tokens
        self.maxgram.observe(row, tokens, features)

    def move(self, row: int, to: int) -> None:
        self.memory[to] = self.memory[row]
        for part in (self.maxgram, *self.reviewers):
            part.move(row, to)

    def draft(self, rows: list[int]) -> list[Tree]:
        """Draft a chain for each row; an empty one where a student's context is used up."""
        asking = []
        for row in rows:
            memory = self.memory[row]
            memory.committed, memory.probs = len(memory.tokens), []
            if copied := self.copy_match and self.maxgram.copied(row, self.copy_match):
                memory.tokens += copied
            elif memory.committed <= self.max_committed:
                asking.append(row)
        self._propose(0, asking)
        return [self._take(self.memory[row]) for row in rows]

    def _take(self, memory: Memory) -> Tree:
        drafted = memory.tokens[memory.committed :]
        del memory.tokens[memory.committed :]
        return Tree(chain(len(drafted)), upload(drafted, self.device))

    # -- Algorithm 1 -----------------------------------------------------------------------------

    def _propose(self, reviewer: int, rows: list[int]) -> None:
        """Collect what a reviewer's row of K asks for: the horizontal cascade."""
        for drafter, count in enumerate(self.counts[reviewer], start=1):
            goals = {row: len(self.memory[row].tokens) + count for row in rows}
            while short := [row for row in rows if len(self.memory[row].tokens) < goals[row]]:
                self._step(drafter, short, count)

    def _step(self, drafter: int, rows: list[int], count: int) -> None:
        """One step of a drafter: Max-Gram copies, a student reviews, the vertical cascade."""
        if drafter > len(self.reviewers):
            for row in rows:
                memory = self.memory[row]
                ahead = memory.tokens[memory.committed :]
                memory.tokens += self.maxgram.continuation(row, ahead, count)
                memory.probs += [None] * count
            return
        starts = [len(self.memory[row].tokens) for row in rows]
        self._propose(drafter, rows)
        self._review(self.reviewers[drafter - 1], rows, starts)

    def _review(self, reviewer: Reviewer, rows: list[int], starts: list[int]) -> None:
        """Keep of what was proposed since `starts` what the student accepts, and add its token."""
        memories = [self.memory[row] for row in rows]
        tokens = [memory.tokens for memory in memories]
        logits = reviewer.read(rows, tokens, [memory.committed for memory in memories], starts)
        opinions = [
            self._opinion(memory, start, after)
            for memory, start, after in zip(memories, starts, logits, strict=True)
        ]
        host = download(*(part for opinion in opinions for part in opinion))  # the one wait
        for memory, start in zip(memories, starts, strict=True):
            choices, of_choices, of_proposed = (host.pop(0).tolist() for _ in range(3))
            self._keep(memory, start, choices, of_choices, of_proposed)

    def _opinion(self, memory: Memory, start: int, logits: Tensor) -> tuple[Tensor, ...]:
        """The student's choices [P + 1] from `start` on and, where anybody is lenient, the
        probabilities of these [P + 1] and of what was proposed [P]; else none."""
        request, scores = memory.request, logits.float()
        positions = torch.arange(start, start + len(logits), device=logits.device)
        choices = draw(scores, request, positions, (), width=1)[0][:, 0]
        if self.leniency == 1:
            return choices, scores.new_empty(0), scores.new_empty(0)
        law = (scores / (request.temperature or 1.0)).softmax(-1)
        proposed = upload(memory.tokens[start:], logits.device)
        return (
            choices,
            law.gather(1, choices[:, None])[:, 0],
            law[:-1].gather(1, proposed[:, None])[:, 0],
        )

    def _keep(
        self,
        memory: Memory,
        start: int,
        choices: list[int],
        of_choices: list[float],
        of_proposed: list[float],
    ) -> None:
        proposed, begin = memory.tokens[start:], start - memory.committed
        own, others = of_proposed or [None] * len(proposed), memory.probs[begin:]
        reviewed = zip(proposed, choices, own, others, strict=False)  # one choice is left over
        kept = sum(takewhile(bool, (review(*one, self.leniency) for one in reviewed)))
        memory.tokens[start + kept :] = [choices[kept]]
        # Whoever reviews these tokens next compares with what this student thinks of them.
        fresh = [*of_proposed[:kept], of_choices[kept]] if of_choices else [None] * (kept + 1)
        memory.probs[begin:] = fresh

    def _most(self, reviewer: int) -> int:
        """The most tokens that may be proposed to a reviewer. A student's last step may bring all
        that is proposed to it and one token more, where a single one was missing."""
        smaller = enumerate(self.counts[reviewer], start=1)
        bottom = len(self.counts)
        return sum(
            count if drafter == bottom else count + self._most(drafter)
            for drafter, count in smaller
            if count
        )
