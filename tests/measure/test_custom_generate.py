"""`model.generate(.., custom_generate=Speculative(..))` equals generate or refuses clearly."""

import gc
import weakref

import pytest
import torch
from random_models import VOCAB, random_head, random_target
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdraft.eval.custom_generate import Speculative, falcon, no_drafter, prompt_lookup
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.methods import trained
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import DataError, RecipeError, TargetError

NEW = 12


@pytest.fixture
def model():
    return random_target().model


class Drafting(Speculative):
    """Fails if its drafter drafts nothing in a whole call, as the output alone does not show it."""

    def __init__(self, make):
        super().__init__(lambda *sizes: self.watched(make(*sizes)))

    def watched(self, drafter):
        draft = drafter.draft

        def counted(rows):
            trees = draft(rows)
            self.nodes += sum(len(tree.topology) - 1 for tree in trees)
            return trees

        drafter.draft = counted
        return drafter

    def __call__(self, *inputs, **options):
        self.nodes = 0
        output = super().__call__(*inputs, **options)
        assert self.nodes > 0
        return output


def methods(model):
    yield Speculative(no_drafter)
    yield Drafting(prompt_lookup(1, 4))
    yield Drafting(falcon(random_head(Target.of_model(model), 2), tree="tiny_k2"))
    deep = random_head(Target.of_model(model), 2, feature_layers=(1,))
    yield Drafting(falcon(deep, tree="tiny_k2"))


