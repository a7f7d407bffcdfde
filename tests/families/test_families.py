"""Each family decodes as its own model does, or is refused with the reason."""

from functools import partial

import pytest
import torch
from decoding import PATHS, Foreseeing, decode, plain_tokens
from random_families import GQA, MLP, random_model
from random_models import HIDDEN, VOCAB, random_head
from torch import nn

from specdraft.data.answers import Ask
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import chain
from specdraft.eval.generation.answers import answer
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.target import Target
from specdraft.models.weights.identity import identity_of
from specdraft.recipes.errors import TargetError

ROPE = {"rope_theta": 10000.0}
FAMILIES = {
    "llama": ("Llama", {**MLP, "num_key_value_heads": 4}),
    "llama-gqa": ("Llama", GQA),
    "llama-mqa": ("Llama", {**MLP, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {**MLP, "num_key_value_heads": 4, "sliding_window": None}),
    "mistral-gqa": ("Mistral", {**GQA, "sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {**MLP, "num_key_value_heads": 4}),
    "qwen2-gqa-tied": ("Qwen2", {**GQA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**MLP, "num_key_value_heads": 4, "head_dim": 4}),
    "qwen3-gqa": ("Qwen3", {**GQA, "head_dim": 8}),
    "opt": ("OPT", {"ffn_dim": 32, "init_std": 0.3}),
    "opt-projected": (
        "OPT",
        {
            "hidden_size": 2 * HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": 32,
            "init_std": 0.3,
            "do_layer_norm_before": False,
        },
    ),
    "gpt-neox": ("GPTNeoX", MLP),
    "gpt-neox-rotary": (
        "GPTNeoX",
        {
            **MLP,
            "use_parallel_residual": False,
            "rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-scaled": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-upcast": ("GPT2", {"scale_attn_weights": False, "reorder_and_upcast_attn": True}),
    "phi": ("Phi", {**GQA, "partial_rotary_factor": 0.5}),
}


def random_family(name: str, **changes) -> Target:
    family, settings = FAMILIES[name]
    return Target(random_model(family, **{**settings, **changes}), None, name)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request) -> Target:
    return random_family(request.param)


def prompts(count: int = 4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (2 + 6 * n,), generator=generator).tolist() for n in range(count)]


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_gives_the_models_own_tokens(target, rows):
    expected = [plain_tokens(target, prompt, 14) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > 3  # the output is not constant
    head, tree = random_head(target, 2), StaticTree(PATHS, 2)
    requests = [Request(p, 14) for p in prompts()]
    right = Foreseeing({tuple(p): answer for p, answer in zip(prompts(), expected, strict=True)})
    blind = [PromptLookup(1, 4, rows), FalconDrafter(head, target, tree, rows, 100)]
    for drafter in (None, right, *blind):
        decoder = Decoder(target, drafter, rows, 100)
        assert decode(decoder, requests, accepts=drafter is right) == expected, drafter


def test_wide_features_contain_the_models_own_hidden_states(target):
    if target.name == "opt-projected":
        with pytest.raises(TargetError, match="widths 32 for them, and 16 for its feature"):
            target.features(torch.tensor(prompts()[:1]), layers=(1,))
        return
    ids, found = torch.tensor(prompts()[2:3]), []
    layers = next(m for m in target.model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    note = lambda _, inputs, output: found.append(output)  # noqa: E731
    hooks = [layer.register_forward_hook(note) for layer in layers]
    features, wide = target.features(ids), target.features(ids, layers=(2, 1))
    states = [x if isinstance(x, torch.Tensor) else x[0] for x in found]
    for hook in hooks:
        hook.remove()
    assert torch.equal(wide, torch.cat((features, states[1], states[0]), -1))
    packed, count = PackedTarget(target, 1, 100, (2, 1)), ids.shape[1]
    read = packed.forward(ids[0], torch.arange(count), [packed.segment(0, chain(count - 1))])
    torch.testing.assert_close(read, wide[0], atol=1e-4, rtol=1e-4)


def test_a_head_that_reads_layers_decodes_the_models_own_tokens(target):
    if target.name == "opt-projected":
        return
    head = random_head(target, 2, feature_layers=(2, 1))
    drafter = FalconDrafter(head, target, StaticTree(PATHS, 2), 3, 100)
    done = decode(Decoder(target, drafter, 3, 100), [Request(p, 14) for p in prompts()], False)
    assert done == [plain_tokens(target, prompt, 14) for prompt in prompts()]


def test_logits_of_features_are_the_models_logits(target):
    ids = torch.tensor(prompts()[2:3])
    with torch.inference_mode():
        expected = target.model(ids, use_cache=False).logits
    features = target.features(ids)
    assert features.shape[-1] == target.hidden_size == HIDDEN
    torch.testing.assert_close(target.logits(features), expected)


def test_embeddings_and_lm_head_can_be_read_from_files(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    described = identity_of("x", None, tmp_path)
    assert (described["hidden_size"], described["vocab_size"]) == (HIDDEN, VOCAB)
    assert target.identity()["hidden_size"] == HIDDEN
    if target.config.model_type == "phi":  # its lm_head has a bias
        with pytest.raises(TargetError, match=r"lm_head has a bias.*prompt lookup"):
            TargetEmbeddings.load(str(tmp_path))
        with pytest.raises(TargetError, match="lm_head has a bias"):
            target.embeddings()
        return
    features, ids = torch.randn(3, HIDDEN), torch.arange(3)
    for embeddings in (TargetEmbeddings.load(str(tmp_path)), target.embeddings()):
        assert embeddings.embedding.shape == embeddings.lm_head_weight.shape == (VOCAB, HIDDEN)
        logits = features @ embeddings.lm_head_weight.T
        torch.testing.assert_close(logits, target.logits(features))
        torch.testing.assert_close(embeddings.embed(ids), target.embed(ids))


@pytest.mark.parametrize("name", ["gpt2", "opt-projected"])
def test_embeddings_are_found_in_files_written_by_the_base_model(name, tmp_path):
    target = random_family(name)
    target.model.base_model.save_pretrained(tmp_path)
    embeddings = TargetEmbeddings.load(str(tmp_path))
    assert torch.equal(embeddings.embedding, target.embedding.weight)


def test_half_precision_models_pass_the_check_at_construction():
    for name in ("llama-gqa", "gpt2", "gpt-neox", "opt"):
        model = random_family(name).model.to(torch.bfloat16)
        assert PackedTarget(Target(model, None, name), 1, 64).pool.dtype == torch.bfloat16


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_a_tiny_capacity_can_be_checked(capacity):
    assert PackedTarget(random_family("llama"), 2, capacity).pool.lengths == [0, 0]


@pytest.mark.parametrize("padding", [0, 2])
def test_a_padding_token_with_a_zero_embedding_is_accepted(padding):
    target = random_family("llama", pad_token_id=padding)
    assert not target.embed(torch.tensor(padding)).any()
    expected = [plain_tokens(target, prompt, 8) for prompt in prompts()]
    decoder = Decoder(target, None, 2, 100)
    assert decode(decoder, [Request(prompt, 8) for prompt in prompts()], accepts=False) == expected


REFUSALS = {
    r"\(falcon\).*ALiBi": partial(random_model, "Falcon", alibi=True),
    r"\(rwkv\).*recurrent state": partial(random_model, "Rwkv", attention_hidden_size=HIDDEN),
    r"\(mamba\).*from an empty state only": partial(random_model, "Mamba", state_size=4),
    r"\(glm_moe_dsa\).*has indexed_attention": partial(random_model, "GlmMoeDsa", **MLP),
    r"\(gpt_neo\).*AttentionInterface": partial(
        random_model, "GPTNeo", attention_types=[[["global"], 3]]
    ),
    r"\(doge\).*a mask of its own": partial(random_model, "Doge", **GQA),
    r"\(diffllama\).*once, in order": partial(random_model, "DiffLlama", **GQA),
    r"\(nemotron\).*pass no keyword arguments": partial(random_model, "Nemotron", **GQA),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_model_that_cannot_work_is_refused_with_the_reason(reason):
    model = REFUSALS[reason]()
    with pytest.raises(TargetError, match=reason) as error:
        PackedTarget(Target(model, None, "refused"), 1, 64)
    assert f"refused ({model.config.model_type}): " in str(error.value)


class Reversed(nn.Embedding):
    """Positions that a packed forward cannot know: they count from the end of the input."""

    def forward(self, ids):
        return super().forward(ids.flip(-1))


def test_a_model_whose_packed_forward_differs_is_refused():
    model = random_model("GPT2")
    model.transformer.wpe = Reversed.from_pretrained(model.transformer.wpe.weight)
    with pytest.raises(TargetError, match=r"gpt2.*differs from the model's own by"):
        PackedTarget(Target(model, None, "odd"), 1, 64)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_capacity_beyond_learned_positions_is_refused(name):
    target = random_family(name)
    with pytest.raises(TargetError, match=r"capacity of 129 tokens .* exceeds the 128 positions"):
        Decoder(target, None, 1, 129)
    prompt = prompts()[3]
    request = Request(prompt, 128 - len(prompt))  # up to the last position
    done = next(Decoder(target, None, 1, 128).run([request]))
    assert done.tokens == plain_tokens(target, prompt, request.max_new_tokens)


def test_answers_up_to_the_last_position_need_no_room_for_drafts():
    target, prompt = random_family("gpt2"), prompts()[3]
    ask = Ask(prompt, 128 - len(prompt), temperature=0.0, seed=0)
    for make in (lambda capacity: None, lambda capacity: PromptLookup(1, 5, 2)):
        ((_, found),) = answer(target, 1, [ask], make)
        assert found.tokens == plain_tokens(target, prompt, 128 - len(prompt))


LONGROPE = {
    **{**ROPE, "rope_type": "longrope", "original_max_position_embeddings": 24},
    **{"short_factor": [1.0, 1.0], "long_factor": [1.5, 6.0]},
}


def test_longrope_is_decoded_up_to_the_length_where_its_frequencies_change():
    """Beyond it, a row's output depends on its neighbours even in the family's own `generate`."""
    changes = {"original_max_position_embeddings": 24, "rope_parameters": LONGROPE}
    target = Target(random_model("Phi3", **GQA, **changes, sliding_window=None), None, "phi3")
    with pytest.raises(TargetError, match=r"25 tokens .* 24 positions before its longrope rotary"):
        PackedTarget(target, 1, 25)
    short, long = prompts()[1:4:2]
    answer = plain_tokens(target, short, 10)
    decoder = Decoder(target, Foreseeing({tuple(short): answer}), 2, 24)
    assert decode(decoder, [Request(short, 10)] * 3) == [answer] * 3
    pads = len(long) - len(short)
    ids = torch.tensor([[0] * pads + short, long])
    mask = torch.tensor([[0] * pads + [1] * len(short), [1] * len(long)])
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    beside = target.model.generate(ids, max_new_tokens=10, **options)
    assert beside[0, len(long) :].tolist() != answer


def test_only_rotary_frequencies_that_depend_on_length_limit_the_capacity():
    PackedTarget(random_family("llama"), 1, 400)
    dynamic = {**ROPE, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(TargetError, match=r"128 positions before its dynamic rotary"):
        PackedTarget(random_family("llama", rope_parameters=dynamic), 1, 129)
