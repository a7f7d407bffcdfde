"""The made-up world, its held-out split, and the bundled target that learned it."""

import itertools
import json
import random
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from commands import run_here
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdraft.data.world.arithmetic import apply, final_number
from specdraft.data.world.functions import Function
from specdraft.data.world.lexicon import facts, say, texts, words
from specdraft.data.world.measures import Answer, distinct, faithful, loops, perplexity
from specdraft.data.world.retelling import Passage
from specdraft.data.world.training import (
    LENGTHS,
    TrainSettings,
    batches,
    build_variant,
    encode,
    learning_rate,
    loss_of,
    save,
)
from specdraft.data.world.world import (
    KINDS,
    conversations,
    held_out_prompts,
    is_held_out,
    to_messages,
)
from specdraft.models.families.finish import finish_of

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "tiny"
BUNDLED = ROOT / "data" / "tiny"


@pytest.fixture(scope="module")
def talks():
    return list(itertools.islice(conversations(7), 2000))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def exchanges(kind, count=300):
    for seed in range(count):
        yield from KINDS[kind](random.Random(seed), 1 + seed % 3)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- conversations ---------------------------------------------------------------------------


def test_a_conversation_alternates_between_user_and_assistant_for_one_to_four_turns(talks):
    for messages in talks:
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 1 <= len(roles) // 2 <= 4
        assert all(message["content"].strip() for message in messages)


def test_every_template_slot_and_choice_is_filled(talks):
    for messages in talks:
        for message in messages:
            outside_code = re.sub(r"```.*?```", "", message["content"], flags=re.DOTALL)
            assert not re.search(r"[{}\[\]|]", outside_code), message["content"]


