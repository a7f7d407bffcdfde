"""What goes into the decoder and what comes out: a request, its steps, its completion."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from specdraft.eval.engine.tree import Tree
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, UserError

GUMBEL = "gumbel"
Process = Callable[[list[int], Tensor], Tensor]  # all tokens before, logits [V] -> logits [V]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    prompt: Sequence[int]  # of an encoder-decoder: what its decoder begins with
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    # How drafts are accepted when sampling: "gumbel" (token for token what plain decoding gives),
    # or a rule of eval/engine/accept.py, exact in law.
    rule: str = GUMBEL
    eos_ids: frozenset[int] | None = None  # ids that end it; None: the target's
    stop: tuple[str, ...] = ()  # strings that end it; the token that completes one is kept
    # What changes the target's logits before temperature, as a repetition penalty does. A function
    # of the request's own tokens, the prompt's first, so that it is exact at any node of a draft.
    process: Process | None = None
    source: Sequence[int] = ()  # what the encoder of an encoder-decoder reads
    # Ids before the source that its encoder counts but does not see: padding on the left.
    source_padding: Sequence[int] = ()


def accepting(rules: Iterable[str]) -> list[str]:
    """What may accept drafts: rules that are theirs alone, and those that take any draft."""
    return sorted({GUMBEL, "walk", *rules})


def check_request(
    name: str, request: Request, target: Target, capacity: int, draft: int, rules: Iterable[str]
) -> None:
    """Raise DataError, naming the request, for one that cannot be decoded.

    capacity: slots of a row's cache, of which a draft may need `draft`. rules: acceptance rules,
    besides those that take any draft.
    """
    prompt, length, vocab_size = request.prompt, request.max_new_tokens, target.vocab_size
    if not prompt:
        raise DataError(f"{name}: the prompt is empty; give at least one token")
    _check_source(name, request, target)
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise DataError(
            f"{name}: token ids {min(prompt)}..{max(prompt)} are outside the vocabulary "
            f"0..{vocab_size - 1}"
        )
    if length < 1:
        raise DataError(f"{name}: max_new_tokens is {length}; give at least 1")
    if len(prompt) + length + draft > capacity:
        raise DataError(
            f"{name}: {len(prompt)} prompt + {length} new tokens + {draft} for drafts exceed the "
            f"capacity of {capacity}; raise it or shorten"
        )
    if target.context is not None and len(prompt) + length > target.context:
        raise DataError(
            f"{name}: {len(prompt)} prompt + {length} new tokens exceed the {target.context} "
            f"positions of {target.name}; shorten the prompt, or lower max_new_tokens"
        )
    if not request.temperature >= 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
        raise DataError(
            f"{name}: temperature {request.temperature}, top_k {request.top_k}, top_p "
            f"{request.top_p}; allowed: temperature >= 0, top_k >= 0, 0 < top_p <= 1"
        )
    if request.temperature > 0 and request.rule not in (known := accepting(rules)):
        raise DataError(
            f"{name}: rule {request.rule!r} is not for these drafts; allowed: {', '.join(known)}"
        )
    if request.stop and (target.tokenizer is None or not all(request.stop)):
        raise DataError(f"{name}: stop strings need a tokenizer and must not be empty")


def _check_source(name: str, request: Request, target: Target) -> None:
    source, read = request.source, [*request.source_padding, *request.source]
    if bool(source) != target.reads_source:
        reads = (
            "reads a source, and this one is empty" if target.reads_source else "reads no source"
        )
        raise DataError(f"{name}: {target.name} {reads}")
    if source and not 0 <= min(read) <= max(read) < target.vocab_size:
        raise DataError(
            f"{name}: token ids {min(read)}..{max(read)} of the source are outside the "
            f"vocabulary 0..{target.vocab_size - 1}"
        )
    if target.context is not None and len(read) > target.context:
        raise DataError(
            f"{name}: a source of {len(read)} tokens exceeds the {target.context} positions of "
            f"{target.name}'s encoder; shorten it"
        )


@dataclass(slots=True)
class Step:
    """What one verification of one row did, for metrics and replays."""

    emitted: int  # tokens committed, the bonus included
    drafted: int  # nodes of the verified tree, the root not counted
    depth: int  # depth of the deepest drafted node
    accepted: int  # depth of the accepted path, before a stop cut it
    copied: int = 0  # nodes of this path that were copied from elsewhere in the draft (GSD)
    parents: tuple[int, ...] = ()  # of the verified tree's nodes; none where it is not ours
    tokens: Sequence[int] = ()  # of its nodes after the root
    path: Sequence[int] = ()  # the accepted nodes, the root first
    copies: int = 0  # nodes of the tree that no drafter drafted: copied from elsewhere in it

    @classmethod
    def of(cls, tree: Tree, tokens: Sequence[int], path: Sequence[int], emitted: int) -> "Step":
        """Record what came of a tree with these tokens, the root's first: the accepted path."""
        topology, size = tree.topology, len(tokens) - 1
        copied = sum(node > size - tree.copies for node in path) if tree.copies else 0
        draft = array("q", tokens[1:])  # kept for every step of a run: eight bytes a token
        shape = (topology.parents, draft, tuple(path), tree.copies)
        return cls(emitted, size, topology.depth, len(path) - 1, copied, *shape)


@dataclass
class Completion:
    """A finished request. `tokens` are the new ones, the end-of-sequence token included.

    A request that cannot be decoded ends as "refused", with the reason in `error`.
    """

    index: int
    tokens: list[int]
    steps: list[Step]
    reason: Literal["eos", "stop", "length", "refused"] = "length"
    error: UserError | None = None
    fallback: str | None = None  # why it was finished by plain decoding: what its drafter raised


class Update(NamedTuple):
    """What one step added to one request; the last one of a request carries its completion."""

    index: int
    tokens: list[int]
    steps: list[Step]
    completion: Completion | None = None
