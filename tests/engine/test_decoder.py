"""The decoder gives plain decoding's tokens, whatever the drafts, neighbours and row count."""

import re
from dataclasses import replace

import pytest
import torch
from decoding import PATHS, Foreseeing, completions, decode, plain_tokens, prompts
from random_models import VOCAB, random_head, random_target
from small_tokenizer import small_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.row import tokens_until_stop
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, RecipeError, TargetError


@pytest.fixture(scope="module")
def target():
    return random_target()


HEADS = {"lstm": ((1, 1), (2, 2), (4, 1)), "linear": ((2, 1), (3, 2))}  # k and layers
COUPLED = (("both", "recurrent", 3), ("newest", "markov", 4))


def drafters(target, rows: int):
    yield "plain", None
    yield "lookup", PromptLookup(1, 5, rows)
    for fusion, sizes in HEADS.items():
        for k, layers in sizes:
            head = random_head(target, k, fusion=fusion, layers=layers)
            tree = StaticTree(PATHS, k)
            yield f"{fusion} k={k} x{layers}", FalconDrafter(head, target, tree, rows, 128)
    for reads, coupling, k in COUPLED:
        head = random_head(target, k, fusion="linear", reads=reads, coupling=coupling)
        drafter = FalconDrafter(head, target, StaticTree(PATHS, k), rows, 128)
        yield f"{reads} {coupling} k={k}", drafter


def some_drafters(target, rows: int):
    """One for each way of moving rows and observing prompts, which a head's fusion and number of
    layers do not change."""
    kept = {"plain", "lookup", "lstm k=2 x2", "both recurrent k=3"}
    yield from (found for found in drafters(target, rows) if found[0] in kept)


def foreseen(target, rows: int, prompt: list[int], answer: list[int]):
    """All drafters, and one whose accepted paths run past any end token within the answer."""
    yield from drafters(target, rows)
    yield "foreseen", Foreseeing({tuple(prompt): answer})


@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_output_equals_that_of_the_model_without_a_cache(target, rows):
    requests = [Request(prompt, 17) for prompt in prompts()]
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]
    for name, drafter in drafters(target, rows):
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


@pytest.mark.parametrize("rows", [1, 3])
def test_seeded_sampling_does_not_depend_on_drafter_or_neighbours(target, rows):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts())]
    expected = decode(Decoder(target, None, 1, 128), requests)  # one after the other
    for name, drafter in drafters(target, rows):
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


def test_an_answer_ends_at_the_first_end_of_sequence_token(target):
    prompt = prompts()[2]
    free = plain_tokens(target, prompt, 12)
    stop = free[5]
    target.model.generation_config.eos_token_id = [stop]
    try:
        for name, drafter in foreseen(target, 1, prompt, free):
            decoder, requests = Decoder(target, drafter, 1, 128), [Request(prompt, 12)]
            out = decode(decoder, requests, accepts=name == "foreseen")[0]
            assert out == free[: free.index(stop) + 1], name
    finally:
        target.model.generation_config.eos_token_id = None


def test_a_correct_draft_is_accepted_in_full_and_counted(target):
    prompt = prompts()[1]
    answer = plain_tokens(target, prompt, 24)
    decoder = Decoder(target, Foreseeing({tuple(prompt): answer}), 1, 128)
    done = next(decoder.run([Request(prompt, 17)]))
    assert done.tokens == answer[:17]
    assert [step.emitted for step in done.steps] == [1, 4, 4, 4, 4]
    assert [step.accepted for step in done.steps] == [0, 3, 3, 3, 3]
    assert {(step.drafted, step.depth) for step in done.steps[1:]} == {(6, 3)}
    assert decoder.timing.forwards == 5


def test_decoding_leaves_the_callers_attention_implementation_and_logits_unchanged(target):
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
        (Request([1], 4, temperature=float("nan")), "temperature nan"),
        (Request([1], 4, top_p=0.0), "top_p 0"),
        (Request([1], 4, stop=("x",)), "need a tokenizer"),
    ],
)
def test_a_bad_request_is_refused_with_its_index_and_others_go_on(target, request_, message):
    good = [Request(prompt, 5) for prompt in prompts(3)]
    alone = decode(Decoder(target, None, 1, 64), good)
    for rows in (1, 3):
        done = list(Decoder(target, None, rows, 64).run([good[0], request_, *good[1:]]))
        refused = next(c for c in done if c.index == 1)
        assert (refused.reason, refused.tokens) == ("refused", [])
        assert isinstance(refused.error, DataError)
        assert re.search(f"request 1: .*{message}", str(refused.error))
        assert {c.index: c.tokens for c in done if c.index != 1} == dict(
            zip((0, 2, 3), alone, strict=True)
        )