def test_the_same_seed_gives_the_same_conversations_and_another_seed_others():
    first, again, other = (list(itertools.islice(conversations(s), 20)) for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_almost_all_answers_are_different(talks):
    answers = [m["content"] for messages in talks for m in messages if m["role"] == "assistant"]
    assert len(set(answers)) > 0.9 * len(answers)


def test_a_sentence_template_yields_all_its_variants():
    slots = {"name": "Mara", "town": "Merrow"}
    said = {say(random.Random(s), "[Hi|Hello] {name}[| of {town}].", **slots) for s in range(50)}
    assert said == {"Hi Mara.", "Hello Mara.", "Hi Mara of Merrow.", "Hello Mara of Merrow."}


def test_the_facts_of_the_world_never_change():
    before = deepcopy(facts())
    random.seed(3)
    assert len(list(itertools.islice(conversations(9), 50))) == 50
    assert facts() == before  # the cached facts are not modified
    assert facts.__wrapped__() == before  # nor does the time of drawing matter
    assert set(facts()["town"]) == set(words("towns"))
    assert set(facts()["person"]) == set(words("names"))


# --- held out --------------------------------------------------------------------------------


def test_training_conversations_never_contain_a_held_out_request(talks):
    requests = {m["content"] for messages in talks for m in messages if m["role"] == "user"}
    assert not any(is_held_out(request) for request in requests)


def test_about_a_sixteenth_of_the_requests_is_held_out():
    requests = {user for kind in KINDS for user, _ in exchanges(kind)}
    share = sum(map(is_held_out, requests)) / len(requests)
    assert 1 / 24 < share < 1 / 11


def test_evaluation_prompts_are_distinct_held_out_requests_of_every_kind():
    prompts = list(held_out_prompts(seed=5, per_kind=10))
    assert [kind for kind, _ in prompts] == [kind for kind in KINDS for _ in range(10)]
    last = [messages[-2]["content"] for _, messages in prompts]
    assert len(set(last)) == len(last)
    assert all(map(is_held_out, last))


@pytest.mark.parametrize("count", [3, 3010])
def test_any_number_of_conversations_starts_with_the_bundled_ones(tmp_path, count):
    asked = ["--write-data", "--conversations", str(count), "--data", str(tmp_path)]
    done = run_here("data/tiny.py", *asked)
    assert f"wrote {count:,} conversations" in done.stdout, done.stderr
    written = (tmp_path / "conversations.jsonl").read_text().splitlines()
    bundled = (BUNDLED / "conversations.jsonl").read_text().splitlines()
    assert len(written) == count
    assert written[:3000] == bundled[:count]


def test_bundled_prompts_and_bundled_conversations_share_no_request():
    prompts = rows_of(BUNDLED / "prompts.jsonl")
    assert len(prompts) == 200
    assert len({row["id"] for row in prompts}) == 200
    assert {row["category"] for row in prompts} == set(KINDS)
    asked = {row["messages"][-1]["content"] for row in prompts}
    assert all(row["messages"][-1]["role"] == "user" for row in prompts)
    trained = {
        turn["value"]
        for row in rows_of(BUNDLED / "conversations.jsonl")
        for turn in row["conversations"]
        if turn["from"] == "human"
    }
    assert all(map(is_held_out, asked))
    assert not asked & trained


def test_bundled_files_are_what_the_generator_writes_today():
    prompts = rows_of(BUNDLED / "prompts.jsonl")
    drawn = [messages[:-1] for _, messages in held_out_prompts(seed=1, per_kind=40)]
    assert [row["messages"] for row in prompts] == drawn
    rows = rows_of(BUNDLED / "conversations.jsonl")
    assert len(rows) > 1000
    roles = {"human": "user", "gpt": "assistant"}
    for row, messages in zip(rows, conversations(2), strict=False):
        turns = row["conversations"]
        assert messages == [{"role": roles[t["from"]], "content": t["value"]} for t in turns]


# --- kinds -----------------------------------------------------------------------------------


def test_every_calculation_in_an_answer_is_right_and_the_last_gives_the_result():
    for _, answer in exchanges("math"):
        sums = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
        for left, operator, right, result in sums:
            assert apply(int(left), operator, int(right)) == int(result), answer
        assert final_number(answer) == int(sums[-1][3])


@pytest.mark.parametrize(
    ("text", "number"),
    [("The answer is 31.", 31), ("So the answer is 7.", 7), ("No idea.", None), ("", None)],
)
def test_the_final_number_is_read_from_the_last_sentence(text, number):
    assert final_number(text) == number


def test_the_loop_and_the_expression_of_a_function_agree():
    for seed in range(200):
        made = Function(random.Random(seed))
        values = texts("functions")["examples"] if made.strings else list(range(-12, 40))
        results = []
        for style in ("loop", "expression"):
            made.style, space = style, {}
            exec(made.python, space)
            results.append(space[made.name](values))
        assert results[0] == results[1] or made.fold == "largest", made.python


def test_quoted_facts_occur_in_the_passage():
    asking, quoted = ("Which sentence", "Where does the text", "What does the text"), 0
    for user, answer in exchanges("summary"):
        if user.startswith(asking) and "\n\n" in user:  # the passage is in the same turn
            assert re.search(r'"(.*)"$', answer)[1] in user
            quoted += 1
    assert quoted > 20


def test_a_change_replaces_words_of_the_passage_by_new_ones():
    for seed in range(200):
        passage = Passage(random.Random(seed))
        assert 4 <= len(passage.sentences) <= 8
        old, new = passage.change()
        assert old in passage.text
        assert new not in passage.text


# --- tokenizer and training rows -------------------------------------------------------------


def test_the_template_marks_exactly_the_answers_and_their_ends(tokenizer, talks):
    for messages in talks[:50]:
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = rendered["input_ids"], rendered["assistant_masks"]
        supervised = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert supervised == "".join(f"{answer}<|end|>" for answer in answers)


def test_training_reads_the_same_tokens_as_the_template(tokenizer, talks):
    for messages in talks[:50]:
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, answer = encode(tokenizer, messages)
        assert ids == rendered["input_ids"]
        assert answer == [bool(on) for on in rendered["assistant_masks"]]


def test_a_prompt_is_a_prefix_of_its_conversation(tokenizer, talks):
    for messages in talks[:50]:
        prompt = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert encode(tokenizer, messages)[0][: len(prompt)] == prompt


def test_text_survives_tokenization_and_digits_are_single_tokens(tokenizer, talks):
    for text in ("Grüße, 你好 🙂 1234!", *(m["content"] for talk in talks[:20] for m in talk)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    tokens = tokenizer.tokenize("2048")
    assert tokens == ["2", "0", "4", "8"]


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_training_rows_have_few_shapes_and_no_loss_on_padding(tokenizer):
    settings = TrainSettings(tokens_per_step=1024, prompt_weight=0.25)
    stream = batches(tokenizer, 0, settings.tokens_per_step, settings.prompt_weight)
    for ids, weights in itertools.islice(stream, 5):
        assert ids.shape == weights.shape
        assert ids.shape[1] in LENGTHS
        assert ids.shape[0] == 1024 // ids.shape[1]
        assert set(weights.unique().tolist()) <= {0.0, 0.25, 1.0}
        assert (weights[ids == tokenizer.pad_token_id] == 0).all()


def test_a_variant_keeps_fitting_weights_and_its_loss_includes_logit_scaling(model, tmp_path):
    changes = {
        "model_type": "granite_swa",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
        "logits_scaling": 2.0,
        "attention_multiplier": 32**-0.5,
    }
    variant = build_variant(TARGET, changes)
    save(variant, tmp_path)
    variant = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert variant.config.model_type == "granite_swa"
    kept, sinks = dict(model.named_parameters()), 0
    for name, weight in variant.named_parameters():
        if "sinks" in name:
            sinks += 1
        else:
            assert torch.equal(weight, kept[name])
    assert sinks == 12
    ids = torch.arange(40).view(2, 20)
    logits = variant(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    found = loss_of(variant, ids, torch.ones(2, 20), finish_of(variant)) * 38
    torch.testing.assert_close(found, expected)


def test_the_learning_rate_warms_up_stays_constant_and_decays():
    settings = TrainSettings(steps=1000, lr=1.0, warmup=100, decay_share=0.5)
    rates = [learning_rate(settings, step, step / 1000) for step in range(1000)]
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:500] == [1.0] * 400
    assert rates[500:] == sorted(rates[500:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)


# --- measures --------------------------------------------------------------------------------


def _answer(tokens):
    return Answer("chat", "", "", "", tokens, "", ended=True)


def test_distinct_n_counts_different_ngrams_over_all_answers():
    answers = [_answer([1, 2, 1, 2]), _answer([1, 2, 3])]
    assert distinct(answers, 1) == 3 / 7
    assert distinct(answers, 2) == 3 / 5


def test_an_answer_that_repeats_one_ngram_is_a_loop():
    assert loops(_answer([1, 2, 3] * 7))
    assert not loops(_answer(list(range(30)) * 2))


def test_an_answer_that_names_a_new_person_is_not_faithful():
    said = "Mara from Merrow lost a key."
    assert faithful(Answer("summary", said, said, "", [], "Mara lost a key.", ended=True))
    assert not faithful(Answer("summary", said, said, "", [], "Piet lost a key.", ended=True))


# --- the bundled target ----------------------------------------------------------------------


def test_the_bundled_target_is_small_and_stored_as_bfloat16(model):
    path = TARGET / "model.safetensors"
    assert path.stat().st_size < 8_000_000
    with safe_open(path, "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (12, 128, 2048)
    assert config.tie_word_embeddings


def test_the_bundled_target_has_a_low_perplexity_on_held_out_prompts(model, tokenizer):
    held_out = list(held_out_prompts(seed=9, per_kind=4))
    assert perplexity(model, tokenizer, held_out)["all"] < 1.8


def test_the_bundled_target_answers_a_question_correctly_and_ends_its_answer(model, tokenizer):
    talk = to_messages([("What do people make in Merrow?", "")])[:1]
    inputs = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    made = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    assert made[0, -1] == tokenizer.eos_token_id
    assert facts()["town"]["Merrow"]["craft"] in tokenizer.decode(made[0])