def batch(rows: int = 3) -> dict:
    """Left-padded prompts of 4, 9 and 14 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [4 + 5 * n for n in range(rows)]
    ids = torch.randint(1, VOCAB, (rows, lengths[-1]), generator=generator)
    mask = torch.arange(lengths[-1]) >= lengths[-1] - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def one() -> dict:
    return {"input_ids": batch()["input_ids"][2:]}


@pytest.mark.parametrize("inputs", [one(), batch()], ids=["batch 1", "padded batch 3"])
def test_greedy_tokens_equal_those_of_generate(model, inputs):
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    # An id that ends the last row midway, and other rows earlier, later or not at all.
    eos = int(free[-1, inputs["input_ids"].shape[1] + 4])
    for settings in (
        {"max_new_tokens": NEW},
        {"max_length": inputs["input_ids"].shape[1] + 7},
        {"max_new_tokens": NEW, "eos_token_id": eos},
        {"max_new_tokens": NEW, "eos_token_id": [eos, int(free[0, -3])], "pad_token_id": 0},
        {"max_new_tokens": NEW, "num_return_sequences": 1, "use_cache": False},
    ):
        expected = model.generate(**inputs, **settings)
        for method in methods(model):
            out = model.generate(**inputs, **settings, custom_generate=method)
            assert torch.equal(out, expected), settings


def test_int32_ids_give_int64_output_as_in_generate(model):
    ids = one()["input_ids"].int()
    expected = model.generate(ids, max_new_tokens=4)
    out = model.generate(ids, max_new_tokens=4, custom_generate=Speculative())
    assert torch.equal(out, expected)
    assert out.dtype == expected.dtype == torch.long


def test_an_end_token_of_the_call_replaces_the_models(model):
    free = model.generate(**one(), max_new_tokens=NEW)[0, -NEW:].tolist()
    model.generation_config.eos_token_id = free[3]
    method = Speculative(prompt_lookup())
    for settings in ({}, {"eos_token_id": free[6]}, {}):
        expected = model.generate(**one(), max_new_tokens=NEW, **settings)
        out = model.generate(**one(), max_new_tokens=NEW, custom_generate=method, **settings)
        assert torch.equal(out, expected)
        assert expected.shape[1] < one()["input_ids"].shape[1] + NEW


def test_sampled_tokens_equal_those_of_plain_seeded_decoding(model):
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 15, "top_p": 0.95}
    inputs, decoder = batch(), Decoder(Target.of_model(model), None, 1, 64)
    torch.manual_seed(11)
    seeds = torch.randint(2**63 - 1, (3,)).tolist()
    expected = []
    for ids, mask, seed in zip(inputs["input_ids"], inputs["attention_mask"], seeds, strict=True):
        request = Request(ids[mask.bool()].tolist(), NEW, 1.3, 15, 0.95, seed)
        expected.append(next(decoder.run([request])).tokens)
    for method in methods(model):
        torch.manual_seed(11)
        out = model.generate(**inputs, **settings, max_new_tokens=NEW, custom_generate=method)
        assert out[:, -NEW:].tolist() == expected
    again = model.generate(**inputs, **settings, max_new_tokens=NEW, custom_generate=method)
    assert again[:, -NEW:].tolist() != expected  # the generator has advanced


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [7, 9]]},
    "sequence_bias": {"sequence_bias": [[[1], 2.0]]},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3, 4, 5, 6]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(12)]},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": [*range(0, VOCAB, 2)]},
    "min_length": {"min_length": 20, "eos_token_id": [*range(0, VOCAB, 2)]},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.9), "eos_token_id": 5},
    "of the caller": {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(20, 3)])},
    "two at once": {"repetition_penalty": 1.6, "suppress_tokens": [1, 2]},
}


@pytest.mark.parametrize("inputs", [one(), batch()], ids=["batch 1", "padded batch 3"])
@pytest.mark.parametrize("settings", PROCESSED.values(), ids=PROCESSED)
def test_logits_processors_that_depend_only_on_a_rows_tokens_are_honoured(model, settings, inputs):
    settings = {"max_new_tokens": NEW, "pad_token_id": 0} | settings
    expected = model.generate(**inputs, **settings)
    for method in methods(model):
        out = model.generate(**inputs, **settings, custom_generate=method)
        assert torch.equal(out, expected)


def test_the_tested_logits_processors_change_the_output(model):
    """Otherwise the test above would pass for a decoder that ignores them."""
    free = model.generate(**batch(), max_new_tokens=NEW)
    for name in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "sequence_bias"):
        processed = model.generate(**batch(), **PROCESSED[name], max_new_tokens=NEW)
        assert not torch.equal(processed, free)


def test_sampling_with_a_processor_gives_the_same_tokens_for_all_methods(model):
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 15, "repetition_penalty": 1.8}
    rows = []
    for method in methods(model):
        torch.manual_seed(11)
        out = model.generate(**batch(), **settings, max_new_tokens=NEW, custom_generate=method)
        rows.append(out.tolist())
    assert all(row == rows[0] for row in rows)
    settings.pop("repetition_penalty")
    torch.manual_seed(11)
    free = model.generate(**batch(), **settings, max_new_tokens=NEW, custom_generate=Speculative())
    assert free.tolist() != rows[0]


def test_sampling_settings_default_to_those_of_generate(model):
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, (1,)).item()
    prompt = one()["input_ids"][0].tolist()
    # generate's default of top_k=50 has no effect on a vocabulary of 23.
    request = Request(prompt, NEW, temperature=1.0, seed=seed)
    expected = next(Decoder(Target.of_model(model), None, 1, 64).run([request])).tokens
    torch.manual_seed(5)
    out = model.generate(**one(), do_sample=True, max_new_tokens=NEW, custom_generate=Speculative())
    assert out[0, -NEW:].tolist() == expected


def test_each_sequence_returned_for_a_prompt_is_sampled_with_its_own_seed(model):
    settings = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": NEW}
    torch.manual_seed(0)
    out = model.generate(**one(), **settings, custom_generate=Speculative(prompt_lookup()))
    assert out.shape[0] == len({tuple(row) for row in out.tolist()}) == 4


def test_greedy_decoding_leaves_the_global_generator_alone(model):
    before = torch.get_rng_state()
    model.generate(**batch(), max_new_tokens=4, custom_generate=Speculative())
    assert torch.equal(torch.get_rng_state(), before)


def test_return_dict_in_generate_returns_generates_output_class(model):
    settings = {"max_new_tokens": 5, "return_dict_in_generate": True}
    expected = model.generate(**one(), **settings)
    out = model.generate(**one(), **settings, custom_generate=Speculative())
    assert type(out) is type(expected)
    assert torch.equal(out.sequences, expected.sequences)


class EndsWith(StoppingCriteria):
    """Stops a row whose newest token is a given one, or one of several."""

    def __init__(self, token: int | torch.Tensor):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return torch.isin(input_ids[:, -1], self.token)


@pytest.mark.parametrize("inputs", [one(), batch()], ids=["batch 1", "padded batch 3"])
def test_stopping_criteria_end_rows_at_the_same_token(model, inputs):
    free = model.generate(**inputs, max_new_tokens=NEW)
    new = free[-1, -NEW:].tolist()
    token = max(new, key=new.index)  # late, so that something is drafted before it
    unused = next(n for n in range(VOCAB) if n not in free[:, -NEW:])
    settings = {"max_new_tokens": NEW, "eos_token_id": unused, "pad_token_id": 0}
    expected = model.generate(**inputs, **settings, stopping_criteria=[EndsWith(token)])
    assert (expected[-1, -1] == token) or (expected[-1, -1] == 0)
    for method in methods(model):
        out = model.generate(
            **inputs, **settings, stopping_criteria=[EndsWith(token)], custom_generate=method
        )
        assert torch.equal(out, expected)


def test_without_an_end_token_all_rows_continue_until_a_criterion_stops_the_last(model):
    inputs = batch()
    new = model.generate(**inputs, max_new_tokens=NEW)[:, -NEW:].tolist()
    tokens = torch.tensor([row[2 * n + 1] for n, row in enumerate(new)])
    settings = {"max_new_tokens": NEW, "stopping_criteria": [EndsWith(tokens)]}
    expected = model.generate(**inputs, **settings)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + NEW
    first = [torch.isin(row, tokens).tolist().index(True) for row in torch.tensor(new)]
    assert len({*first}) > 1
    for method in methods(model):
        assert torch.equal(model.generate(**inputs, **settings, custom_generate=method), expected)
        assert method.last.tokens >= expected[:, inputs["input_ids"].shape[1] :].numel()


def test_max_time_zero_ends_a_row_after_one_token_as_in_generate(model):
    settings = {"max_new_tokens": NEW, "max_time": 0.0}
    expected = model.generate(**one(), **settings)
    assert torch.equal(model.generate(**one(), **settings, custom_generate=Speculative()), expected)
    assert expected.shape[1] == one()["input_ids"].shape[1] + 1


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(bundled_target_dir(), dtype=torch.float32)


class Heard(TextStreamer):
    """A text streamer that keeps what it prints."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.texts = []

    def on_finalized_text(self, text, stream_end=False):
        self.texts.append((text, stream_end))