def test_a_request_beyond_the_targets_positions_is_refused_even_if_the_cache_has_room(target):
    context, text = target.context, prompts()[1]
    fits = Request((text * context)[: context - 4], 4)
    beyond = [replace(fits, max_new_tokens=5), replace(fits, prompt=fits.prompt * 2)]
    done = list(Decoder(target, None, 1, 4 * context).run([fits, *beyond]))
    assert [c.reason for c in done] == ["length", "refused", "refused"]
    for c in done[1:]:
        assert f"exceed the {context} positions of {target.name}" in str(c.error)


@pytest.mark.parametrize("fault", ["start", "draft", "observe"])
def test_a_drafter_that_raises_loses_drafts_but_changes_no_output(target, fault):
    requests = [Request(prompt, 17) for prompt in prompts()]
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]

    class Failing(PromptLookup):
        calls = 0

        def fail(self, name):
            self.calls += name == fault
            if name == fault and self.calls == 3:
                raise RuntimeError("planted")

        def start(self, row, request):
            self.fail("start")
            super().start(row, request)

        def draft(self, rows):
            self.fail("draft")
            return super().draft(rows)

        def observe(self, row, tokens, features):
            self.fail("observe")
            super().observe(row, tokens, features)

    for rows in (1, 3):
        with pytest.warns(RuntimeWarning, match="planted") as caught:
            done = list(Decoder(target, Failing(1, 5, rows), rows, 128).run(requests))
        assert len(caught) == 1
        assert {completion.index: completion.tokens for completion in done} == dict(
            enumerate(expected)
        )
        failed = [completion for completion in done if completion.fallback]
        assert [completion.fallback for completion in failed] == ["RuntimeError: planted"] * (
            len(failed)
        )
        assert 1 <= len(failed) <= rows  # the others got drafts to their end


def test_after_a_failed_draft_call_none_of_its_rows_is_drafted_for_again(target):
    """Its state for every row of the failed call is unreliable, not only for the first one."""

    class Failing(PromptLookup):
        def draft(self, rows):
            asked.append(rows)
            raise RuntimeError("planted")

    asked, requests = [], [Request(prompt, 9) for prompt in prompts(3)]
    with pytest.warns(RuntimeWarning, match="request 0, 1, 2 goes on by plain decoding"):
        done = list(Decoder(target, Failing(1, 5, 3), 3, 128).run(requests))
    assert [one.fallback for one in done] == ["RuntimeError: planted"] * 3
    assert asked == [[0, 1, 2]]


def test_an_abandoned_run_leaves_no_state_to_the_next(target):
    decoder, (first, second) = Decoder(target, PromptLookup(1, 5, 2), 2, 128), prompts(2)
    given_up = decoder.stream([Request(first, 40), Request(second, 40)])
    next(given_up)
    given_up.close()
    (done,) = decoder.run([Request(second, 9)])
    assert (done.index, done.tokens) == (0, plain_tokens(target, second, 9))


def test_a_batched_forward_is_counted_once(target):
    decoder = Decoder(target, None, 3, 128)
    list(decoder.run([Request(prompt, 4) for prompt in prompts(3)]))
    assert decoder.timing.forwards == 4


@pytest.mark.parametrize("prefill", [1, 7, 1000])
def test_reading_prompts_in_chunks_and_queueing_requests_changes_no_output(target, prefill):
    """More requests than rows, prompts of 3 to 28 tokens, mixed settings, lengths and seeds."""
    requests = [
        Request(prompt, 4 + 3 * n, temperature=(0.0, 1.2)[n % 2], top_p=0.9, seed=n)
        for n, prompt in enumerate(prompts())
    ]
    expected = decode(Decoder(target, None, 1, 128), requests)  # one after the other
    for name, drafter in some_drafters(target, 3):
        decoder = Decoder(target, drafter, 3, 128, prefill)
        reads, forward = [], decoder.packed.forward

        def watch(ids, positions, segments, reads=reads, forward=forward):
            reads.append(sum(s.count for s in segments if s.start == 0 or s.count > 11))
            return forward(ids, positions, segments)

        decoder.packed.forward = watch
        assert decode(decoder, requests) == expected, name
        assert decode(decoder, requests[::-1]) == expected[::-1], name
        assert max(reads) <= max(prefill, 3 * 11), name


