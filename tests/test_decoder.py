"""The decoder gives plain decoding's tokens, whatever drafts, neighbours and row count."""

import pytest
import torch
from random_models import VOCAB, random_head, random_target

from specdraft.eval.decoder import Decoder, Request
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lookup import PromptLookup
from specdraft.eval.static import StaticTree
from specdraft.eval.tree import Topology, Tree
from specdraft.recipes.errors import DataError, TargetError

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0), (0,) * 5]


@pytest.fixture(scope="module")
def target():
    return random_target()


def prompts(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (3 + 5 * n,), generator=generator).tolist() for n in range(count)]


def plain_tokens(target, prompt: list[int], length: int) -> list[int]:
    """One token at a time, the whole sequence again every time, no cache."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def decode(decoder: Decoder, requests: list[Request]) -> list[list[int]]:
    return [c.tokens for c in sorted(decoder.run(requests), key=lambda c: c.index)]


def drafters(target, rows: int):
    yield "plain", None
    yield "lookup", PromptLookup(1, 5, rows)
    for fusion in ("lstm", "linear"):
        for k, layers in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1)):
            head = random_head(target, k, fusion=fusion, layers=layers)
            tree = StaticTree(PATHS, k)
            yield f"{fusion} k={k} x{layers}", FalconDrafter(head, target, tree, rows, 128)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_greedy_output_is_that_of_the_model_without_a_cache(target, rows):
    requests = [Request(prompt, 17) for prompt in prompts()]
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]
    for name, drafter in drafters(target, rows):
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


@pytest.mark.parametrize("rows", [1, 3])
def test_seeded_sampling_does_not_depend_on_drafter_or_neighbours(target, rows):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts())]
    expected = [decode(Decoder(target, None, 1, 128), [request])[0] for request in requests]
    for name, drafter in drafters(target, rows):
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


def test_a_run_ends_at_the_first_end_of_sequence_token(target):
    prompt = prompts()[2]
    free = plain_tokens(target, prompt, 12)
    stop = free[5]
    target.model.generation_config.eos_token_id = [stop]
    try:
        for name, drafter in drafters(target, 1):
            out = decode(Decoder(target, drafter, 1, 128), [Request(prompt, 12)])[0]
            assert out == free[: free.index(stop) + 1], name
    finally:
        target.model.generation_config.eos_token_id = None


class Foreseeing:
    """A drafter that knows the answer: at each of three depths a wrong token, then the right."""

    forwards, max_nodes = 0, 6
    topology = Topology([-1, 0, 0, 2, 2, 4, 4])

    def __init__(self, answer: list[int]):
        self.answer, self.said = answer, 0

    def start(self, row, request):
        self.prompt = len(request.prompt)

    def observe(self, row, tokens, features):
        assert len(tokens) == len(features)
        self.said += len(tokens)

    def draft(self, rows):
        said = self.said - self.prompt + 1
        right = self.answer[said : said + 3]
        return [Tree(self.topology, torch.tensor([t for r in right for t in ((r + 1) % VOCAB, r)]))]


def test_a_right_draft_is_accepted_to_its_end_and_counted(target):
    prompt = prompts()[1]
    answer = plain_tokens(target, prompt, 24)
    decoder = Decoder(target, Foreseeing(answer), 1, 128)
    done = next(decoder.run([Request(prompt, 17)]))
    assert done.tokens == answer[:17]
    assert [step.emitted for step in done.steps] == [1, 4, 4, 4, 4]
    assert [step.accepted for step in done.steps] == [0, 3, 3, 3, 3]
    assert {(step.drafted, step.depth) for step in done.steps[1:]} == {(6, 3)}
    assert decoder.timing.forwards == 5


def test_the_callers_model_keeps_its_attention_and_its_outputs(target):
    ids = torch.tensor([prompts()[3]])
    before = target.model(ids).logits
    list(Decoder(target, None, 1, 64).run([Request(prompts()[0], 4)]))
    assert target.model.config._attn_implementation == "sdpa"
    assert torch.equal(target.model(ids).logits, before)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "prompt is empty"),
        (Request([1, VOCAB], 4), "outside the vocabulary"),
        (Request([1], 400), "exceed the capacity of 64"),
        (Request([1], 0), "give at least 1"),
        (Request([1], 4, temperature=-1.0), "temperature -1"),
        (Request([1], 4, top_p=0.0), "top_p 0"),
    ],
)
def test_a_bad_request_is_named(target, request_, message):
    with pytest.raises(DataError, match=message) as error:
        list(Decoder(target, None, 1, 64).run([Request([1], 2), request_]))
    assert "request 1" in str(error.value)


def test_a_head_of_another_target_is_refused_with_both_names(target):
    other = random_target(seed=5)
    with pytest.raises(TargetError, match=r"random-5.*random-0"):
        FalconDrafter(random_head(other), target, StaticTree(PATHS, 2))
