"""Answers rewritten by the target itself: a drafter must learn the target's distribution.

Every assistant turn is replaced by what the target says, given the turns before it as the target
has said them. The turns are made level by level: all first answers in one batch, then all second
answers, and so on. A text is continued from its first `data.prompt_tokens` tokens.

Each finished answer is appended to `answers-<rank>.jsonl` (data/answers.py), which nobody else may
read, at once: a run that is cut off goes on where it stopped. A line there that is no answer is
asked for again; an answer that a cache beside this one has to the same question is taken over.
What makes the answers is handed in (`generate`): our decoder, which this floor does not know, or a
server (data/server.py). A row one of whose answers failed is rejected with the reason. More than
10% of such rows are an error, and are asked for again by the next run.
"""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from specdraft.data.answers import (
    Answer,
    Ask,
    Generate,
    KeptAnswer,
    NearbyAnswers,
    Slot,
    kept_lines,
)
from specdraft.data.atomic import cut_torn_line, stating_shortfall
from specdraft.data.chat import USELESS_SHARE, Conversation
from specdraft.data.ranks import ALONE, Ranks
from specdraft.data.renderer import Example, Renderer
from specdraft.data.template import UnrenderableError
from specdraft.recipes.errors import DataError
from specdraft.recipes.interrupt import keeping
from specdraft.recipes.terminal import say


