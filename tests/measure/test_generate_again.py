"""Changes to a model between calls, or around one, have the effect they have on `generate`."""

import threading

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from random_families import GQA, random_model
from random_models import HIDDEN, VOCAB, random_head, random_target
from transformers import (
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from specdraft.eval.custom_generate import Speculative, falcon, prompt_lookup
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, TargetError

PROMPTS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 3, 2, 2, 9, 1], [3, 3, 2, 9, 9, 1]])


def generated(model, prompts=PROMPTS[:1], **options) -> list[list[int]]:
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(input_ids=prompts, **options)[:, prompts.shape[1] :].tolist()


def test_setting_disabling_and_merging_adapters_takes_effect_in_the_next_call():
    lora = LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model, fast, seen = get_peft_model(random_target().model, lora), Speculative(), []
    torch.manual_seed(5)
    model.add_adapter("other", lora)

    def check() -> None:
        seen.append(generated(model)[0])
        assert generated(model, custom_generate=fast)[0] == seen[-1]

    check()
    model.set_adapter("other")
    check()
    with model.disable_adapter():
        check()
    check()
    model.merge_adapter()
    assert generated(model, custom_generate=fast) == generated(model)
    assert len({*map(tuple, seen)}) == 3


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_and_prefix_tuning_are_refused(kind):
    model = get_peft_model(random_target().model, kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
    generated(model)
    with pytest.raises(DataError, match="prompt or prefix tuning"):
        generated(model, custom_generate=Speculative())
    inside = model.get_base_model()
    assert generated(inside, custom_generate=Speculative()) == generated(inside)


def test_adding_and_removing_a_hook_takes_effect_in_the_next_call():
    model, fast = random_target().model, Speculative()
    before = generated(model, custom_generate=fast)
    push = 3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))
    hook = model.model.layers[0].register_forward_hook(lambda _, __, out: out + push)
    with_hook = generated(model, custom_generate=fast)
    assert with_hook == generated(model) != before
    hook.remove()
    assert generated(model, custom_generate=fast) == before


@pytest.mark.parametrize("has_history", [False, True])
def test_changing_a_hook_object_takes_effect_in_the_next_call(has_history):
    """For example a steering vector whose strength changes between calls."""

    class Steering:
        strength = 3.0
        lock = threading.Lock()  # cannot be copied

        def __call__(self, module, inputs, output):
            return output + self.strength * self.push

    model, fast, steering = random_target().model, Speculative(prompt_lookup()), Steering()
    before = generated(model)
    steering.push = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))
    if has_history:
        steering.push = steering.push * torch.ones(1, requires_grad=True)
    steering.own = steering.lock
    model.model.layers[0].register_forward_hook(steering)
    assert generated(model, custom_generate=fast) == generated(model) != before
    steering.strength = 0.0
    assert generated(model, custom_generate=fast) == before


def test_changed_config_values_and_buffers_take_effect_in_the_next_call():
    model = random_model("Mistral", **GQA, head_dim=8, sliding_window=64).eval()
    fast, prompt = Speculative(prompt_lookup()), PROMPTS[:1].repeat(1, 4)
    before = generated(model, prompt, custom_generate=fast)
    model.config.sliding_window = 3
    narrow = generated(model, prompt, custom_generate=fast)
    assert narrow == generated(model, prompt) != before
    model.config.sliding_window = 64
    rope = model.model.rotary_emb
    rope.inv_freq = rope.inv_freq * 0.1
    assert generated(model, prompt, custom_generate=fast) == generated(model, prompt) != before


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason():
    model = random_target().model
    model.lock = threading.Lock()
    generated(model)
    with pytest.raises(TargetError, match=r"structure cannot be copied \(.*lock.*\); remove what"):
        generated(model, custom_generate=Speculative())


def test_a_refused_call_leaves_the_next_ones_working():
    model = random_model("GPT2", n_positions=1024, max_position_embeddings=1024).eval()
    fast, prompt = Speculative(prompt_lookup()), 1 + torch.arange(1000)[None] % (VOCAB - 1)
    generated(model, prompt[:, :100], custom_generate=fast)
    with pytest.raises(TargetError, match="exceeds the 1024 positions"):
        generated(model, prompt, max_new_tokens=200, custom_generate=fast)
    # No positions are left for drafts: this call decodes plainly.
    last = {"max_new_tokens": 20}
    assert generated(model, prompt, custom_generate=fast, **last) == generated(
        model, prompt, **last
    )
    assert fast.last.tokens_per_step == 1
    shorter = prompt[:, :500]
    assert generated(model, shorter, custom_generate=fast) == generated(model, shorter)


@pytest.mark.parametrize("rows", [1, 3])
def test_under_autocast_the_tokens_are_those_of_generate_under_it(rows):
    model = random_target(seed=52).model  # no near-ties, which bfloat16 decides by chance
    head = random_head(Target.of_model(model), 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generated(model, PROMPTS[:rows])
        assert generated(model, PROMPTS[:rows], custom_generate=Speculative()) == expected
        fast = Speculative(falcon(head, tree="tiny_k2"))
        assert generated(model, PROMPTS[:rows], custom_generate=fast) == expected
        assert fast.last.tokens_per_step > 1


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([TemperatureLogitsWarper(0.5), SequenceBiasLogitsProcessor({(3,): 2.0})], "this order"),
        ([TopKLogitsWarper(2, filter_value=1.0)], "filter_value"),
    ],
    ids=["order", "filter_value"],
)
def test_processors_whose_order_or_options_cannot_be_honoured_are_refused(processors, message):
    options = {"do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList(processors)}
    with pytest.raises(DataError, match=message):
        generated(random_target().model, custom_generate=Speculative(), **options)
