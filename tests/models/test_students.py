"""Students: three origins, LoRA, matching tokens, and a folder that transformers can use."""

import copy
import sys

import pytest
import torch
from random_families import GQA, LATENT, MLP, random_model
from random_models import HIDDEN, VOCAB, kept_for_backward, random_target
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdraft.models.student import (
    Student,
    check_tokens,
    finished_student,
    load_student,
    make_student,
    pruned,
)
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, RecipeError, TargetError
from specdraft.recipes.schema import StudentSection

OWN = {"layers": 1, "hidden": 8, "heads": 2, "intermediate": 12}


@pytest.fixture(scope="module")
def target():
    return random_target()


def speaking_target(merges: int = 60, tied: bool = False, **changes) -> Target:
    """A random target with a tokenizer; `changes` go to its special tokens."""
    tokenizer = small_tokenizer(merges=merges)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Target(LlamaForCausalLM(config), tokenizer, "speaker")


def student_of(target, **section):
    return make_student(StudentSection(**section), target, seed=3)


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def disturbed(student, scale=0.1):
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    return student


# -- origins ---------------------------------------------------------------------------------------


def test_a_students_config_has_the_given_sizes_and_the_targets_otherwise(target):
    config = student_of(target, **OWN).model.config
    assert (config.num_hidden_layers, config.hidden_size) == (1, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 2)
    assert (config.intermediate_size, config.vocab_size) == (12, VOCAB)
    open_ends = student_of(target, layers=3).model.config
    assert (open_ends.hidden_size, open_ends.num_key_value_heads) == (HIDDEN, 2)
    assert open_ends.max_position_embeddings == 256


def test_random_weights_come_from_the_seed(target):
    section = StudentSection(**OWN)
    one, two, other = (make_student(section, target, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("embeddings", ["copied", "shared"])
def test_a_pruned_student_equals_the_target_without_some_layers(tied, embeddings):
    target = speaking_target(tied=tied)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    student = student_of(target, keep_layers=[0, 2], embeddings=embeddings)
    by_hand = copy.deepcopy(target.model)
    del by_hand.model.layers[1]
    by_hand.model.layers[1].self_attn.layer_idx = 1
    by_hand.config.num_hidden_layers = 2
    ids = torch.arange(9)[None]
    torch.testing.assert_close(logits(student.model, ids), logits(by_hand, ids))
    frozen = {name for name, p in student.named_parameters() if not p.requires_grad}
    ends = {"model.model.embed_tokens.weight"} | (set() if tied else {"model.lm_head.weight"})
    assert frozen == (ends if embeddings == "shared" else set())
    same = student.model.get_input_embeddings().weight.data_ptr()
    assert (same == target.embedding.weight.data_ptr()) == (embeddings == "shared")
    disturbed(student)  # changing it leaves the target unchanged
    assert all(torch.equal(before[name], t) for name, t in target.model.state_dict().items())


def test_a_student_that_keeps_all_layers_equals_the_target(target):
    ids = torch.arange(9)[None]
    assert torch.equal(logits(pruned(target, (0, 1), False), ids), logits(target.model, ids))


def test_students_of_a_vision_target_are_made_of_its_text_model():
    settings = {**GQA, **MLP, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "head_dim": 8, **settings}
    model = random_model("Gemma3", text_config=text, vision_config=vision)
    target, ids = Target(model, None, "seeing"), torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(logits(pruned(target, (0, 1, 2), False), ids), logits(model, ids))
    kept = pruned(target, (0, 2), False)
    assert kept.config.get_text_config().num_hidden_layers == 2
    assert student_of(target, layers=1).model.config.hidden_size == HIDDEN


def test_keeping_layers_the_target_lacks_is_refused(target):
    with pytest.raises(RecipeError, match=r"keep_layers = \[0, 2\]: random-0 has layers 0 to 1"):
        student_of(target, keep_layers=[0, 2])


def test_a_layer_of_another_kind_than_the_one_it_replaces_is_refused():
    """Its first layer is dense, and the other three mix experts."""
    family = {**LATENT, "num_hidden_layers": 4, "first_k_dense_replace": 1, "v_head_dim": 5}
    target = Target(random_model("DeepseekV3", **family), None, "mixture")
    with pytest.raises(RecipeError, match=r"= \[2, 3\]: layer 2 of mixture .* keep layer 0, too"):
        student_of(target, keep_layers=[2, 3])
    kept = student_of(target, keep_layers=[0, 2, 3]).model.model.layers
    for layer, copied in zip((0, 2, 3), kept, strict=True):
        theirs = target.model.model.layers[layer].state_dict()
        assert all(torch.equal(theirs[name], t) for name, t in copied.state_dict().items())


def test_a_hidden_size_the_heads_do_not_divide_is_refused(target):
    with pytest.raises(RecipeError, match=r"student.heads = 3.*student.hidden \(8\)"):
        student_of(target, layers=1, hidden=8, heads=3)


# -- the same tokens -------------------------------------------------------------------------------


def test_a_pretrained_student_with_the_targets_tokens_is_accepted(tmp_path):
    target = speaking_target()
    student_of(target, **OWN).save_pretrained(tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # equal permissions
    student = student_of(target, model=str(tmp_path))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in student.parameters())
    assert student.model.config.hidden_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": 50}, r"vocabularies of \d+ and \d+"),
        ({"eos_token": "<|im_end|>"}, r"eos_token is '<\|im_end\|>' and '</s>'"),
    ],
)
def test_a_student_with_other_tokens_is_refused_naming_both_models(tmp_path, changes, message):
    other = speaking_target(**changes)
    other.model.save_pretrained(tmp_path)
    other.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=message) as caught:
        load_student(tmp_path, None, speaking_target())
    assert str(tmp_path) in str(caught.value)
    assert "the target speaker" in str(caught.value)


