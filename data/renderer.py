"""Conversations of any format as rows of a token cache: token ids and loss mask.

    renderer = renderer_of(recipe, tokenizer)
    examples = renderer.examples(conversations)     # renderer.rejects: what could not be rendered

Chats go through the target's template, texts stay as they are, and of a source with its target an
encoder reads the one and a decoder learns the other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from specdraft.data.chat import Conversation, Reject
from specdraft.data.template import Template, UnrenderableError, check_characters
from specdraft.models.target_files import read_start_ids
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import DataSection, Recipe


@dataclass(frozen=True)
class Example:
    """One row of a token cache."""

    ids: list[int]
    mask: list[bool]  # token i was written by the assistant
    origin: str
    source: list[int] = field(default_factory=list)  # what an encoder reads
    unended: bool = False  # its last answer was made here, and did not come to its end


class Renderer:
    """Renders chats with the template, texts as they are; keeps what it had to reject.

    start: ids that the decoder of an encoder-decoder begins with.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataSection, start: Sequence[int] = ()
    ):
        self.tokenizer, self.data, self.start = tokenizer, data, [*start]
        self.rejects: list[Reject] = []

    @cached_property
    def template(self) -> Template:
        """The chat template; a base model that is shown texts only needs none."""
        return Template(self.tokenizer)

    def text_ids(self, text: str) -> list[int]:
        """Tokenise a text as a prompt: with the tokenizer's bos, if it sets one, without an eos.

        Raises: UnrenderableError for a text with lone surrogates.
        """
        ids = self.tokenizer(check_characters(text), verbose=False)["input_ids"]
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids

    def source_ids(self, text: str) -> list[int]:
        """Tokenise a text as an encoder reads it: with the tokenizer's ends. Raises as above."""
        return self.tokenizer(check_characters(text), verbose=False)["input_ids"]

    def asked(self, conversation: Conversation) -> list[int]:
        """Tokenise the last question of a conversation, as an encoder reads it. Raises as above."""
        return self.source_ids(conversation.messages[-2]["content"])

    def _pair(self, conversation: Conversation) -> Example:
        """Render a source and its target, for an encoder and its decoder."""
        said = check_characters(conversation.messages[-1]["content"])
        answer = self.tokenizer(text_target=said, verbose=False)["input_ids"]
        if answer[:1] == self.start[1:2]:  # the token that is forced anyhow
            answer = answer[1:]
        if answer[-1:] != [self.tokenizer.eos_token_id]:
            answer = [*answer, self.tokenizer.eos_token_id]
        mask = [False] * len(self.start) + [True] * len(answer)
        return Example(self.start + answer, mask, conversation.origin, self.asked(conversation))

    def examples(self, conversations: Iterable[Conversation]) -> Iterator[Example]:
        """Render conversations with the answers they have; unrenderable ones are rejected."""
        for conversation in conversations:
            try:
                if self.data.format == "seq2seq":
                    yield self._pair(conversation)
                    continue
                if conversation.text is None:
                    ids, mask = self.template.render(conversation.messages)
                else:
                    ids = self.text_ids(conversation.text)
                    prompt = self.data.prompt_tokens or 1  # the first token has nothing before it
                    mask = [False] * min(prompt, len(ids)) + [True] * (len(ids) - prompt)
            except UnrenderableError as error:
                self.reject(conversation, str(error))
            else:
                yield Example(ids, mask, conversation.origin)

    def reject(self, conversation: Conversation, reason: str, broken: bool = True) -> None:
        """Note a conversation that could not be rendered, or (not broken) is of no use."""
        file, _, line = conversation.origin.rpartition(":")
        self.rejects.append(Reject(file, int(line), reason, broken))


def renderer_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """Return what renders a recipe's conversations. Raises DataError for data.format=seq2seq with a
    target that is no encoder-decoder."""
    if recipe.data.format != "seq2seq":
        return Renderer(tokenizer, recipe.data)
    start = read_start_ids(recipe.target.model, recipe.target.revision)
    if not start:
        raise DataError(
            f"data.format = seq2seq: {recipe.target.model} is no encoder-decoder, or its config "
            "names no decoder_start_token_id; take another format, or another target"
        )
    return Renderer(tokenizer, recipe.data, start)


def check_rendered(rendered: int, rejects: list[Reject], failed: int | None = None) -> None:
    """Refuse a template that more than 1% of the conversations do not fit. Raises DataError.

    failed: how many do not; None: as many as there are among the rejects.
    """
    failed = sum(reject.broken for reject in rejects) if failed is None else failed
    if failed > 0.01 * (rendered + failed):
        first = "; ".join(f"{r.file}:{r.line}: {r.reason}" for r in rejects if r.broken)[:400]
        raise DataError(
            f"{failed} of {rendered + failed} conversations cannot be rendered, more than 1%"
            + (f"; first: {first}" if first else "")
        )
