"""Answers from a server are the target's own, whatever fails, and none is asked twice."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import small_tokenizer as st
from commands import ROOT, run_here, start
from local_server import DRIP, DROP, ECHO, FLOOD, HANG, LocalServer
from test_tokens import chats, recipe, write
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.data import server as server_module
from specdraft.data.answers import Ask
from specdraft.data.fingerprint import of_settings
from specdraft.data.server import Server, UnansweredError
from specdraft.data.store.token_builder import build_tokens, token_settings
from specdraft.data.store.tokens import TokenCache
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

CHATS = 12
TINY = ROOT / "models" / "tiny"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("tiny")


@pytest.fixture
def server(target: Target) -> Iterator[LocalServer]:
    with LocalServer(target.tokenizer) as server:
        yield server


@pytest.fixture(params=[True, False], ids=["ids", "text"])
def either(target: Target, request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    with LocalServer(target.tokenizer, takes_ids=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list:
    """All rows when nothing fails."""
    with LocalServer(target.tokenizer) as server:
        return contents(build(rewriting(tmp_path_factory.mktemp("whole"), server), target))


def rewriting(folder: Path, local: LocalServer, **data) -> Recipe:
    source = write(folder / "a.jsonl", chats(CHATS))
    served = {"answers": "target", "server": local.url, "server_model": "parrot"}
    quick = {"max_new_tokens": 60, "batch_rows": 4, "retries": 2}
    return recipe(folder, source, **{**served, **quick, **data})


def build(settings: Recipe, target: Target) -> TokenCache:
    return build_tokens(settings, target.tokenizer, Server(settings, target), target.identity())


def contents(cache: TokenCache) -> list[tuple[list[int], list[bool]]]:
    rows = (cache[n] for n in range(len(cache)))
    return [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in rows]


def rejects(cache: TokenCache) -> list[dict]:
    return [json.loads(line) for line in (cache.directory / "rejects.jsonl").open()]


# A real server


# Constants, as environment variables only work before huggingface_hub is imported.
SERVE = """
import runpy, sys
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = True
huggingface_hub.constants.HF_HUB_CACHE, *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def transformers_serve(tmp_path: Path) -> Iterator[str]:
    """The bundled target behind `transformers serve`; the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (script := tmp_path / "serve.py").write_text(SERVE)
    command = [Path(sys.executable).with_name("transformers"), "serve", TINY, "--port", port]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    process = start(script, tmp_path / "hub", *command)
    try:
        for _ in range(900):
            try:
                httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx2.TransportError:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


# A single test, as the server takes seconds to start.
def test_transformers_serve_answers_as_our_decoder_does(transformers_serve, tmp_path, target):
    def rows(*overrides: str) -> list[tuple[list[int], list[bool]]]:
        folder = tmp_path / str(len(overrides))
        done = run_here(
            "data/cache.py", "recipes/tiny.yaml", "data.answers=target", "data.limit=6",
            "data.max_new_tokens=40", f"data.cache_dir={folder}", *overrides,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (directory,) = folder.glob("tokens-*")
        return contents(TokenCache.open(directory))

    ours = rows()
    theirs = rows(f"data.server={transformers_serve}", f"data.server_model={TINY}")
    assert theirs == ours
    assert len(ours) == 6
    assert len({len(ids) for ids, _ in ours}) > 1
    # It samples, and not only from the top 50: the model's generation config says greedy, and 50
    # is generate()'s default.
    settings = recipe(
        tmp_path, "tiny", answers="target", server=transformers_serve, server_model=str(TINY)
    )
    prompt = target.tokenizer("<|user|>What is new?<|end|><|assistant|>")["input_ids"]
    asks = [Ask(prompt, max_new_tokens=1, temperature=1000.0, seed=seed) for seed in range(40)]
    said = {tuple(answer.tokens) for _, answer in Server(settings, target)(asks)}
    assert len(said) > 33  # 40 draws of 50 equally likely tokens give 28 different ones


# A server in trouble


@pytest.mark.parametrize(
    "trouble", [[500, 500], [429], [503, 429], [DROP], [DROP, 500], [HANG]], ids=str
)
def test_temporary_failures_are_retried(server, target, tmp_path, whole, trouble):
    server.trouble["number 3"] = list(trouble)
    cache = build(rewriting(tmp_path, server, timeout=1.0 if HANG in trouble else 600.0), target)
    assert contents(cache) == whole
    assert len(server.prompts()) == 2 * CHATS + len(trouble)
    assert rejects(cache) == []


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ([400], "status 400"),
        ([500] * 3, 'status 500: {"error": "told to fail"}, after 2 retries'),
        ([DROP] * 3, "RemoteProtocolError"),
        ([HANG] * 3, "no whole response within data.timeout = 1 seconds, after 2 retries"),
        ([DRIP] * 3, "no whole response within data.timeout = 1 seconds, after 2 retries"),
        ([FLOOD], f"the response has more than {2**20 + 60 * 2**10} bytes"),
    ],
    ids=str,
)
def test_lasting_failures_lose_only_their_row(server, target, tmp_path, whole, trouble, reason):
    server.trouble["number 3"] = list(trouble)
    slow = HANG in trouble or DRIP in trouble
    cache = build(rewriting(tmp_path, server, timeout=1.0 if slow else 600.0), target)
    assert contents(cache) == whole[:3] + whole[4:]
    (reject,) = rejects(cache)
    assert (reject["file"], reject["line"]) == (str(tmp_path / "a.jsonl"), 4)
    assert reject["reason"].startswith("no answer: ")
    assert reason in reject["reason"]
    assert sum("number 3" in prompt for prompt in server.prompts()) == len(trouble)


def test_a_row_whose_second_answer_fails_is_rejected_entirely(server, target, tmp_path, whole):
    server.trouble["Sure?"] = [400]
    cache = build(rewriting(tmp_path, server, batch_rows=1), target)
    assert contents(cache) == whole[1:]
    assert [reject["line"] for reject in rejects(cache)] == [1]


def test_many_failures_are_an_error_and_only_they_are_asked_again(server, target, tmp_path):
    server.trouble |= {"number 3": [400], "number 7": [400]}
    settings = rewriting(tmp_path, server)
    with pytest.raises(DataError, match=r"2 of 12 rows got no answer, more than 10%.*:4: status"):
        build(settings, target)
    before = len(server.prompts())
    assert len(build(settings, target)) == CHATS
    assert len(server.prompts()) == before + 4  # two rows, two answers


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"text": "", "token_ids": [], "finish_reason": "length"}, "the answer is empty"),
        ({"text": None, "token_ids": None}, "is no completion"),
        ({"text": 5, "token_ids": None}, "is no completion"),
        ({"text": ["I", "heard"], "token_ids": None}, "is no completion"),
        ({"text": "\ud800", "token_ids": None}, "is no completion"),
        ({"token_ids": ["7", "8"]}, "is no completion"),
        ({"token_ids": [7.0, 8.0]}, "is no completion"),
        ({"token_ids": [True, 3]}, "is no completion"),
        ({"token_ids": [7, None]}, "is no completion"),
        ({"token_ids": {"7": 8}}, "is no completion"),
        ({"token_ids": "78"}, "is no completion"),
        ({"finish_reason": ["stop"]}, "finish_reason ['stop']"),
        ({"finish_reason": "x" * 10**5}, "more characters"),
        ({"token_ids": [7] * 61}, "the answer has 61 tokens, and 60 were asked for"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_answers_lose_only_their_row(either, target, tmp_path, odd, reason):
    either.odd["number 3"] = odd
    (reject,) = rejects(build(rewriting(tmp_path, either), target))
    assert reject["line"] == 4
    assert reason in reject["reason"]


def test_an_answer_longer_than_requested_is_cut_and_ends_its_row(target, tmp_path):
    with LocalServer(target.tokenizer, takes_ids=False) as server:
        server.odd["number 3"] = {"text": "I heard " * 100, "finish_reason": "stop"}
        cache = build(rewriting(tmp_path, server), target)
    ids, mask = contents(cache)[3]
    assert sum(mask) == 60
    assert ids[-1] not in target.eos_ids
    assert sum("number 3" in prompt for prompt in server.prompts()) == 1  # no second turn


def test_a_deeply_nested_response_loses_only_its_row(server, target, tmp_path):
    server.raw["number 3"] = b"[" * 10**5
    (reject,) = rejects(build(rewriting(tmp_path, server), target))
    assert "is no completion" in reject["reason"]


def test_a_server_that_dies_ends_the_run_at_once_and_loses_nothing(server, target, tmp_path):
    server.dies_after = 7
    with pytest.raises(DataError, match=rf"{server.url}: no server answers .*answers are kept"):
        build(rewriting(tmp_path, server), target)
    (answers,) = (tmp_path / "cache").glob("tokens-*.partial/answers-0.jsonl")
    kept = sum(json.loads(line)["failure"] is None for line in answers.open())
    assert kept > 3
    with LocalServer(target.tokenizer) as other:
        cache = build(rewriting(tmp_path, other), target)
        assert len(other.prompts()) == 2 * CHATS - kept
    assert len(cache) == CHATS


def test_a_missing_server_is_an_error_before_anything_starts(target, tmp_path):
    with LocalServer(target.tokenizer) as gone:
        settings = rewriting(tmp_path, gone, retries=9)
    with pytest.raises(DataError, match=rf"{gone.url}: no server answers \(.*vllm serve parrot"):
        build(settings, target)


# Requests, and what counts as an answer


def test_both_kinds_of_servers_give_the_same_rows(either, target, tmp_path, whole):
    assert contents(build(rewriting(tmp_path, either), target)) == whole
    assert {isinstance(ask["prompt"], str) for ask in either.asks} == {not either.takes_ids}


def test_requests_ask_for_the_plain_distribution_without_cuts(either, target, tmp_path):
    build(rewriting(tmp_path, either, samples=2, temperature=0.8), target)
    greedy, sampled = (
        [ask for ask in either.asks[1:] if ask["temperature"] == warmth] for warmth in (0.0, 0.8)
    )
    assert len(greedy) == len(sampled) == 2 * CHATS
    assert len({ask["seed"] for ask in sampled}) == 2 * CHATS
    for ask in greedy + sampled:
        assert ask["top_p"] == 1.0
        if either.takes_ids:
            assert (ask["top_k"], ask["min_p"], ask["repetition_penalty"]) == (-1, 0.0, 1.0)
        else:
            config = json.loads(ask["generation_config"])
            sampling = {"do_sample": ask in sampled, "top_k": 0, "repetition_penalty": 1.0}
            assert config == {**sampling, "eos_token_id": [3]}


def test_token_ids_from_the_server_are_kept_as_they_are(server, target, tmp_path):
    spelled = [target.tokenizer.encode(letter)[0] for letter in "water"]
    assert target.tokenizer.encode("water") != spelled
    server.odd["number"] = {"text": "water", "token_ids": [*spelled, 3]}
    cache = build(rewriting(tmp_path, server), target)
    (ids, mask), *_ = contents(cache)
    said = [token for token, own in zip(ids, mask, strict=True) if own]
    assert said[-6:] == [*spelled, 3]


@pytest.mark.parametrize("ids", [[1, 2048, 3], [-1, 3]])
def test_ids_outside_the_vocabulary_are_refused(server, target, tmp_path, ids):
    server.odd["number 3"] = {"token_ids": ids}
    (reject,) = rejects(build(rewriting(tmp_path, server), target))
    assert "the server serves another model" in reject["reason"]


@pytest.mark.parametrize("template", [st.LLAMA2, st.CHATML], ids=["with bos", "without"])
def test_a_prompt_whose_text_would_give_other_ids_is_not_sent_as_text(tmp_path, template):
    tokenizer = st.small_tokenizer(template)
    bos = ("<s>", tokenizer.bos_token_id)
    adds_bos = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = adds_bos
    size = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=1, **size)
    target = Target(LlamaForCausalLM(config), tokenizer, "small")
    with LocalServer(tokenizer, takes_ids=False) as server:
        if template == st.LLAMA2:
            assert len(build(rewriting(tmp_path, server), target)) == CHATS
            assert server.asks[1]["prompt"].startswith("[INST] Question")
        else:
            with pytest.raises(DataError, match=r"12 of 12 rows .* as text this prompt has other"):
                build(rewriting(tmp_path, server), target)


def test_a_truncated_answer_ends_its_row_even_if_its_text_has_fewer_tokens(target, tmp_path):
    with LocalServer(target.tokenizer, takes_ids=False) as server:
        server.odd["number 3"] = {"text": "I heard", "finish_reason": "length"}
        cache = build(rewriting(tmp_path, server), target)
    ids, mask = contents(cache)[3]
    assert ids[-sum(mask) :] == target.tokenizer.encode("I heard")
    assert sum("number 3" in prompt for prompt in server.prompts()) == 1


def test_another_tokenizer_behind_the_server_is_noticed(either, target, tmp_path):
    either.misread = 1
    with pytest.raises(DataError, match=r"read 2 prompt tokens, .* made 1: it serves another"):
        build(rewriting(tmp_path, either), target)


@pytest.mark.parametrize("data", [{"server_model": "crow"}, {"server": "{url}/v1"}], ids=str)
def test_a_server_without_the_model_or_endpoint_is_an_error_at_once(server, target, tmp_path, data):
    data = {key: value.format(url=server.url) for key, value in data.items()}
    with pytest.raises(DataError, match=r"does not complete a prompt as .*status 404: .*there is"):
        build(rewriting(tmp_path, server, **data), target)
    assert server.asks == []


def test_the_api_key_comes_from_the_environment(target, tmp_path, monkeypatch):
    with LocalServer(target.tokenizer, key="sk-1") as server:
        settings = rewriting(tmp_path, server)
        with pytest.raises(DataError, match=r"status 401.*OPENAI_API_KEY"):
            build(settings, target)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
        assert len(build(settings, target)) == CHATS


def test_an_echoed_api_key_is_neither_stored_nor_shown(target, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "my-own-secret")
    with LocalServer(target.tokenizer, key="my-own-secret") as server:
        server.trouble["number 3"] = [ECHO]
        server.odd["number 4"] = {"text": "it is my-own-secret", "token_ids": None}
        server.odd["number 5"] = {"finish_reason": "my-own-secret"}
        with pytest.raises(DataError) as refusal:
            build(rewriting(tmp_path, server), target)
    assert "my-own-secret" not in str(refusal.value)
    (answers,) = (tmp_path / "cache").glob("tokens-*.partial/answers-0.jsonl")
    assert "no access for Bearer ***" in answers.read_text()
    assert "my-own-secret" not in answers.read_text()


@pytest.mark.parametrize("as_ids", [True, False])
def test_an_encoded_api_key_is_not_stored(target, tmp_path, monkeypatch, as_ids):
    """As token ids, or with JSON escapes."""
    monkeypatch.setenv("OPENAI_API_KEY", "number")
    ids = target.tokenizer.encode("a number", add_special_tokens=False)
    choice = {"text": "a number", "finish_reason": "stop", "token_ids": ids if as_ids else None}
    reply = {"choices": [choice], "usage": {"prompt_tokens": 2}}
    text = json.dumps(reply).replace("number", "n\\u0075mber")
    with LocalServer(target.tokenizer) as server:
        asked = Server(rewriting(tmp_path, server), target)
        with pytest.raises(UnansweredError, match="repeats the key"):
            asked._read(text, Ask([4, 5], 99, 0.0, 0))


def test_the_answers_file_is_private_and_its_invalid_lines_are_asked_again(
    server, target, tmp_path, whole
):
    server.dies_after = 7
    with pytest.raises(DataError):
        build(rewriting(tmp_path, server), target)
    (answers,) = (tmp_path / "cache").glob("tokens-*.partial/answers-0.jsonl")
    assert answers.stat().st_mode & 0o777 == 0o600
    row = json.loads(answers.read_text().splitlines()[0])
    poison = [
        {**row, "tokens": ["7"]}, {**row, "tokens": [7.5]}, {**row, "tokens": None},
        {**row, "slot": [0]}, {**row, "ended": "yes"}, {**row, "more": 1}, [], 7, None,
    ]  # fmt: skip
    answers.chmod(0o644)
    answers.write_text("".join(f"{json.dumps(one)}\n" for one in poison) + "no JSON\n")
    with LocalServer(target.tokenizer) as other:
        assert contents(build(rewriting(tmp_path, other), target)) == whole
        assert len(other.prompts()) == 2 * CHATS


def test_at_most_batch_rows_requests_run_at_once(server, target, tmp_path):
    server.everybody = threading.Barrier(4, timeout=30)
    build(rewriting(tmp_path, server, batch_rows=4), target)
    assert server.most == 4


def test_another_server_model_makes_another_cache_but_another_port_does_not(target, tmp_path):
    with LocalServer(target.tokenizer) as server, LocalServer(target.tokenizer) as moved:
        first = build(rewriting(tmp_path, server), target)
        assert build(rewriting(tmp_path, moved), target).directory == first.directory
        assert moved.asks == []
        for other in ({"server_model": None}, {"server": None, "server_model": None}):
            other = rewriting(tmp_path, server, **other)
            settings = token_settings(other, target.tokenizer, target.identity())
            assert of_settings(settings) != first.key


# Interrupted and killed


@pytest.fixture
def interruptible():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore it
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("turns", range(6))
def test_ctrl_c_at_any_turn_of_the_event_loop_keeps_answers(
    turns, server, target, tmp_path, whole, monkeypatch, interruptible
):
    def press_after(turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(press_after, turns - 1)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    def read(self, text, ask):
        seen.append(ask)
        if len(seen) == 6:
            press_after(turns)
        return original(self, text, ask)

    seen, original = [], Server._read
    monkeypatch.setattr(Server, "_read", read)
    settings = rewriting(tmp_path, server)
    with pytest.raises(KeyboardInterrupt, match=r"answers are kept"):
        build(settings, target)
    assert contents(build(settings, target)) == whole


def test_ctrl_c_ends_even_a_hanging_run(server, target, tmp_path, whole, interruptible):
    def press() -> None:
        while server.trouble["number 4"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    server.trouble["number 4"] = [HANG]
    settings = rewriting(tmp_path, server)
    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt, match=r"answers are kept"):
        build(settings, target)
    assert contents(build(settings, target)) == whole


def test_a_killed_run_resumes_with_only_the_missing_answers(server, tmp_path):
    source = write(tmp_path / "a.jsonl", chats(CHATS))
    command = [
        "data/cache.py", "recipes/tiny.yaml", f"data.sources=[{source}]", "data.answers=target",
        f"data.server={server.url}", "data.server_model=parrot", "data.holdout=0",
        f"data.cache_dir={tmp_path / 'cache'}", "data.batch_rows=2",
    ]  # fmt: skip
    server.trouble["number 9"] = [HANG]
    process = start(*command)
    while server.trouble["number 9"]:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = len(server.prompts())
    assert run_here(*command).returncode == 0
    assert len(set(server.prompts())) == 2 * CHATS
    assert 2 * CHATS <= len(server.prompts()) <= 2 * CHATS + 2  # requests in flight are repeated
    assert before > 8
