"""Which rows make up which optimiser step, and how they become tensors.

Everything random is a pure function of (train.seed, step, slot), slot being a row's place in the
step's batch: the order of rows, block phases, feature noise, glanced blocks. So a batch gives the
same numbers however it is cut into ranks and micro-batches, and resuming needs the step alone.

Shapes: B rows of a micro-batch, T tokens (longest row).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from specdraft.data.store.features import read_rows
from specdraft.recipes.errors import DataError, RecipeError

Key = tuple[int, int, int]  # (seed, step, slot) of a row
WINDOW = 32  # batches whose rows are sorted by length


class Rows(Protocol):
    """What a drafter is trained on: features, or a token cache.

    Rows that are better read together have `__getitems__(rows)`, like torch's own data sets; those
    that take long to come, `will_read(rows)`.
    """

    lengths: Sequence[int]  # tokens of each
    key: str | None  # a hash of what they hold; None: not known

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...


def keyed_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator seeded by a hash of its key that is the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class SamplingPlan:
    """The rows of every optimiser step.

    An epoch shows every row once, and some again where its batches have more places. Rows of
    similar length share a batch (rows are sorted within windows of WINDOW batches, then the
    batches are shuffled), which saves padding without giving up the random order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        if not len(lengths):
            raise DataError("no rows to train on; check data.sources, data.limit and data.holdout")
        self.lengths = torch.as_tensor(list(lengths))
        self.batch_size, self.seed = batch_size, seed
        self.steps_per_epoch = -(-len(lengths) // batch_size)
        self._epoch: tuple[int, Tensor] = (-1, torch.empty(0))

    def rows(self, step: int) -> list[int]:
        """Return the row numbers of one optimiser step, over all ranks."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._batches(epoch))
        return self._epoch[1][batch].tolist()

    def _batches(self, epoch: int) -> Tensor:  # [steps_per_epoch, batch_size]
        generator = keyed_generator(self.seed, epoch, "order")
        count, wanted = len(self.lengths), self.steps_per_epoch * self.batch_size
        drawings = [torch.randperm(count, generator=generator) for _ in range(-(-wanted // count))]
        order = torch.cat(drawings)[:wanted]
        windows = order.split(WINDOW * self.batch_size)
        order = torch.cat([w[self.lengths[w].argsort(stable=True)] for w in windows])
        batches = order.view(self.steps_per_epoch, self.batch_size)
        return batches[torch.randperm(self.steps_per_epoch, generator=generator)]


@dataclass(frozen=True)
class Batch:
    """One micro-batch, right-padded, as a trainer's `collate` makes it."""

    lengths: list[int]  # tokens of each row
    keys: list[Key]

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows, each counted once."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """Return a copy that a GPU can fetch while it computes."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


def padded(rows: list[dict], name: str) -> Tensor:
    """Return what rows call `name`, padded with zeros on the right: [B, T, ..]."""
    return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)


def rows_per_forward(batch_size: int, accumulation: int, ranks: int) -> int:
    """Return how many rows of a batch a process takes at once. Raises RecipeError where it cannot
    be cut so."""
    per_rank, rest = divmod(batch_size, accumulation * ranks)
    if rest:
        raise RecipeError(
            f"train.batch_size is {batch_size}: it must be a multiple of "
            f"train.accumulation x processes = {accumulation} x {ranks}"
        )
    return per_rank


class Loader:
    """This rank's micro-batches of each step; the next step is read while one computes."""

    def __init__(
        self,
        data: Rows,
        plan: SamplingPlan,
        collate: Callable[[list[dict], list[Key]], Batch],
        accumulation: int = 1,
        rank: int = 0,
        ranks: int = 1,
        pin: bool = False,
        forward_tokens: int | None = None,
        copies: int = 1,  # that `collate` makes of every row
    ):
        per_rank = rows_per_forward(plan.batch_size, accumulation, ranks)
        self.data, self.plan, self.collate, self.pin = data, plan, collate, pin
        self.forward_tokens, self.copies = forward_tokens, copies
        first = rank * accumulation * per_rank
        self.slots = [
            range(first + n * per_rank, first + (n + 1) * per_rank) for n in range(accumulation)
        ]

    def load(self, step: int) -> list[Batch]:
        """Read and pad the micro-batches of one step."""
        rows = self.plan.rows(step)
        self._announce(step + 1)  # it is fetched meanwhile
        return [
            self._load(rows, step, part) for slots in self.slots for part in self._cut(rows, slots)
        ]

    def _announce(self, step: int) -> None:
        if will_read := getattr(self.data, "will_read", None):
            rows = self.plan.rows(step)
            will_read([rows[slot] for slots in self.slots for slot in slots])

    def _cut(self, rows: list[int], slots: Sequence[int]) -> list[Sequence[int]]:
        """Cut slots into parts of at most `forward_tokens`, the shortest rows first."""
        if self.forward_tokens is None:
            return [slots]
        lengths = {slot: int(self.plan.lengths[rows[slot]]) for slot in slots}
        parts: list[list[int]] = [[]]
        for slot in sorted(slots, key=lengths.__getitem__):
            copies = (len(parts[-1]) + 1) * self.copies
            if parts[-1] and copies * lengths[slot] > self.forward_tokens:
                parts.append([])
            parts[-1].append(slot)
        return parts

    def _load(self, rows: list[int], step: int, slots: Sequence[int]) -> Batch:
        keys = [(self.plan.seed, step, slot) for slot in slots]
        batch = self.collate(read_rows(self.data, [rows[slot] for slot in slots]), keys)
        return batch.pinned() if self.pin else batch

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of steps start..stop-1, reading one step ahead in a thread."""
        with ThreadPoolExecutor(1, "batches") as reader:
            ahead = reader.submit(self.load, start) if start < stop else None
            for step in range(start, stop):
                batches = ahead.result()
                if step + 1 < stop:
                    ahead = reader.submit(self.load, step + 1)
                yield batches
