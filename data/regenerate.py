"""Answers rewritten by the target itself: a drafter must learn the target's distribution.

Every assistant turn is replaced by what the target says, given the turns before it as the target
has said them. The turns are made level by level: all first answers in one batch, then all second
answers, and so on. A text is continued from its first `data.prompt_tokens` tokens.

Each finished answer is appended to `answers-<rank>.jsonl` at once, so a run that is cut off goes on
where it stopped. What decodes the answers is handed in (`generate`): this floor knows no decoder.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from specdraft.data.chat import Conversation
from specdraft.data.examples import Example, Renderer
from specdraft.data.lines import cut_torn_line
from specdraft.data.template import UnrenderableError
from specdraft.recipes.errors import DataError


@dataclass(frozen=True)
class Ask:
    """One answer wanted of the target."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


# Answers as (index into the asks, new tokens with the end-of-turn token), in any order.
Generate = Callable[[list[Ask]], Iterator[tuple[int, list[int]]]]
Slot = tuple[int, int, int]  # conversation, sample, turn (number of the answer)


class Rewriter:
    """Asks the target for every answer and puts the rows together.

    Each conversation is continued `data.samples` times: sample 0 greedily, the others at
    `data.temperature`, each with its own seed. A row ends at the first answer that did not come to
    its end within `data.max_new_tokens`: the turns behind it would answer something never said.
    """

    def __init__(self, renderer: Renderer, conversations: list[Conversation], folder: Path):
        self.renderer, self.data = renderer, renderer.data
        self.conversations, self.folder = conversations, folder
        self.answers: dict[Slot, list[int]] = {}
        self.ended: set[Slot] = set()  # answers that came to an end of their own
        if self.data.prompt_tokens is None and any(c.text is not None for c in conversations):
            raise DataError(
                "data.prompt_tokens = None: data.answers=target continues the texts of "
                f"{self.data.sources[0]}; say how many tokens of each are the prompt, e.g. 16"
            )

    def run(self, generate: Generate | None, rank: int = 0, world: int = 1) -> None:
        """Make this rank's answers that are still missing. Raises DataError without `generate`."""
        if generate is None:
            raise DataError(
                "data.answers=target: the answers are not made yet and nothing here can make "
                "them; run: accelerate launch data/cache.py RECIPE"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / f"answers-{rank}.jsonl"
        cut_torn_line(own)
        self._load()
        mine = range(rank, len(self.conversations), world)
        rows = [(c, s) for c in mine for s in range(self.data.samples)]
        total = sum(self._turns(conversation) for conversation, _ in rows)
        bar = tqdm(total=total, desc="answers", unit="answer", disable=rank > 0)
        with bar, own.open("a", encoding="utf-8") as file:
            try:
                for turn in range(max((self._turns(c) for c, _ in rows), default=0)):
                    self._level([(c, s, turn) for c, s in rows], generate, file, bar)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"interrupted; {len(self.answers)} answers are kept: "
                    "the same command goes on from there"
                ) from None

    def examples(self) -> Iterator[Example]:
        """Put the rows together from answers that every rank has written; reject the rest."""
        self._load()
        for number, conversation in enumerate(self.conversations):
            for sample in range(self.data.samples):
                turn = 0
                while (number, sample, turn + 1) in self.answers:
                    turn += 1
                answer = self.answers.get((number, sample, turn))
                try:
                    ids, mask = self._prompt(number, sample, turn)
                except UnrenderableError as error:
                    self.renderer.reject(conversation, str(error))
                    break
                if answer is None:
                    self.renderer.reject(
                        conversation, f"no room for an answer behind {len(ids)} tokens", False
                    )
                    break
                yield Example(ids + answer, mask + [True] * len(answer), conversation.origin)

    def _level(self, slots: list[Slot], generate: Generate, file: TextIO, bar: tqdm) -> None:
        """Make one answer of each slot, skipping those made before and those never reached."""
        reached, asks = [], []
        for slot in slots:
            if slot in self.answers:
                bar.update()
            elif ask := self._ask(slot):
                reached.append(slot)
                asks.append(ask)
            else:
                bar.total -= 1
        tokens, started = 0, time.monotonic()
        for index, answer in generate(asks) if asks else ():
            slot, ask = reached[index], asks[index]
            ended = len(answer) < ask.max_new_tokens or answer[-1] == self._eos
            self._keep(slot, answer, ended)
            # One line, one write: a process that is killed leaves at most one torn line.
            file.write(json.dumps({"slot": slot, "ended": ended, "tokens": answer}) + "\n")
            file.flush()
            tokens += len(answer)
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s", False)

    def _ask(self, slot: Slot) -> Ask | None:
        """Return the question that leads to a slot, or None when the row ended before it."""
        number, sample, turn = slot
        if turn >= self._turns(number) or (turn and (number, sample, turn - 1) not in self.ended):
            return None
        try:
            prompt, _ = self._prompt(number, sample, turn)
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
        )

    def _prompt(self, number: int, sample: int, turn: int) -> tuple[list[int], list[bool]]:
        """Return ids and mask of everything before an answer. Raises UnrenderableError."""
        conversation = self.conversations[number]
        if conversation.text is not None:
            ids = self.renderer.text_ids(conversation.text)[: self.data.prompt_tokens]
            return ids, [False] * len(ids)
        history, answered = [], 0
        for message in conversation.messages:
            if message["role"] == "assistant":
                if answered == turn:
                    break
                spoken = self.renderer.tokenizer.decode(
                    self.answers[number, sample, answered], skip_special_tokens=True
                )
                message = {"role": "assistant", "content": spoken}
                answered += 1
            history.append(message)
        return self.renderer.template.render(history, prompt=True)

    def _turns(self, number: int) -> int:
        """Return how many answers a conversation asks for."""
        conversation = self.conversations[number]
        if conversation.text is not None:
            return 1
        return Counter(message["role"] for message in conversation.messages)["assistant"]

    @property
    def _eos(self) -> int | None:
        return self.renderer.tokenizer.eos_token_id

    def _keep(self, slot: Slot, answer: list[int], ended: bool) -> None:
        self.answers[slot] = answer
        if ended:
            self.ended.add(slot)

    def _load(self) -> None:
        """Read the answers that are on disk, of every rank, of this run and of those before it."""
        for path in sorted(self.folder.glob("answers-*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # else it is torn, or just being written by its rank
                    row = json.loads(line)
                    self._keep(tuple(row["slot"]), row["tokens"], row["ended"])


def _seed(*parts: int) -> int:
    """Return a seed that depends on all parts and on nothing else."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
