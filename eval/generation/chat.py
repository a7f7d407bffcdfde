"""A conversation with a target, decoded by any method: what was said, and the next answer's steps.

A chat is rendered with the target's template, history included. A base model without one is given
all texts so far and goes on. What outgrows the context is forgotten from the beginning.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial

from specdraft.data.prompts import Prompt, chat_prompt
from specdraft.data.template import Messages, UnrenderableError, check_characters
from specdraft.eval.engine.request import Request, Update
from specdraft.eval.families.support import position_limit
from specdraft.eval.measure.methods import Engine, make_method
from specdraft.eval.measure.outcome import DecodingMethod
from specdraft.eval.measure.questions import make_request
from specdraft.eval.methods.registry import METHODS, find, load_trained
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, RecipeError, UserError
from specdraft.recipes.fields import shown
from specdraft.recipes.schema import Recipe

CONTEXT = 4096  # tokens of a conversation at most, where the target has so many positions
DRAFTS = 128  # positions left for drafts behind it


class Chat:
    """A conversation. `context`: tokens of prompt and answer; None: CONTEXT, if the target has so
    many positions. Raises RecipeError for one that is too small or too large."""

    def __init__(self, recipe: Recipe, target: Target, method: str, context: int | None = None):
        self.recipe, self.target = recipe, target
        positions = position_limit(target) or target.context
        most = positions - DRAFTS if positions else context or CONTEXT
        if most < 1:
            raise RecipeError(
                f"target.model = {target.name}: it has {positions} positions, of which a chat "
                f"keeps {DRAFTS} for drafts; take a target with more"
            )
        self.context = context or min(CONTEXT, most)
        self.room = self.context - recipe.eval.max_new_tokens  # for what is read
        if self.room < 1 or self.context > most:
            raise RecipeError(
                f"a context of {self.context} tokens with eval.max_new_tokens = "
                f"{recipe.eval.max_new_tokens}; allowed: more than an answer takes, at most {most}"
            )
        self.messages: Messages = []
        self.answers = 0
        self.use(method)

    def use(self, name: str) -> None:
        """Decode by this method from now on.

        Raises UserError, and changes nothing, for an unknown one or one without its drafter.
        """
        try:
            find(name)
        except RecipeError as error:
            can = ", ".join(self.usable())  # of all there are, most lack what they draft with
            raise RecipeError(f"unknown method {shown(name)}; this run can do {can}") from error
        recipe = self.recipe.with_eval(batch_size=1, methods=(name,))
        trained = load_trained(recipe, self.target)
        self.method = make_method(name, recipe, self.target, trained, self.context)
        self.recipe, self.name = recipe, name

    def usable(self) -> list[str]:
        """The methods for which this run has all that they draft with."""
        recipe = self.recipe.with_eval(batch_size=1)
        found, load = [], cache(partial(load_trained, recipe, self.target))
        for method in METHODS.values():
            alike = next(name for name, row in METHODS.items() if row.needs == method.needs)
            with suppress(UserError):
                make_method(method.name, recipe, self.target, load((alike,)), self.context)
                found.append(method.name)
        return found

    def forget(self) -> None:
        """Begin a new conversation."""
        self.messages = []

    def ask(self, question: str) -> tuple[Iterator[Update], int]:
        """Return the steps of the answer, and how many exchanges were forgotten to make room.

        Raises DataError, and forgets nothing, for a question that is too long by itself, or no
        Unicode.
        """
        try:
            check_characters(question)  # here, where its characters are counted as they are typed
        except UnrenderableError as error:
            raise DataError(f"the question: {error}") from error
        messages = [*self.messages, {"role": "user", "content": question}]
        while (count := len((prompt := self._prompt(messages)).input_ids)) > self.room:
            if len(messages) == 1:
                raise DataError(
                    f"the question has {count} tokens; {self.room} fit into a context of "
                    f"{self.context} beside {self.recipe.eval.max_new_tokens} of an answer"
                )
            messages = messages[2:]
        forgotten = (len(self.messages) + 1 - len(messages)) // 2
        self.messages = messages
        settings = self.recipe.eval
        request = make_request(settings, prompt, self.answers, settings.max_new_tokens)
        self.answers += 1
        return steps_of(self.method, request), forgotten

    def answered(self, text: str) -> None:
        """Remember an answer, whole or stopped; where there is none, forget the question."""
        if text.strip():
            self.messages.append({"role": "assistant", "content": text.strip()})
        else:
            self.messages.pop()

    def _prompt(self, messages: Messages) -> Prompt:
        return chat_prompt(self.recipe, self.target.tokenizer, messages)


def steps_of(method: DecodingMethod, request: Request) -> Iterator[Update]:
    """Decode a request step by step, or, where steps cannot be seen (transformers), in one go."""
    if isinstance(method, Engine):
        yield from method.stream([request])
    else:
        (done,) = method([request]).completions
        yield Update(0, done.tokens, done.steps, done)
