"""Sinks, caps, scales and rotary bases of layers decode as the family's own `generate`."""

import itertools

import pytest
import torch
from decoding import decode, plain_tokens, prompts
from random_families import GQA, check_family, random_model

from specdraft.eval.engine import plan
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.families.finish import PLAIN, Finish, finish_of
from specdraft.models.families.scores import Scores, attention, fold_mask
from specdraft.models.target import Target

# A scaled and tied embedding would repeat the last token.
UNTIED = {**GQA, "tie_word_embeddings": False}
GEMMA = {**UNTIED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
FAMILIES = {
    "gemma": ("Gemma", {**UNTIED, "head_dim": 8}, PLAIN),  # scaled embeddings
    "gemma2": ("Gemma2", {**GEMMA, **CAPS}, Finish(1.0, 5.0)),  # and norms before and after layers
    "gpt_oss": ("GptOss", {**UNTIED, **MOE, "head_dim": 8, "sliding_window": 9}, PLAIN),
    "cohere": ("Cohere", {**UNTIED, "logit_scale": 0.5}, Finish(0.5)),
    "cohere2": ("Cohere2", {**UNTIED, "logit_scale": 0.5, "sliding_window": 9}, Finish(0.5)),
    "granite": ("Granite", {**UNTIED, **GRANITE}, Finish(0.25)),
    "hyperclovax": ("HyperCLOVAX", {**UNTIED, "logits_scaling": 4.0}, Finish(4.0)),
    "olmo2": ("Olmo2", UNTIED, PLAIN),  # query and key norms, and norms after layers
    "glm": ("Glm", {**UNTIED, "head_dim": 8, "partial_rotary_factor": 0.5}, PLAIN),
}


def scored(name: str) -> Target:
    family, settings, _ = FAMILIES[name]
    model = random_model(family, **settings)
    for name_, parameter in model.named_parameters():
        if "sinks" in name_:
            torch.nn.init.normal_(parameter, 1.0)
    return Target(model, None, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_as_its_model_generates(name):
    check_family(scored(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_lm_head_is_found_with_and_without_the_models_weights(name, tmp_path):
    target, expected = scored(name), FAMILIES[name][2]
    assert target.finish == pytest.approx(expected)
    target.model.save_pretrained(tmp_path)
    for embeddings in (target.embeddings(), TargetEmbeddings.load(str(tmp_path))):
        assert embeddings.finish == target.finish
    assert finish_of(target.model.to(torch.bfloat16)) == target.finish


@pytest.mark.parametrize("name", ["gemma", "gemma2", "granite"])
def test_training_embeds_tokens_as_drafting_does(name, tmp_path):
    target = scored(name)
    target.model.save_pretrained(tmp_path)
    ids = torch.arange(1, 9)  # without token 0, which may be padding with a zero embedding
    for embeddings in (target.embeddings(), TargetEmbeddings.load(str(tmp_path))):
        assert torch.equal(embeddings.embed(ids), target.embed(ids))


@pytest.mark.parametrize(("name", "forgotten"), [("gpt_oss", "sinks"), ("gemma2", "cap")])
def test_the_tests_catch_forgotten_sinks_and_caps(name, forgotten, monkeypatch):
    target = scored(name)
    decoder = Decoder(target, None, 1, 100)
    requests = [Request(prompt, 14) for prompt in prompts()[3:]]
    expected = [plain_tokens(target, request.prompt, 14) for request in requests]
    assert decode(decoder, requests) == expected

    def careless(*inputs):
        return attention(*inputs[:-1], inputs[-1]._replace(**{forgotten: None}))

    monkeypatch.setattr(plan, "attention", careless)
    assert decode(decoder, requests) != expected


def test_ignoring_what_follows_lm_head_changes_samples():
    target = scored("gemma2")
    requests = [Request(prompt, 14, 1.3, seed=5) for prompt in prompts()]
    expected = decode(Decoder(target, None, 1, 100), requests)
    target.finish = PLAIN
    assert decode(Decoder(target, None, 1, 100), requests) != expected


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_our_attention_equals_torchs_without_sinks_and_caps(kv_heads):
    query, keys = torch.randn(3, 4, 5, 8), torch.randn(3, kv_heads, 9, 8)
    values, mask = torch.randn_like(keys), torch.zeros(3, 1, 5, 9)
    mask[:, :, 2, 4:] = -torch.inf
    nothing = torch.full((4,), -torch.inf)  # a sink without weight
    expected = attention(query, keys, values, mask, False, Scores(0.3))
    found = attention(query, keys, values, mask, False, Scores(0.3, sinks=nothing))
    torch.testing.assert_close(found, expected)
    square = query, keys[:, :, :5], values[:, :, :5], None, True
    found = attention(*square, Scores(cap=1e4))
    torch.testing.assert_close(found, attention(*square, Scores()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("finish", [Finish(0.3), Finish(1.0, 2.0), Finish(0.5, 3.0)])
def test_the_gradient_through_what_follows_lm_head_is_correct(finish):
    raw = torch.randn(4, 7, requires_grad=True)
    logits, slope = finish(raw), torch.randn(4, 7)
    logits.backward(slope)
    torch.testing.assert_close(finish.back(slope, logits), raw.grad)


@pytest.mark.parametrize("kind", ["one mask", "a mask per head"])
@pytest.mark.parametrize("count", [1, 3])
def test_heads_that_share_keys_attend_as_separate_heads_would(kind, count):
    """For several rows on a CPU, heads that share a key become queries of one head."""
    rows, heads, kv_heads, slots, width = 4, 6, 2, 7, 8
    torch.manual_seed(0)
    query = torch.randn(rows, heads, count, width)
    keys, values = torch.randn(2, rows, kv_heads, slots, width)
    mask = torch.randn(rows, heads if kind == "a mask per head" else 1, count, slots)
    mask[..., -2:] = -torch.inf
    attended = attention(query, keys, values, mask, False, Scores(0.3))
    folded = fold_mask(mask, heads, kv_heads)
    assert torch.equal(attention(query, keys, values, folded, False, Scores(0.3)), attended)
    for row, head in itertools.product(range(rows), range(heads)):
        key, value = (part[row, head * kv_heads // heads] for part in (keys, values))
        own = mask[row, head if mask.shape[1] > 1 else 0]
        expected = (0.3 * query[row, head] @ key.T + own).softmax(-1) @ value
        torch.testing.assert_close(attended[row, head], expected)