class Rewriter:
    """Asks the target for every answer and puts the rows together.

    Each conversation is continued `data.samples` times: sample 0 greedily, the others at
    `data.temperature`, each with its own seed. A row ends at the first answer that did not come to
    its end within `data.max_new_tokens`: the turns behind it would answer something never said.
    """

    def __init__(
        self,
        renderer: Renderer,
        conversations: list[Conversation],
        folder: Path,
        target: dict[str, Any],  # what tells it from others, as JSON has it
    ):
        self.renderer, self.data = renderer, renderer.data
        self.conversations, self.folder, self.target = conversations, folder, target
        self.answers: dict[Slot, Answer] = {}
        self.failures: dict[Slot, str] = {}  # some were answered later
        if self.data.prompt_tokens is None and any(c.text is not None for c in conversations):
            raise DataError(
                "data.prompt_tokens = None: data.answers=target continues the texts of "
                f"{self.data.sources[0]}; say how many tokens of each are the prompt, e.g. 16"
            )

    def run(self, generate: Generate | None, ranks: Ranks = ALONE) -> None:
        """Make this rank's answers that are still missing. Raises DataError without `generate`."""
        if generate is None:
            raise DataError(
                "data.answers=target: the answers are not made yet and nothing here can make "
                "them; run: accelerate launch data/cache.py RECIPE"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / f"answers-{ranks.rank}.jsonl"
        own.touch(mode=0o600)
        own.chmod(0o600)  # one of an earlier version was everybody's
        cut_torn_line(own)
        self._load()
        nearby = NearbyAnswers(self.folder)
        mine = range(ranks.rank, len(self.conversations), ranks.world)
        rows = [(c, s) for c in mine for s in range(self.data.samples)]
        total = sum(self._turns(conversation) for conversation, _ in rows)
        with (
            tqdm(total=total, desc="answers", unit="answer", disable=not ranks.is_first) as bar,
            own.open("a", encoding="utf-8") as file,
            keeping(lambda: f"{len(self.answers)} answers are kept"),
        ):
            for turn in range(max((self._turns(c) for c, _ in rows), default=0)):
                asked = [(c, s, turn) for c, s in rows if turn < self._turns(c)]
                self._level(asked, generate, nearby, file, bar)
        if nearby.found:
            say(f"{nearby.found} answers were taken over from other caches in {self.folder.parent}")

    def examples(self) -> Iterator[Example]:
        """Put the rows together from answers that every rank has written; reject the rest."""
        self._load()
        self._check_failures()
        for number, conversation in enumerate(self.conversations):
            for sample in range(self.data.samples):
                answered = 0
                while (number, sample, answered) in self.answers:
                    answered += 1
                if failure := self.failures.get((number, sample, answered)):
                    self.renderer.reject(conversation, f"no answer: {failure}", False)
                    continue
                turn = max(answered - 1, 0)
                try:
                    ids, mask = self._prompt(number, sample, turn)
                    source = self._source(number)
                except UnrenderableError as error:
                    self.renderer.reject(conversation, str(error))
                    break
                answer = self.answers.get((number, sample, turn))
                if answer is None:
                    reason = f"no room for an answer behind {len(ids)} tokens"
                    self.renderer.reject(conversation, reason, False)
                    break
                mask = mask + [True] * len(answer.tokens)
                whole = ids + answer.tokens
                yield Example(whole, mask, conversation.origin, source, not answer.ended)

    def _level(
        self, slots: list[Slot], generate: Generate, nearby: NearbyAnswers, file: TextIO, bar: tqdm
    ) -> None:
        """Make one answer of each slot, skipping those made before and those never reached."""
        missing, asks = [], []
        for slot in slots:
            if slot in self.answers:
                bar.update()
                continue
            if (ask := self._ask(slot)) is None:
                bar.total -= 1
                continue
            key = ask.key(self.target)
            if known := nearby.get(key, ask.max_new_tokens):
                self._write(KeptAnswer(slot, key, known), file)
                bar.update()
            else:
                missing.append((slot, key))
                asks.append(ask)
        tokens, started = 0, time.monotonic()
        for index, answer in generate(asks) if asks else ():
            self._write(KeptAnswer(*missing[index], answer), file)
            tokens += len(answer.tokens)
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s", False)

    def _write(self, kept: KeptAnswer, file: TextIO) -> None:
        """Keep an answer. One line, one write: a process that is killed leaves at most one torn
        line."""
        self._keep(kept)
        with stating_shortfall(Path(file.name)):
            file.write(kept.to_line())
            file.flush()

    def _ask(self, slot: Slot) -> Ask | None:
        """Return the question that leads to a slot, or None when the row ended before it."""
        number, sample, turn = slot
        before = self.answers.get((number, sample, turn - 1))
        if turn and not (before and before.ended):
            return None
        try:
            prompt, _ = self._prompt(number, sample, turn)
            source = self._source(number)
        except UnrenderableError:
            return None
        room = self.data.max_length - len(prompt)
        if room < 1:
            return None
        return Ask(
            prompt_ids=prompt,
            max_new_tokens=min(room, self.data.max_new_tokens),
            temperature=self.data.temperature if sample else 0.0,
            seed=_seed(self.data.seed, *slot),
            source=source,
        )

    def _prompt(self, number: int, sample: int, turn: int) -> tuple[list[int], list[bool]]:
        """Return ids and mask of everything before an answer. Raises UnrenderableError."""
        conversation = self.conversations[number]
        if self.renderer.start:
            return self.renderer.start, [False] * len(self.renderer.start)
        if conversation.text is not None:
            ids = self.renderer.text_ids(conversation.text)[: self.data.prompt_tokens]
            return ids, [False] * len(ids)
        history, answered = [], 0
        for message in conversation.messages:
            if message["role"] == "assistant":
                if answered == turn:
                    break
                spoken = self.renderer.tokenizer.decode(
                    self.answers[number, sample, answered].tokens, skip_special_tokens=True
                )
                message = {"role": "assistant", "content": spoken}
                answered += 1
            history.append(message)
        return self.renderer.template.render(history, prompt=True)

    def _source(self, number: int) -> list[int]:
        """Return what an encoder reads of a conversation, as it is kept; of others nothing. Raises
        UnrenderableError."""
        if not self.renderer.start:
            return []
        return self.renderer.asked(self.conversations[number])[: self.data.max_length]

    def _turns(self, number: int) -> int:
        """Return how many answers a conversation asks for."""
        conversation = self.conversations[number]
        answers = sum(message["role"] == "assistant" for message in conversation.messages)
        return answers if conversation.text is None else 1

    def _keep(self, kept: KeptAnswer) -> None:
        if kept.answer.failure is None:
            self.answers[kept.slot] = kept.answer
        else:
            self.failures[kept.slot] = kept.answer.failure

    def _check_failures(self) -> None:
        """Refuse to go on without many of the rows. Raises DataError."""
        failed = self.failures.keys() - self.answers.keys()
        rows = len(self.conversations) * self.data.samples
        if len(failed) > USELESS_SHARE * rows:
            first = min(failed)
            raise DataError(
                f"{len(failed)} of {rows} rows got no answer, more than {USELESS_SHARE:.0%}; "
                f"first: {self.conversations[first[0]].origin}: {self.failures[first]}; "
                "the same command asks for them again"
            )

    def _load(self) -> None:
        """Read the answers that are on disk, of every rank, of this run and of those before it."""
        for kept in map(KeptAnswer.from_line, kept_lines(self.folder)):
            if kept:
                self._keep(kept)


def _seed(*parts: int) -> int:
    """Return a seed that depends on all parts and on nothing else."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