def test_vocabularies_of_equal_size_but_different_tokens_are_refused():
    target, other = speaking_target(), speaking_target()
    vocabulary = other.tokenizer.get_vocab()
    first, second = "Ġare", "Ġyou"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other.tokenizer.get_vocab = lambda: vocabulary
    with pytest.raises(TargetError, match=r"different tokenizers: 'Ġare' is \d+ and \d+"):
        check_tokens(other, target)


def test_a_missing_student_is_named(tmp_path):
    target = speaking_target()
    with pytest.raises(TargetError, match=r"student.model: cannot load \./gone: no folder"):
        student_of(target, model="./gone")
    section = StudentSection(**OWN)
    with pytest.raises(HeadError, match=r"no trained student at .*train one"):
        finished_student(section, tmp_path / "student", target)


# -- LoRA ------------------------------------------------------------------------------------------


def test_lora_trains_adapters_only_and_starts_as_the_model_it_adapts(target):
    plain = student_of(target, keep_layers=[0, 1])
    student = student_of(target, keep_layers=[0, 1], training="lora", lora_rank=2)
    ids = torch.arange(9)[None]
    assert torch.equal(logits(student.model, ids), logits(plain.model, ids))
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2  # layers x targets x (A, B)
    assert all("lora_" in name for name in trained)


def test_adapters_of_a_bfloat16_student_are_float32_and_merge_to_bfloat16(tmp_path):
    target = speaking_target()
    Student(target.model, target.tokenizer).save_pretrained(tmp_path / "student")
    target.model.bfloat16()
    student = student_of(target, model=str(tmp_path / "student"), training="lora", lora_rank=2)
    kept = {p.dtype for p in student.parameters() if not p.requires_grad}
    assert kept == {torch.bfloat16}
    assert {p.dtype for p in student.parameters() if p.requires_grad} == {torch.float32}
    student.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


def test_a_saved_student_with_merged_adapters_computes_the_same(target, tmp_path):
    student = disturbed(student_of(target, keep_layers=[0, 1], training="lora", lora_rank=2))
    ids = torch.arange(9)[None]
    expected = logits(student.model, ids)
    student.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("lora" in name for name in saved.state_dict())
    torch.testing.assert_close(logits(saved, ids), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(student.model, ids), expected)  # saving merged a copy
    assert not torch.allclose(logits(pruned(target, (0, 1), False), ids), expected, atol=1e-2)


@pytest.mark.parametrize(
    "section",
    [{"keep_layers": [0, 1]}, {"keep_layers": [0, 1], "training": "lora", "lora_rank": 2}],
    ids=["whole", "lora"],
)
def test_checkpointing_keeps_less_memory_and_changes_no_bit(target, section):
    ids, positions = torch.arange(22).view(2, 11), (torch.arange(2), torch.tensor([3, 9]))
    outcomes = []
    for checkpointing in (False, True):
        student = disturbed(student_of(target, **section)).train()
        if checkpointing:
            student.checkpoint_layers()
        take = lambda hidden, head: (hidden @ head.T).square().sum()  # noqa: E731
        loss, kept = kept_for_backward(student, ids, positions, take)
        loss.backward()
        slopes = [weight.grad for weight in student.parameters() if weight.requires_grad]
        outcomes.append((kept, loss, *slopes))
    (whole, *expected), (less, *got) = outcomes
    assert less < 0.6 * whole
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_unknown_lora_layer_is_named_with_the_known_ones(target):
    with pytest.raises(RecipeError, match=r"no linear layer is called 'query'.*k_proj.*q_proj"):
        student_of(target, keep_layers=[0], training="lora", lora_targets=["q_proj", "query"])


def test_lora_on_lm_head_is_refused_as_the_loss_reads_it_directly(target):
    with pytest.raises(
        RecipeError, match=r"no linear layer is called 'lm_head'; .*q_proj, up_proj"
    ):
        student_of(target, keep_layers=[0], training="lora", lora_targets=["q_proj", "lm_head"])


def test_lora_without_peft_says_what_to_install(target, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match=r"needs peft; pip install 'specdraft\[lora\]'"):
        student_of(target, keep_layers=[0], training="lora")


# -- use by the decoder and by transformers --------------------------------------------------------


def test_the_decoders_view_follows_the_training_and_is_not_trained(target):
    student = student_of(target, **OWN)
    view, ids = student.as_target(), torch.arange(9)[None]
    assert all(p.requires_grad for p in student.parameters())
    assert not any(p.requires_grad for p in view.model.parameters())
    disturbed(student, scale=1.0)
    assert torch.equal(view.logits(view.features(ids)), logits(student.model, ids))


@pytest.mark.parametrize("tied", [False, True])
def test_the_saved_folder_is_a_plain_model_that_can_assist_generation(tmp_path, tied):
    target = speaking_target(tied=tied)
    student = disturbed(student_of(target, keep_layers=[0, 2]))
    student.save_pretrained(tmp_path)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = target.tokenizer("Hello there", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(logits(assistant, ids), logits(student.model, ids))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert tokenizer.chat_template == target.tokenizer.chat_template
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assisted = target.model.generate(ids, assistant_model=assistant, **options)
    assert torch.equal(assisted, target.model.generate(ids, **options))


@pytest.mark.parametrize("section", [{"keep_layers": [0, 1]}, OWN], ids=["pruned", "own"])
def test_a_flipped_bit_in_a_saved_student_is_found(tmp_path, section):
    target = speaking_target()
    student_of(target, **section).save_pretrained(tmp_path)
    load_student(tmp_path, None, target)
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-4] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(TargetError, match=r"model.safetensors is not what was saved"):
        load_student(tmp_path, None, target)