class Listening(Foreseeing):
    """Keeps the tokens and chunks of features it observes for each request."""

    def __init__(self, answers, from_tokens: bool):
        super().__init__(answers)
        self.from_tokens, self.heard, self.row = from_tokens, [], {}

    def start(self, row, request):
        super().start(row, request)
        self.row[row] = [], []
        self.heard.append(self.row[row])

    def move(self, row, to):
        super().move(row, to)
        self.row[to] = self.row.pop(row)

    def observe(self, row, tokens, features):
        super().observe(row, tokens, features)
        assert len(tokens) == len(features) > 0
        self.row[row][0].extend(tokens)
        self.row[row][1].append(features.clone())


@pytest.mark.parametrize("from_tokens", [False, True])
@pytest.mark.parametrize("prefill", [1, 7, 1000])
def test_a_drafter_observes_every_feature_and_the_token_after_it(target, prefill, from_tokens):
    """However prompts are chunked; a drafter that uses only tokens gets no prompt features."""
    answers = {tuple(prompt): plain_tokens(target, prompt, 24) for prompt in prompts()}
    drafter = Listening(answers, from_tokens)
    requests = [Request(prompt, 13) for prompt in prompts()]
    done = completions(Decoder(target, drafter, 3, 128, prefill), requests)
    assert len(drafter.heard) == len(done) == 6
    for request, (tokens, features) in zip(requests, drafter.heard, strict=True):
        whole = [*request.prompt, *answers[tuple(request.prompt)]]
        first = len(request.prompt) if from_tokens else 1
        assert len(tokens) >= len(request.prompt) + 13 - first
        assert tokens == whole[first : first + len(tokens)]
        expected = target.features(torch.tensor([whole]))[0, first - 1 :][: len(tokens)]
        torch.testing.assert_close(torch.cat(features), expected, atol=1e-5, rtol=1e-4)


def test_streamed_updates_add_up_to_the_completions(target):
    requests = (Request(prompt, 9) for prompt in prompts())  # a queue, read as rows become free
    tokens, done = {}, {}
    for update in Decoder(target, PromptLookup(1, 5, 2), 2, 128).stream(requests):
        tokens.setdefault(update.index, []).extend(update.tokens)
        assert update.index not in done
        if update.completion:
            done[update.index] = update.completion
    assert tokens == {index: completion.tokens for index, completion in done.items()}
    assert {completion.reason for completion in done.values()} == {"length"}
    assert sum(step.accepted for completion in done.values() for step in completion.steps) > 0


def test_a_request_may_have_its_own_end_tokens(target):
    prompt = prompts()[2]
    free = plain_tokens(target, prompt, 12)
    ends = frozenset([free[3]])
    first = free.index(free[3]) + 1
    for name, drafter in foreseen(target, 2, prompt, free):
        requests = [Request(prompt, 12, eos_ids=ends), Request(prompt, 12)]
        done = completions(Decoder(target, drafter, 2, 128), requests, name == "foreseen")
        assert [c.tokens for c in done] == [free[:first], free], name
        assert [c.reason for c in done] == ["eos", "length"], name


def test_an_end_token_at_the_length_limit_counts_as_an_end(target):
    """Otherwise a finished answer would count as truncated."""
    prompt = prompts()[2]
    free = plain_tokens(target, prompt, 12)
    count = free.index(free[5]) + 1
    for drafter in (None, Foreseeing({tuple(prompt): free})):
        request = Request(prompt, count, eos_ids=frozenset([free[5]]))
        (done,) = Decoder(target, drafter, 1, 128).run([request])
        assert (done.tokens, done.reason) == (free[:count], "eos")


def test_a_request_may_turn_off_the_targets_end_tokens(target):
    prompt = prompts()[2]
    free = plain_tokens(target, prompt, 12)
    target.model.generation_config.eos_token_id = [free[5]]
    try:
        requests = [Request(prompt, 12, eos_ids=frozenset()), Request(prompt, 12)]
        done = completions(Decoder(target, None, 2, 128), requests)
    finally:
        target.model.generation_config.eos_token_id = None
    assert [(c.tokens == free, c.reason) for c in done] == [(True, "length"), (False, "eos")]


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it():
    target = Target.load("tiny")
    ids = target.tokenizer("Once upon a time").input_ids
    text = ""
    free = decode(Decoder(target, None, 1, 128), [Request(ids, 40)])[0]
    text = target.tokenizer.decode(free)
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    texts = [target.tokenizer.decode(free[:n]) for n in range(len(free) + 1)]
    count = next(n for n, text in enumerate(texts) if stop in text)
    for drafter in (None, Foreseeing({tuple(ids): free})):
        request = Request(ids, 40, stop=("never said", stop))
        (done,) = completions(Decoder(target, drafter, 1, 128), [request])
        assert (done.tokens, done.reason) == (free[:count], "stop")
        (done,) = Decoder(target, drafter, 1, 128).run([replace(request, max_new_tokens=count)])
        assert (done.tokens, done.reason) == (free[:count], "stop")
    (done,) = Decoder(target, None, 1, 128).run([replace(request, stop=(stop, ""))])
    assert "stop strings need a tokenizer and must not be empty" in str(done.error)


