"""Prompts that a drafter is measured on.

    tiny_chat    the held-out prompts that come with the package, in five categories
    holdout      the last `data.holdout` conversations of the sources, up to their first answer
    a name       of a published set: mt_bench, gsm8k, .. (data/prompt_sets.py)
    name:file    the same, from a file in its published format
    a file       JSONL or JSON; a row is one of
                 {"messages": [..]}, {"conversations": [..]}  up to the open question, or, where
                                                              all are answered, to the first answer
                 {"turns": ["..", ..]}                        MT-bench, Spec-Bench: in turn
                 {"prompt": ".."}, {"question": ".."}         HumanEval, GSM8K
                 {"instruction": "..", "input": ".."}         Alpaca
                 {"text": ".."}                               the first eval.prompt_tokens tokens

A chat is rendered with the target's template; a base model without one is given the bare texts.
What a user says after the first answer waits in `Prompt.later` until there is one.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from specdraft.data.chat import BrokenRowError, Conversation, read_turns, split_holdout
from specdraft.data.prompt_sets import SETS, read_questions, set_of
from specdraft.data.renderer import Renderer, renderer_of
from specdraft.data.sources import Source, bundled_file
from specdraft.data.template import Messages, UnrenderableError
from specdraft.models.target_files import bundled_target_dir, load_tokenizer
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

BUNDLED, HOLDOUT = "tiny_chat", "holdout"
_IDS = ("id", "question_id", "task_id", "conversation_id")


@dataclass(frozen=True)
class Prompt:
    """One prompt: the ids the target reads, and the question as text for people.

    Of an encoder-decoder, `input_ids` are what its decoder begins with.

    The turns of one question are prompts of the same id, one after the other.
    """

    id: str
    category: str
    input_ids: list[int]
    text: str
    messages: Messages = field(default_factory=list)  # of a chat, this turn's question the last
    turn: int = 1
    later: tuple[str, ...] = ()  # what the user says next, turn by turn
    source: list[int] = field(default_factory=list)  # that an encoder-decoder's encoder reads


def load_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the prompts of `eval.prompts`; `eval.limit` of them, spread over the categories.

    Raises: DataError for a missing file, a row that is no prompt (with its line), no rows.
    """
    return spread(_all_prompts(recipe, tokenizer), recipe.eval.limit)


def validation_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return `eval.validation` prompts that `load_prompts` leaves out; none where it takes all.

    The head that is kept is chosen on these, and measured on prompts that did not choose it. They
    end with their first turn.
    """
    every = _all_prompts(recipe, tokenizer)
    measured = {prompt.id for prompt in spread(every, recipe.eval.limit)}
    others = [replace(p, later=()) for p in every if p.id not in measured]
    return spread(others, recipe.eval.validation)


def next_turn(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str
) -> Prompt:
    """Return the prompt of the turn that follows an answer; the prompt has a later turn."""
    question, *later = prompt.later
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    followed = _of_chat(
        renderer_of(recipe, tokenizer), prompt.id, prompt.category, prompt.messages + said
    )
    return replace(followed, turn=prompt.turn + 1, later=tuple(later))


def tuning_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Prompt]:
    """Return `count` prompts to tune a drafter on: neither measured ones nor validation prompts.

    Raises: DataError where those two are all that there are.
    """
    every = _all_prompts(recipe, tokenizer)
    taken = spread(every, recipe.eval.limit) + validation_prompts(recipe, tokenizer)
    used = {prompt.id for prompt in taken}
    left = [prompt for prompt in every if prompt.id not in used]
    if not left:
        raise DataError(
            f"eval.limit = {recipe.eval.limit}: no prompt of {recipe.eval.prompts} is left to tune "
            f"on ({len(every)} there are, {recipe.eval.validation} validate); lower it"
        )
    return spread(left, count)


def _check_world(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError for a target that is not of the bundled prompts' made-up world."""
    bundled = load_tokenizer(bundled_target_dir())
    if tokenizer.get_vocab() != bundled.get_vocab():
        raise DataError(
            f"eval.prompts = {BUNDLED}: these are about the bundled target's made-up world, of "
            f"which {recipe.target.model} knows nothing; set eval.prompts=holdout and "
            "data.holdout, e.g. 50, or give a file or a published set"
        )


def _all_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    name, renderer = recipe.eval.prompts, renderer_of(recipe, tokenizer)
    if name == BUNDLED:
        _check_world(recipe, tokenizer)
    if name == HOLDOUT:
        rows = _of_conversations(split_holdout(recipe.data)[1])
    else:
        rows = _of_set(name) if set_of(name) else _of_file(name)
    prompts = []
    for row in rows:
        try:
            if row.text is None:
                prompt = _of_chat(renderer, row.id, row.category, row.messages)
                prompts.append(replace(prompt, later=() if renderer.start else row.later))
            else:
                prompts.append(_of_text(recipe, renderer, row))
        except UnrenderableError as error:
            raise DataError(f"{row.place}: {error}") from error
    if not prompts:
        raise DataError(f"eval.prompts: no prompts in {name}")
    return list(_with_own_ids(prompts))