def test_a_streamer_gets_the_same_texts_as_from_generate(tiny):
    tokenizer = Target.load("tiny").tokenizer
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    expected, streamer = Heard(tokenizer), Heard(tokenizer)
    out = tiny.generate(ids, max_new_tokens=20, do_sample=False, streamer=expected)
    method = Speculative(prompt_lookup(1, 4), streamer)
    ours = tiny.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=method)
    assert torch.equal(ours, out)
    assert streamer.texts == expected.texts
    handed, other = Heard(tokenizer), Speculative(prompt_lookup(1, 4))  # passed to generate itself
    settings = {"max_new_tokens": 20, "do_sample": False, "streamer": handed}
    assert torch.equal(tiny.generate(ids, **settings, custom_generate=other), out)
    assert handed.texts == expected.texts
    with pytest.raises(DataError, match="a streamer takes one row, and there are 2"):
        tiny.generate(ids.repeat(2, 1), max_new_tokens=4, custom_generate=method)


def test_stop_strings_work_as_a_stopping_criterion(tiny):
    tokenizer = Target.load("tiny").tokenizer
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    free = tiny.generate(ids, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(free[0, ids.shape[1] :], skip_special_tokens=True)
    string = text[len(text) // 2 :][:4]
    settings = {
        "max_new_tokens": 40,
        "do_sample": False,
        "stopping_criteria": [StopStringCriteria(tokenizer, [string])],
    }
    expected = tiny.generate(ids, **settings)
    assert expected.shape[1] < free.shape[1]
    for method in (Speculative(), Speculative(prompt_lookup(1, 6))):
        assert torch.equal(tiny.generate(ids, **settings, custom_generate=method), expected)
    # generate does not pass a tokenizer on to `custom_generate`, and raises this itself.
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        tiny.generate(ids, stop_strings=["."], tokenizer=tokenizer, custom_generate=method)


def test_a_head_is_matched_to_its_model_by_the_models_weights(tiny, tmp_path):
    target = Target.of_model(tiny)
    assert target.identity()["weights"] == Target.load("tiny").identity()["weights"]
    random_head(target, 2).save_pretrained(tmp_path)
    method = Speculative(falcon(tmp_path, "tiny_k2"))
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = tiny.generate(ids, max_new_tokens=8, do_sample=False)
    ours = tiny.generate(ids, max_new_tokens=8, do_sample=False, custom_generate=method)
    assert torch.equal(ours, expected)
    other = random_target(seed=9).model
    with pytest.raises(TargetError, match="was trained for"):
        other.generate(one()["input_ids"], max_new_tokens=4, custom_generate=method)


def test_the_callers_model_is_left_unchanged(model):
    model.train().requires_grad_(True)
    model.lm_head.weight.requires_grad_(False)
    before = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    config = model.generation_config.to_dict()
    model.generate(**one(), max_new_tokens=3, eos_token_id=3, custom_generate=Speculative())
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.to_dict() == config
    after = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    assert all(after[n][0] is p and after[n][1] == grad for n, (p, grad) in before.items())
    model(one()["input_ids"]).logits.sum().backward()  # it can still be trained


def test_the_next_call_reuses_the_decoder_and_follows_changed_weights(model):
    method, inputs = Speculative(prompt_lookup()), one()
    model.generate(**inputs, max_new_tokens=NEW, custom_generate=method)
    borrowed, decoder = method._borrowed, method._borrowed._decoder
    model.generate(**inputs, max_new_tokens=NEW - 3, custom_generate=method)
    assert method._borrowed is borrowed
    assert borrowed._decoder is decoder
    with torch.no_grad():
        for parameter in model.parameters():  # an optimiser's step
            parameter.add_(0.2 * torch.randn_like(parameter))
    expected = model.generate(**inputs, max_new_tokens=NEW)
    ours = model.generate(**inputs, max_new_tokens=NEW, custom_generate=method)
    assert torch.equal(ours, expected)
    assert method._borrowed is borrowed
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))  # another tensor
    expected = model.generate(**inputs, max_new_tokens=NEW)
    ours = model.generate(**inputs, max_new_tokens=NEW, custom_generate=method)
    assert torch.equal(ours, expected)
    assert method._borrowed is not borrowed


