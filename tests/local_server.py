"""A local completions server, like vLLM and SGLang or like `transformers serve`.

    with LocalServer(tokenizer) as server:
        server.trouble["some words"] = [500, DROP]     # of the next prompts that hold these words
        ..                                             # data.server=server.url
        server.asks                                    # the bodies of all requests, in order

It answers a prompt of n tokens with "I heard n tokens." and an end of turn, or with its start.
"""

import json
import threading
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transformers import PreTrainedTokenizerBase

DROP, HANG, DRIP, FLOOD = "drop", "hang", "drip", "flood"  # single bytes, or an endless response
ECHO = "echo"  # repeats the request with its key
# The keys that `transformers serve` accepts in a request.
KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "generation_config"}


class LocalServer(AbstractContextManager):
    """`takes_ids`: prompts and answers as token ids, like vLLM; otherwise as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, takes_ids: bool = True, key: str = ""):
        self.tokenizer, self.takes_ids, self.key = tokenizer, takes_ids, key
        self.asks: list[dict] = []
        self.trouble: dict[str, list[str | int]] = {}
        self.odd: dict[str, dict] = {}  # words in a prompt -> changes of its choice
        self.raw: dict[str, bytes] = {}  # words in a prompt -> sent instead of an answer
        self.misread = 0  # prompt tokens reported beyond those sent
        self.dies_after: int | None = None  # answers
        self.answered = self.at_once = self.most = 0
        self.everybody: threading.Barrier | None = None  # a barrier for answers
        self.done = threading.Event()
        self.lock = threading.Lock()
        handler = type("Bound", (Handler,), {"local": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.die()

    def prompts(self) -> list[str]:
        """The prompts received as text, without the greeting that every client sends."""
        return [ask["text"] for ask in self.asks if not ask["greeting"]]

    def die(self) -> None:
        """Stop listening; open connections end at their next request."""
        self.done.set()
        self.server.shutdown()
        self.server.server_close()

    def next_trouble(self, text: str) -> str | int | None:
        with self.lock:
            for words, troubles in self.trouble.items():
                if words in text and troubles:
                    return troubles.pop(0)

    def choice(self, prompt: list[int], ask: dict) -> dict:
        answer = f"I heard {len(prompt)} tokens.{self.tokenizer.eos_token}"
        ids = self.tokenizer.encode(answer, add_special_tokens=False)
        ended, ids = len(ids) <= ask["max_tokens"], ids[: ask["max_tokens"]]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice = {"index": 0, "text": text, "finish_reason": "stop" if ended else "length"}
        if ask.get("return_token_ids"):
            choice["token_ids"] = ids
        for words, odd in self.odd.items():
            if words in ask["text"]:
                choice |= odd
        return choice


class Handler(BaseHTTPRequestHandler):
    local: LocalServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or header and body, two packets, would be 40 ms apart

    def do_GET(self) -> None:
        if self.local.done.is_set():
            return self.connection.close()
        self.answer({"object": "list", "data": [{"id": "parrot", "object": "model"}]})

    def do_POST(self) -> None:
        local = self.local
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if local.key and self.headers.get("Authorization") != f"Bearer {local.key}":
            return self.answer({"error": "Unauthorized"}, 401)
        if self.path != "/v1/completions" or ask["model"] != "parrot":
            return self.answer({"error": f"there is no {ask['model']} at {self.path}"}, 404)
        if not local.takes_ids and (ask.keys() > KNOWN or not isinstance(ask["prompt"], str)):
            return self.answer({"detail": "Unexpected fields in the request"}, 422)
        prompt = ask["prompt"]
        if isinstance(prompt, str):
            prompt = local.tokenizer(prompt)["input_ids"]
        ask["text"] = local.tokenizer.decode(prompt)
        ask["greeting"] = ask["text"].endswith("Hello")
        local.asks.append(ask)
        if local.answered == local.dies_after:
            local.die()
        trouble = DROP if local.done.is_set() else local.next_trouble(ask["text"])
        if trouble in (DROP, HANG):
            if trouble == HANG:
                local.done.wait()
            self.close_connection = True
            return self.connection.close()
        if trouble in (DRIP, FLOOD):
            return self.babble(b" " if trouble == DRIP else b" " * 2**16, 0.05 * (trouble == DRIP))
        if trouble == ECHO:
            return self.answer({"error": f"no access for {self.headers['Authorization']}"}, 403)
        if trouble is not None:
            return self.answer({"error": "told to fail"}, int(trouble))
        self.complete(prompt, ask)

    def babble(self, part: bytes, pause: float) -> None:
        """Send the same again and again, for as long as the client is connected."""
        self.send_response(200)
        self.send_header("Content-Length", str(2**40))
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while not self.local.done.wait(pause):
                self.wfile.write(part)

    def complete(self, prompt: list[int], ask: dict) -> None:
        local = self.local
        with local.lock:
            local.at_once += 1
            local.most = max(local.most, local.at_once)
        if local.everybody and not ask["greeting"]:
            local.everybody.wait()
        with local.lock:
            local.at_once -= 1
            local.answered += not ask["greeting"]
        for words, body in local.raw.items():
            if words in ask["text"]:
                return self.send_body(body)
        usage = {"prompt_tokens": len(prompt) + local.misread}
        self.answer({"choices": [local.choice(prompt, ask)], "usage": usage})

    def answer(self, content: dict, status: int = 200) -> None:
        self.send_body(json.dumps(content).encode(), status)

    def send_body(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """No access log in a test's output."""
