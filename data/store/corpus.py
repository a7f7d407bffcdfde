"""What bigrams are counted of: shards of whole conversations, from a token cache or a stream.

Shapes: N tokens of a shard, R its rows (conversations).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specdraft.data import chat, fingerprint
from specdraft.data.renderer import check_rendered, renderer_of
from specdraft.data.sources import Source, each_source
from specdraft.data.store.tokens import TokenCache
from specdraft.recipes.schema import Recipe

SHARD_TOKENS = 1 << 22  # about 150 MB while it is counted
SHARD_CHARACTERS = 1 << 24  # the same of a text that has no tokens yet
MANY = 100  # conversations: where none of so many can be rendered, none is


@dataclass(frozen=True)
class Rows:
    """The tokens of conversations, one behind the other. A bigram counts where `counted` marks its
    second token."""

    ids: NDArray[np.int32]  # [N]
    lengths: NDArray[np.int64]  # [R]
    counted: NDArray[np.bool_]  # [N]
    broken: int = 0  # conversations that cannot be rendered


Shard = tuple[int, Callable[[], Rows]]  # its number, and how to read it


class CachedTokens:
    """The rows of a token cache. `everything`: prompts count like answers.

    Its `settings` decide every count.
    """

    def __init__(
        self, cache: TokenCache, everything: bool = False, shard_tokens: int = SHARD_TOKENS
    ):
        self.cache, self.everything, self.shard_tokens = cache, everything, shard_tokens
        self.tokens = sum(cache.lengths)
        self.settings = {"tokens": cache.key, "everything": everything, "shard": shard_tokens}

    def shards(self) -> Iterator[Shard]:
        """Yield every shard in order; rows are read when asked for."""
        ends = np.cumsum(self.cache.lengths)
        marks = np.arange(self.shard_tokens, ends[-1] + self.shard_tokens, self.shard_tokens)
        # The first rows that reach the next multiple: a row is in one shard only.
        stops = np.unique(np.minimum(np.searchsorted(ends, marks) + 1, len(ends)))
        for number, (start, stop) in enumerate(pairwise([0, *stops.tolist()])):
            yield number, lambda start=start, stop=stop: self._read(start, stop)

    def _read(self, start: int, stop: int) -> Rows:
        table = self.cache.dataset.with_format("arrow")[start:stop]
        columns = [table.column(name).combine_chunks() for name in ("input_ids", "loss_mask")]
        ids, mask = (column.flatten().to_numpy(zero_copy_only=False) for column in columns)
        lengths = np.asarray(self.cache.lengths[start:stop])
        return Rows(ids, lengths, np.ones_like(mask) if self.everything else mask)


class StreamedTexts:
    """The sources of a recipe, read once, tokenised and kept nowhere; texts are not cut."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        everything: bool = False,
        shard_characters: int = SHARD_CHARACTERS,
    ):
        self.data, self.everything = recipe.data, everything
        self.tokens = None  # unknown before they are read
        self.renderer, self.shard_characters = renderer_of(recipe, tokenizer), shard_characters
        names = ("format", "limit", "prompt_tokens")
        self.settings = {
            "sources": [
                Source(name, True).content_hash() for name in each_source(self.data.sources)
            ],
            **fingerprint.of_tokenizer(tokenizer),
            **{name: getattr(self.data, name) for name in names},
            "everything": everything,
            "shard": shard_characters,
        }

    def shards(self) -> Iterator[Shard]:
        number, characters, texts = 0, 0, []
        found = chat.iterate(self.data.sources, self.data.format, self.data.limit, [], True)
        for conversation in found:
            texts.append(conversation)
            characters += len(conversation.text or "")
            characters += sum(len(message["content"]) for message in conversation.messages)
            if characters >= self.shard_characters:
                yield number, lambda texts=texts: self._read(texts)
                number, characters, texts = number + 1, 0, []
        if texts:
            yield number, lambda: self._read(texts)

    def _read(self, conversations: list[chat.Conversation]) -> Rows:
        before = len(self.renderer.rejects)
        examples = list(self.renderer.examples(conversations))
        rejects = self.renderer.rejects[before:]
        if len(conversations) >= MANY and not examples:  # no need to read the others
            check_rendered(0, rejects)
        lengths = np.asarray([len(example.ids) for example in examples], dtype=np.int64)
        ids = np.fromiter(chain.from_iterable(e.ids for e in examples), np.int32, lengths.sum())
        mask = np.fromiter(chain.from_iterable(e.mask for e in examples), bool, lengths.sum())
        if self.everything:
            mask = np.ones_like(mask)
        return Rows(ids, lengths, mask, sum(reject.broken for reject in rejects))

    @property
    def rejects(self) -> list[chat.Reject]:
        """Conversations of the shards read so far that cannot be rendered, or are left out."""
        return self.renderer.rejects


Corpus = CachedTokens | StreamedTexts