def test_a_conversation_that_grows_loads_its_head_once(tiny, tmp_path, monkeypatch):
    random_head(Target.of_model(tiny), 2).save_pretrained(tmp_path)
    loads, load = [], trained.load_head
    monkeypatch.setattr(trained, "load_head", lambda *a, **k: loads.append(a) or load(*a, **k))
    method = Speculative(falcon(tmp_path, "tiny_k2"))
    made, ids = set(), torch.arange(4)[None] + 5
    for turn in range(8):
        rows = ids.repeat(1 + turn % 3, 1)
        expected = tiny.generate(rows, max_new_tokens=8, do_sample=False)
        ours = tiny.generate(rows, max_new_tokens=8, do_sample=False, custom_generate=method)
        assert torch.equal(ours, expected)
        made.add(method._borrowed._decoder)
        ids = torch.cat((ours[:1], torch.arange(20)[None] + 5 + turn), 1)
    assert len(loads) == 1
    assert len(made) == 3  # made for 1, 2 and 3 rows; fewer rows reuse one


def test_a_row_longer_than_the_models_positions_is_refused(model):
    model.config.max_position_embeddings = limit = 20
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    method, spare = Speculative(prompt_lookup(1, 4)), 4
    model.generate(**one(), max_new_tokens=limit - 14 - spare, custom_generate=method)
    with pytest.raises(TargetError, match="exceeds the 20 positions"):
        model.generate(**one(), max_new_tokens=NEW, custom_generate=method)