def test_a_stop_string_is_found_across_any_number_of_steps():
    """It has three characters of three byte tokens each."""
    tokenizer, stop = small_tokenizer(), "\u65e5\u672c\u8a9e"
    before, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("So: ", stop))
    assert len(ids) == 9
    for known in range(9):
        fresh = [*ids[known:], *before]
        assert tokens_until_stop(tokenizer, before + ids[:known], fresh, ("no", stop)) == 9 - known
    assert tokens_until_stop(tokenizer, before + ids, before, ("no", stop)) is None


def test_a_stop_string_is_found_even_if_the_tokenizer_cleans_up_spaces():
    """Clean-up removes characters once the next token follows, so a step of several misses them."""
    vocab = {word: number for number, word in enumerate(["[UNK]", "yes", "?", "no"])}
    raw = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tidy = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=True)
    assert tidy.decode([1, 2, 3]) == "yes? no"
    assert tokens_until_stop(tidy, [1], [2, 3], (" ?",)) == 1


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("text", "stop"), [("hi\n\uc548\ub155", "\n"), ("\uc548\ub155" * 5 + "\n\nhi", "\n\n")]
)
def test_a_stop_string_is_found_next_to_byte_tokens_that_do_not_decode(size, text, stop):
    """With Llama 2's byte fallback one invalid byte breaks its whole run of byte tokens."""
    vocab = {
        name: n for n, name in enumerate(["<unk>", *"hi", *(f"<0x{b:02X}>" for b in range(256))])
    }
    raw = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = len(tokenizer.encode(text[: text.index(stop)] + stop, add_special_tokens=False))
    steps = [(n, ids[n : n + size]) for n in range(0, len(ids), size)]
    found = ((n, tokens_until_stop(tokenizer, ids[:n], fresh, (stop,))) for n, fresh in steps)
    assert next(n + count for n, count in found if count is not None) == ends


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [3, 0, 5, 2, 1, 4]])
def test_running_rows_stay_contiguous_once_the_queue_is_empty(target, order):
    """In whatever order they end, greedy and sampled; until then new requests take their rows."""
    requests = [
        Request(prompts()[n], 4 + 5 * order[n % 6], temperature=(0.0, 1.2)[n % 2], seed=n)
        for n in (0, 1, 2, 3, 4, 5, 2)
    ]
    expected = decode(Decoder(target, None, 1, 128), requests)  # one after the other
    for name, drafter in some_drafters(target, 6):
        decoder = Decoder(target, drafter, 6, 128)
        read, forward = [], decoder.packed.forward

        def watch(ids, positions, segments, read=read, forward=forward):
            read.append([segment.row for segment in segments])
            return forward(ids, positions, segments)

        decoder.packed.forward = watch
        done = list(decoder.run(requests))
        assert not any(completion.fallback for completion in done), name
        done.sort(key=lambda completion: completion.index)
        assert [completion.tokens for completion in done] == expected, name
        assert all(rows == [*range(len(rows))] for rows in read), name
        assert len({*map(len, read)}) > 3, name


def test_nothing_is_padded_and_the_cache_is_never_reallocated(target):
    requests = [Request(prompt, 17) for prompt in prompts()]
    decoder = Decoder(target, PromptLookup(1, 5, 3), 3, 128)
    where = decoder.packed.pool.tensors[0].data_ptr()
    decode(decoder, requests)
    assert decoder.timing.inputs > decoder.timing.forwards
    assert decoder.timing.input_pads == decoder.timing.cache_pads == 0
    assert decoder.packed.pool.tensors[0].data_ptr() == where


def test_a_head_of_another_target_is_refused_naming_both_targets(target):
    other = random_target(seed=5)
    with pytest.raises(TargetError, match=r"random-5.*random-0"):
        FalconDrafter(random_head(other), target, StaticTree(PATHS, 2))


def test_a_tree_with_ranks_beyond_the_vocabulary_is_refused(target):
    ranks = [(rank,) for rank in range(VOCAB + 1)]
    FalconDrafter(random_head(target), target, StaticTree(ranks[:VOCAB], 2))
    with pytest.raises(RecipeError, match="rank 23, and random-0 has 23 tokens"):
        FalconDrafter(random_head(target), target, StaticTree(ranks, 2))
