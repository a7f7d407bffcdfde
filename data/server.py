"""Answers by an OpenAI-compatible server: vLLM, SGLang or `transformers serve`.

    vllm serve MODEL
    python data/cache.py RECIPE data.answers=target data.server=http://127.0.0.1:8000/v1

Prompts go to /completions as token ids, made by the target's own chat template. Token ids come back
(`return_token_ids`) and are taken as they are: exactly what was sampled.

An older server gives text only: its answer is encoded again, with the tokenizer's end-of-sequence
token behind it where the server says "stop". That is the same text, but not always the ids the
target chose. `transformers serve` takes text only, too: a prompt that the tokenizer would not read
back as the same ids is then not sent.

What a model's generation_config.json would do to its distribution (top_k, a repetition penalty) is
turned off. Whether the same seed gives the same answer again is the server's affair. `transformers
serve --continuous-batching` decodes all requests like the first, greedily: do without that flag
where `data.samples` is above 1.

What comes back is foreign: an answer is whole within `data.timeout` seconds and a size that fits
its tokens, is checked before anything of it is kept, and the key is in nothing that is.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import httpx2

from specdraft.data.answers import Answer, Ask
from specdraft.models.target import Target
from specdraft.recipes.credentials import KEY, redacted
from specdraft.recipes.errors import DataError, in_a_line
from specdraft.recipes.fields import shown
from specdraft.recipes.schema import Recipe

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before an ask is sent again; doubled every time
LARGEST, LARGEST_TOKEN = 2**20, 2**10  # bytes of a response: at all, and per token of an answer


class UnansweredError(ValueError):
    """An ask that got no usable answer, though the server is there."""


class Server:
    """A `Generate` (data/regenerate.py): asks a server, `data.batch_rows` requests at a time.

    A request that gets no response, 429 or 5xx is sent again `data.retries` times. What fails for
    good is an `Answer` with the reason. Raises DataError when the server is not there, or no more.
    """

    def __init__(self, recipe: Recipe, target: Target):
        self.data, self.target, self.tokenizer = recipe.data, target, target.tokenizer
        self.model = recipe.data.server_model or recipe.target.model
        self._takes_ids: bool | None = None  # not known before the first ask

    def __call__(self, asks: list[Ask]) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) of every ask, as they come."""
        with asyncio.Runner() as runner:
            answers = self._answers(asks)

            async def following() -> tuple[int, Answer] | None:
                return await anext(answers, None)

            try:
                while pair := runner.run(following()):
                    yield pair
            except KeyboardInterrupt:
                # Where it comes between a run's last step and its end, that end is still to come:
                # the next run, which closes the client, would take it for its own.
                loop = runner.get_loop()
                loop.call_soon(loop.stop)
                loop.run_forever()
                raise

    async def _answers(self, asks: list[Ask]) -> AsyncIterator[tuple[int, Answer]]:
        waiting, running = iter(enumerate(asks)), set()

        def fill() -> set[asyncio.Task]:
            free = islice(waiting, self.data.batch_rows - len(running))
            return {asyncio.create_task(self._answer(client, *pair)) for pair in free}

        async with self._client() as client:
            if self._takes_ids is None:
                await self._meet(client)
            try:
                while running := running | fill():
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
                    if any(task.result()[1].failure for task in done):
                        await self._check_there(client)
            finally:
                for task in running:
                    task.cancel()

    def _client(self) -> httpx2.AsyncClient:
        key = os.environ.get(KEY)
        return httpx2.AsyncClient(
            base_url=self.data.server,
            # As it is: a small body cannot become a large one.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx2.Timeout(None, connect=10),  # of a whole answer: `_exchange`
            limits=httpx2.Limits(),  # none: batch_rows is the limit
        )

    async def _meet(self, client: httpx2.AsyncClient) -> None:
        """Find out whether the server takes token ids. Raises DataError if it takes nothing."""
        await self._check_there(client)
        hello = Ask(self.tokenizer("Hello")["input_ids"], max_new_tokens=8, temperature=0.0, seed=0)
        for self._takes_ids in (True, False):
            try:
                self._read(await self._post(client, hello), hello)
                return
            except UnansweredError as error:
                refusal = error
        raise DataError(
            f"data.server = {self.data.server}: does not complete a prompt as {self.model!r} "
            f"({refusal}); data.server ends in /v1 as a rule, data.server_model is the name the "
            f"server gives this target, and a key is read from the environment's {KEY}"
        )

    async def _check_there(self, client: httpx2.AsyncClient) -> None:
        """Raise DataError when nobody listens; any response will do."""
        try:
            async with asyncio.timeout(self.data.timeout), client.stream("GET", "models"):
                return
        except (httpx2.TransportError, TimeoutError) as error:
            reason = in_a_line(error, kind=True)
            raise DataError(
                f"data.server = {self.data.server}: no server answers ({reason}); start "
                f"one, e.g. `vllm serve {self.model}`, and run the same command again: "
                "finished answers are kept"
            ) from error

    async def _answer(self, client: httpx2.AsyncClient, index: int, ask: Ask) -> tuple[int, Answer]:
        try:
            return index, self._read(await self._post(client, ask), ask)
        except UnansweredError as error:
            return index, Answer([], ended=False, failure=str(error))

    async def _post(self, client: httpx2.AsyncClient, ask: Ask) -> str:
        """Send an ask until it is answered or refused; return a text. Raises UnansweredError."""
        body, wait = self._request(ask), FIRST_WAIT
        for retries_left in reversed(range(self.data.retries + 1)):
            try:
                status, text = await self._exchange(client, body)
            except httpx2.TransportError as error:
                reason = in_a_line(error, kind=True)
            except TimeoutError:
                reason = f"no whole response within data.timeout = {self.data.timeout:g} seconds"
            else:
                if 200 <= status < 300:
                    return text
                reason = f"status {status}: {_brief(text)}"
                if 400 <= status < 500 and status != 429:
                    raise UnansweredError(reason)
            if retries_left:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
        raise UnansweredError(f"{reason}, after {self.data.retries} retries")

    async def _exchange(self, client: httpx2.AsyncClient, body: dict) -> tuple[int, str]:
        """Send a body; return status and text of the response. Raises TimeoutError for one that is
        not whole in time, UnansweredError for one without an end."""
        content, most = bytearray(), LARGEST + LARGEST_TOKEN * body["max_tokens"]
        async with (
            asyncio.timeout(self.data.timeout),
            client.stream("POST", "completions", json=body) as response,
        ):
            async for part in response.aiter_raw():
                content += part
                if len(content) > most:
                    raise UnansweredError(f"the response has more than {most} bytes")
        return response.status_code, content.decode(errors="replace")

    def _request(self, ask: Ask) -> dict[str, Any]:
        body = {
            "model": self.model,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": 1.0,
            "seed": ask.seed,
        }
        if self._takes_ids:
            plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            return {**body, **plain, "prompt": ask.prompt_ids, "return_token_ids": True}
        # `transformers serve` refuses these keys; it samples only if told so in its own one.
        plain = {"do_sample": ask.temperature > 0, "top_k": 0, "repetition_penalty": 1.0}
        plain["eos_token_id"] = sorted(self.target.eos_ids) or None
        text = self._text(ask.prompt_ids)
        return {**body, "prompt": text, "generation_config": json.dumps(plain)}

    def _text(self, ids: list[int]) -> str:
        """Return the text that a tokenizer which adds its own bos reads as these ids."""
        for rest in (ids, ids[1:]):
            text = self.tokenizer.decode(rest, clean_up_tokenization_spaces=False)
            if self.tokenizer(text, verbose=False)["input_ids"] == ids:
                return text
        raise UnansweredError("the server takes text only, and as text this prompt has other ids")

    def _read(self, text: str, ask: Ask) -> Answer:
        """Return the answer that a response holds. Raises UnansweredError."""
        _check_keyless(text)
        ids, counted, reason, read = self._completion(text)
        if read != len(ask.prompt_ids):
            raise UnansweredError(
                f"the server read {shown(read)} prompt tokens, the target's tokenizer made "
                f"{len(ask.prompt_ids)}: it serves another model or tokenizer"
            )
        if reason not in ("stop", "length"):
            raise UnansweredError(f"the server gave up: finish_reason {_brief(shown(reason))}")
        if len(ids) > ask.max_new_tokens:
            if counted:
                raise UnansweredError(
                    f"the answer has {len(ids)} tokens, and {ask.max_new_tokens} were asked for"
                )
            # Encoded again, a text may have more than the server made.
            ids, reason = ids[: ask.max_new_tokens], "length"
        eos = self.tokenizer.eos_token_id
        if reason == "stop" and eos is not None and not self._ends(ids):
            ids = [*ids, eos]
        if not ids:
            raise UnansweredError("the answer is empty")
        if none := [one for one in ids if not 0 <= one < self.target.vocab_size]:
            raise UnansweredError(
                f"the answer has token {shown(none[0])}, the target {self.target.vocab_size} "
                "tokens: the server serves another model"
            )
        _check_keyless(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return Answer(ids, ended=reason == "stop" or self._ends(ids))

    def _completion(self, text: str) -> tuple[list[int], bool, Any, Any]:
        """Return token ids, whether they are the server's own, why they end, and how many of the
        prompt it read, as a response has these. Raises UnansweredError."""
        try:
            reply = json.loads(text)
            choice, read = reply["choices"][0], reply["usage"]["prompt_tokens"]
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            if counted := ids is not None:
                _check_ids(ids)
            elif isinstance(said := choice["text"], str):  # tokenizers take lists, too
                ids = self.tokenizer.encode(said, add_special_tokens=False)
            else:
                raise TypeError(f"text = {shown(said)}")
        # A wrong type somewhere, or brackets without an end.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UnansweredError(f"the response is no completion: {_brief(text)}") from error
        return ids, counted, reason, read

    def _ends(self, ids: list[int]) -> bool:
        return bool(ids) and ids[-1] in self.target.eos_ids


def _check_keyless(text: str) -> None:
    """Raise UnansweredError for a text with the key in it, which an answer would keep."""
    key = os.environ.get(KEY)
    if key and key in text:
        raise UnansweredError(f"the response repeats the key of {KEY}")


def _check_ids(ids: Any) -> None:
    """Raise TypeError for what is no list of whole numbers."""
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise TypeError(f"token_ids = {shown(ids)}")


def _brief(text: str) -> str:
    return " ".join(redacted(text, os.environ.get(KEY)).split())[:300]