def _with_own_ids(prompts: list[Prompt]) -> Iterator[Prompt]:
    """Yield prompts, those whose id another one has with their place behind it."""
    counts = Counter(prompt.id for prompt in prompts)
    for place, prompt in enumerate(prompts, 1):
        again = counts[prompt.id] > 1
        yield replace(prompt, id=f"{prompt.id}#{place}") if again else prompt


def chat_prompt(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Prompt:
    """Return a chat up to its open question as a prompt, or bare texts for a base model.

    Raises: DataError for a chat that the template refuses.
    """
    try:
        return _of_chat(renderer_of(recipe, tokenizer), "chat", "chat", messages)
    except UnrenderableError as error:
        raise DataError(str(error)) from error


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Take `limit` prompts: one of each category in turn, in their order. None takes all."""
    if limit is None or limit >= len(prompts):
        return prompts
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    in_turn = chain.from_iterable(zip_longest(*categories.values()))
    return list(islice(filter(None, in_turn), limit))


class _Row(NamedTuple):
    """A prompt as its source has it: a chat, or a text."""

    place: str  # source:line
    id: str
    category: str
    messages: Messages  # up to the open question
    text: str | None = None
    later: tuple[str, ...] = ()  # as of `Prompt`


def _of_conversations(conversations: list[Conversation]) -> Iterator[_Row]:
    for number, conversation in enumerate(conversations):
        messages = _open_question(conversation.messages)
        named = (conversation.origin, f"holdout-{number}", HOLDOUT)
        yield _Row(*named, messages, conversation.text)


def _of_set(name: str) -> Iterator[_Row]:
    for asked in read_questions(name):
        first, *later = asked.turns
        messages = [{"role": "user", "content": first}]
        yield _Row(asked.place, asked.id, asked.category, messages, later=tuple(later))


def _of_file(name: str) -> Iterator[_Row]:
    path = bundled_file("prompts.jsonl") if name == BUNDLED else Path(name).expanduser()
    if not path.exists():
        raise DataError(
            f"eval.prompts: no file at {path}; give {BUNDLED}, {HOLDOUT}, a JSONL file, or one of "
            f"{', '.join(SETS)} (or NAME:FILE)"
        )
    for row in Source(str(path)).rows():
        place = f"{path}:{row.line}"
        if row.problem:
            raise DataError(f"{place}: {row.problem}")
        try:
            asked = _question(row.value)
        except BrokenRowError as error:
            raise DataError(f"{place}: no prompt: {error}") from error
        category = row.value.get("category") or path.stem
        yield _Row(place, row.called(_IDS), str(category), *asked)


def _question(value: Any) -> tuple[Messages, str | None, tuple[str, ...]]:
    """Return the messages of a prompt, or a text, and later turns. Raises BrokenRowError."""
    if not isinstance(value, dict):
        raise BrokenRowError(f"{type(value).__name__} is not an object")
    for key in ("messages", "conversations"):
        if value.get(key) is not None:
            turns = read_turns(value[key])
            messages = _open_question([{"role": r, "content": c} for r, c in turns])
            if not messages or messages[-1]["role"] == "system":
                raise BrokenRowError("no user turn before the first answer")
            return messages, None, ()
    turns = value.get("turns") if isinstance(value.get("turns"), list) else []
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise BrokenRowError("turns holds an empty one, or one that is no text")
    candidates = turns[:1]
    candidates += [value.get(key) for key in ("prompt", "question", "instruction")]
    content = next((c for c in candidates if isinstance(c, str) and c.strip()), None)
    if content is None and isinstance(value.get("text"), str) and value["text"].strip():
        return [], value["text"], ()  # beside an instruction it is that with its answer: Alpaca's
    if content is None:
        raise BrokenRowError(
            "none of messages, conversations, turns, prompt, question, instruction, text "
            f"(its keys: {', '.join(value) or 'none'})"
        )
    if "instruction" in value and str(value.get("input") or "").strip():
        content = f"{content}\n\n{value['input']}"
    return [{"role": "user", "content": content}], None, tuple(turns[1:])


def _open_question(messages: Messages) -> Messages:
    """Return a chat up to its open question, or, where all are answered, to its first answer."""
    if messages and messages[-1]["role"] != "assistant":
        return messages
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if messages else []


def _of_chat(renderer: Renderer, identifier: str, category: str, messages: Messages) -> Prompt:
    question = messages[-1]["content"]
    if renderer.start:
        source = renderer.source_ids(question)
        return Prompt(identifier, category, renderer.start, question, messages, source=source)
    if renderer.tokenizer.chat_template:
        ids = renderer.template.prompt(messages)
    else:
        ids = renderer.text_ids("\n\n".join(message["content"] for message in messages))
    return Prompt(identifier, category, ids, question, messages)


def _of_text(recipe: Recipe, renderer: Renderer, row: _Row) -> Prompt:
    count = recipe.eval.prompt_tokens or recipe.data.prompt_tokens
    if count is None:
        raise DataError(
            "eval.prompt_tokens = None: a text has no prompt of its own; say how many tokens are "
            "the prompt, e.g. 16"
        )
    ids = renderer.text_ids(row.text)[:count]
    return Prompt(row.id, row.category, ids, renderer.tokenizer.decode(ids, True))
