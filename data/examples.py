"""What a drafter may learn from, conversation by conversation: token ids and loss mask."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from specdraft.data.chat import Conversation, Reject
from specdraft.data.template import Template, UnrenderableError, check_characters
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import DataSection

MIN_TOKENS = 8  # a shorter row has next to nothing to draft, and caches need not depend on k


@dataclass(frozen=True)
class Example:
    """One row of a token cache."""

    ids: list[int]
    mask: list[bool]  # token i was written by the assistant
    origin: str


class Renderer:
    """Renders chats with the template, texts as they are; keeps what it had to reject."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataSection):
        self.tokenizer, self.data = tokenizer, data
        self.rejects: list[Reject] = []
        self._template: Template | None = None

    @property
    def template(self) -> Template:
        """The chat template; a base model that is shown texts only needs none."""
        if self._template is None:
            self._template = Template(self.tokenizer)
        return self._template

    def text_ids(self, text: str) -> list[int]:
        """Tokenise a text as a prompt: with the tokenizer's bos, if it sets one, without an eos.

        Raises: UnrenderableError for a text with lone surrogates.
        """
        ids = self.tokenizer(check_characters(text), verbose=False)["input_ids"]
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids

    def examples(self, conversations: Iterable[Conversation]) -> Iterator[Example]:
        """Render conversations with the answers they have; unrenderable ones are rejected."""
        for conversation in conversations:
            try:
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


def admit(
    examples: Iterable[Example], max_length: int, min_tokens: int, counts: Counter
) -> Iterator[Example]:
    """Cut examples to `max_length` (the head stays) and drop those with nothing left to learn.

    Counts rows, tokens, supervised, truncated, dropped_short and dropped_unsupervised.
    """
    for example in examples:
        ids, mask = example.ids[:max_length], example.mask[:max_length]
        counts["truncated"] += len(ids) < len(example.ids)
        if len(ids) < min_tokens:
            counts["dropped_short"] += 1
        elif not any(mask):
            counts["dropped_unsupervised"] += 1
        else:
            counts.update(rows=1, tokens=len(ids), supervised=sum(mask))
            yield Example(ids, mask, example.origin)


def check_rendered(rendered: int, rejects: list[Reject]) -> None:
    """Refuse a template that more than 1% of the conversations do not fit. Raises DataError."""
    failed = sum(reject.broken for reject in rejects)
    if failed > 0.01 * (rendered + failed):
        first = "; ".join(f"{r.file}:{r.line}: {r.reason}" for r in rejects if r.broken)[:400]
        raise DataError(
            f"{failed} of {rendered + failed} conversations cannot be rendered, more than 1%; "
            f"first: {first}"
        )


def check_mask(counts: Counter, rejects: list[Reject], what: str) -> None:
    """Refuse a data set of which 0% or 100% would be supervised, or whose template fails often.

    Raises: DataError.
    """
    check_rendered(
        counts["rows"] + counts["dropped_short"] + counts["dropped_unsupervised"], rejects
    )
    if not counts["rows"]:
        raise DataError(
            f"0% of the tokens are supervised with {what}: {counts['dropped_unsupervised']} rows "
            f"have no assistant token within data.max_length and {counts['dropped_short']} are too "
            "short; check the chat template and data.max_length"
        )
    if counts["supervised"] == counts["tokens"]:
        raise DataError(
            f"100% of the tokens are supervised with {what}, prompts included; its chat template "
            "must tell answers from prompts: mark them with {% generation %} .. {% endgeneration %}"
        )