def test_a_call_records_its_tokens_and_steps(model):
    fast = Speculative(prompt_lookup(1, 4))
    assert fast.last is None
    out = model.generate(**batch(), max_new_tokens=NEW, custom_generate=fast)
    assert fast.last.tokens == 3 * NEW == (out[:, -NEW:] >= 0).sum()
    assert fast.last.tokens_per_step == 3 * NEW / fast.last.steps > 1
    plain = Speculative()
    model.generate(**batch(), max_new_tokens=NEW, custom_generate=plain)
    assert plain.last.tokens_per_step == 1


def test_a_model_is_not_kept_alive(model):
    method = Speculative()
    copied = Target.of_model(model).model
    copied.generate(**one(), max_new_tokens=2, custom_generate=method)
    reference = weakref.ref(copied)
    del copied
    gc.collect()
    assert reference() is None


def sampling(*warpers) -> dict:
    """Settings of a call that samples with only its own warpers."""
    return {"do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList(warpers)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"do_sample": True, "min_p": 0.1}, r"min_p=0\.1"),
        ({"do_sample": True, "typical_p": 0.5}, r"typical_p=0\.5"),
        ({"do_sample": True, "epsilon_cutoff": 3e-4}, r"epsilon_cutoff=0\.0003"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, r"guidance_scale=1\.5"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"renormalize_logits": True}, "renormalize_logits=True"),
        (
            {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)])},
            "logits processors: TemperatureLogitsWarper",
        ),
        (
            {"logits_processor": LogitsProcessorList([InfNanRemoveLogitsProcessor()])},
            "logits processors: InfNanRemoveLogitsProcessor",
        ),
        (sampling(TopPLogitsWarper(0.9, min_tokens_to_keep=2)), "min_tokens_to_keep .* must be 1"),
        (sampling(TopKLogitsWarper(5, filter_value=-9.0)), "filter_value .* must be -inf"),
        (
            sampling(TopPLogitsWarper(0.9), TopKLogitsWarper(5)),
            "TopPLogitsWarper, TopKLogitsWarper",
        ),
        ({"prefix_allowed_tokens_fn": lambda _, ids: [1]}, "PrefixConstrainedLogitsProcessor"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"position_ids": torch.arange(14)[None] + 1}, "position_ids of your own"),
        ({"attention_mask": torch.tensor([[1] * 13 + [0]])}, "pad on the left"),
        ({"attention_mask": torch.tensor([[0, 1, 0] + [1] * 11])}, "pad on the left"),
        ({"inputs_embeds": torch.zeros(1, 14, 16)}, "inputs_embeds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(model, settings, message):
    with pytest.raises(DataError, match=message):
        model.generate(
            **{**one(), **settings}, max_new_tokens=4, custom_generate=Speculative(prompt_lookup())
        )


def test_an_unknown_field_of_the_generation_config_is_refused(model):
    model.generation_config.future_field = 0.5
    with pytest.raises(DataError, match=r"future_field=0\.5 cannot be honoured"):
        model.generate(**one(), max_new_tokens=4, custom_generate=Speculative())


def test_a_request_the_decoder_refuses_raises_its_error(model):
    ids = torch.tensor([[1, 2], [1, VOCAB]])
    with pytest.raises(DataError, match=r"request 1: token ids .* outside the vocabulary"):
        model.generate(ids, max_new_tokens=4, custom_generate=Speculative())


def test_a_tree_for_another_block_size_than_the_heads_is_refused(model, tmp_path):
    tree = tmp_path / "mine.yaml"
    tree.write_text("block_size: 3\npaths: [[0], [1], [0, 0]]\n")
    head = random_head(Target.of_model(model), 2)
    method = Speculative(falcon(head, str(tree)))
    with pytest.raises(RecipeError, match=r"made for blocks of 3, and the head has blocks of 2"):
        model.generate(torch.tensor([[1, 2, 3]]), custom_generate=method, max_new_tokens=4)
    tree.write_text("paths: [[0], [1], [0, 0]]\n")  # without a block size it fits any head
    model.generate(torch.tensor([[1, 2, 3]]), custom_generate=method, max_new_tokens=4)
