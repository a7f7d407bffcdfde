"""Chat templates: a conversation as token ids, and which of them the assistant wrote.

    template = Template(tokenizer)
    ids, mask = template.render(messages)      # mask: answers with their end-of-turn token
    prompt = template.prompt(messages)         # ends where the assistant begins to write

The loss mask comes from the template's `{% generation %}` blocks where it has them. Where not, the
text of every prefix of the conversation is compared with the text of the whole:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
    |----- prefix that asks for an answer ----------------||-- answer --|

The answer starts where the prefix ends. It ends at the first special token behind its content (the
end of the turn), or with the turn where the template has no such token.
"""

import re
from itertools import groupby

from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specdraft.recipes.errors import DataError, in_a_line

MARKS = "«", "»"  # around what is learnt, where it is shown
LEGEND = f"text between {MARKS[0]} and {MARKS[1]} is trained on:"
Messages = list[dict[str, str]]
Span = tuple[int, int]  # characters [start, end)


class UnrenderableError(ValueError):
    """A conversation that this template refuses, or whose answers cannot be told apart in it."""


def check_characters(text: str) -> str:
    """Return a text. Raises UnrenderableError for one that JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("ascii", "backslashreplace").decode()
        raise UnrenderableError(
            f"{half} at character {error.start} is half of a pair, or a byte that is no UTF-8, "
            "and no character by itself; remove it or write it whole"
        ) from None
    return text


class Template:
    """The chat template of a tokenizer. Raises DataError when there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'this target'} has no chat template; "
                "put a chat_template.jinja into the target's folder, or for a base model use texts "
                "and data.format=text"
            )
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} knows no character offsets; "
                "loss masks need a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        try:
            self._source = tokenizer.get_chat_template()
        except ValueError as error:  # several, and none of them the default
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path}: {in_a_line(error)}; "
                "put the template to use into target.chat_template"
            ) from error
        self._marks_answers = re.search(r"{%-?\s*generation\b", self._source) is not None
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special |= set(tokenizer.all_special_tokens)
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def render(self, messages: Messages, prompt: bool = False) -> tuple[list[int], list[bool]]:
        """Return token ids and loss mask of a chat; `prompt` appends the header of an answer.

        Raises: UnrenderableError.
        """
        text, spans = self._render(messages, prompt)
        if not self._marks_answers:
            spans = self._spans(messages, text)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return encoded["input_ids"], _mask(encoded["offset_mapping"], spans)

    def prompt(self, messages: Messages) -> list[int]:
        """Return the ids of a chat up to where the assistant begins to write."""
        text, _ = self._render(messages, prompt=True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _render(self, messages: Messages, prompt: bool = False) -> tuple[str, list[Span]]:
        # The tokenizer's own mask loses whole turns whose first character belongs to no token, so
        # the spans of characters are taken from one level below `apply_chat_template`.
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                chat_template=self._source,
                return_assistant_tokens_mask=self._marks_answers,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise what they like, TemplateError mostly
            raise UnrenderableError(f"the chat template refuses it: {in_a_line(error)}") from error
        return check_characters(texts[0]), spans[0] if self._marks_answers else []

    def _spans(self, messages: Messages, text: str) -> list[Span]:
        """Find every answer in the text of the whole conversation by rendering prefixes."""
        spans, done, answered = [], 0, 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self._render(messages[:number], prompt=True)[0]
                start = _common(asked, text)
                # All that was asked stands in front: a question behind it is said again there.
                if start < (done if start < len(asked) else answered):
                    raise UnrenderableError(
                        "the template renders a prefix of this chat unlike the whole; "
                        "mark the answers in it with {% generation %}"
                    )
                whole = text if number + 1 == len(messages) else None
                prefix = whole or self._render(messages[: number + 1])[0]
                common = _common(prefix, text)
                rest = len(prefix) - common
                done = self._end(message["content"].strip(), text, start, common, rest)
                spans.append((start, done))
                answered = done
            else:
                # An answer that seems to start before its question ends shows a prefix that is
                # no prefix of this chat: the template moves things about.
                content = message["content"].strip()
                at = text.find(content, done)
                done = done if at < 0 else at + len(content)
        return spans

    def _end(self, content: str, text: str, start: int, turn_end: int, rest: int) -> int:
        """Return where the answer that starts at `start` ends, its end-of-turn token included.

        rest: characters of the prefix that the text does not go on with at `turn_end`.
        """
        at = text.find(content, start)
        found = at >= 0 and (at < turn_end or not text[start:at].strip())
        body_end = at + len(content) if found else start
        if turn_end > body_end:
            # What a template puts behind the last turn only is no part of this common prefix.
            end_of_turn = self._special.search(text, body_end, turn_end)
            if end_of_turn or found or not rest:
                return end_of_turn.end() if end_of_turn else turn_end
            # Rewritten, as below, to what begins alike by chance: `<think>`, `<tool_call>`.
            end_of_turn = self._special.search(text, turn_end)
            return end_of_turn.end() if end_of_turn else turn_end
        # The template rewrites older answers (drops their thinking): the prefix is of no use, only
        # what follows the content directly is known to end the turn.
        end_of_turn = self._special.search(text, body_end)
        if end_of_turn is None or (found and text[body_end : end_of_turn.start()].strip()):
            return body_end
        return end_of_turn.end()


def preview(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> Text:
    """Return the tokens as text: supervised ones green between two marks, the others dim."""
    text = Text()
    for supervised, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        tokens = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        shown = f"{MARKS[0]}{tokens}{MARKS[1]}" if supervised else tokens
        text.append(shown, "bold green" if supervised else "dim")
    return text


def _common(prefix: str, text: str) -> int:
    """Return how many characters two texts share at their start."""
    if text.startswith(prefix):
        return len(prefix)
    pairs = enumerate(zip(prefix, text, strict=False))
    return next((at for at, (a, b) in pairs if a != b), len(text))


def _mask(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Mark the tokens that share a character with a span; both lists are in order."""
    mask, waiting = [], iter(spans)
    start, end = next(waiting, (0, 0))
    for first, last in offsets:
        while end <= first and (span := next(waiting, None)):
            start, end = span
        mask.append(first < end and last > start and last > first)
    return mask
