"""Tiny random models of any family of transformers, and whether a target decodes as its own
`generate` does."""

import torch
import transformers
from decoding import PATHS, Foreseeing, decode, plain_tokens, prompts
from random_models import HIDDEN, VOCAB, random_head
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdraft.eval.custom_generate import Speculative, falcon, prompt_lookup
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.padded import PADDINGS, PaddedDecoder
from specdraft.eval.engine.request import Request
from specdraft.eval.families.support import is_recurrent
from specdraft.models.target import Target

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MLP = {"intermediate_size": 32}
GQA = {**MLP, "num_key_value_heads": 2}
LATENT = {  # latent attention, as in DeepSeek
    **MLP,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
}


def random_model(family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A tiny model of a family (a prefix of transformers' class names), with random weights."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # also biases and norms, which start at zero and one
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "lm_head" in name or "embed_out" in name:
                parameter.mul_(6.0)  # far from near-ties
    return model


def check_family(target: Target) -> None:
    """Assert that decoding, with drafts and without, gives what the model itself generates.

    Models with a recurrent state are not tested as drafters or with padding.
    """
    asked = prompts(4)
    expected = [plain_tokens(target, prompt, 12) for prompt in asked]
    assert len({token for tokens in expected for token in tokens}) > 3  # the output is not constant
    requests = [Request(prompt, 12) for prompt in asked]
    answers = {tuple(p): answer for p, answer in zip(asked, expected, strict=True)}
    for rows in (1, 8):
        decoder = Decoder(target, Foreseeing(answers), rows, 100)
        assert decode(decoder, requests) == expected
    blind = FalconDrafter(random_head(target, 2), target, StaticTree(PATHS, 2), 3, 100)
    drafters = [None, Foreseeing(answers), blind]
    if not is_recurrent(target.model):
        drafters.append(SSD(target, 3, 100, gamma=3))
        _check_pads(target, requests, expected)
    for drafter in drafters:
        decoder = Decoder(target, drafter, 3, 100, prefill=9)
        assert decode(decoder, requests, drafter is not blind) == expected, drafter
    _check_samples(target, answers)
    _check_generate(target)


def _check_samples(target: Target, answers: dict) -> None:
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(prompt, 12, seed=n, **settings) for n, prompt in enumerate(prompts(4))]
    expected = decode(Decoder(target, None, 1, 100), requests)  # one after the other
    assert expected != [*answers.values()]
    drawn = {tuple(p): answer for p, answer in zip(prompts(4), expected, strict=True)}
    for rows in (1, 3):
        decoder = Decoder(target, Foreseeing(drawn), rows, 100, prefill=9)
        assert decode(decoder, requests) == expected


def _check_pads(target: Target, requests: list[Request], expected: list) -> None:
    answers = {tuple(r.prompt): answer for r, answer in zip(requests, expected, strict=True)}
    for paddings in PADDINGS.values():
        decoder = PaddedDecoder(target, Foreseeing(answers), 3, 128, *paddings)
        decoder.packed.begin(3)
        assert decode(decoder, requests[1:]) == expected[1:]


def _check_generate(target: Target) -> None:
    """In a left-padded batch, where slots differ from positions."""
    rows = prompts()[1:4]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
    expected = target.model.generate(**options, do_sample=False)
    head = falcon(random_head(Target.of_model(target.model), 2), tree="tiny_k2")
    for method in (Speculative(prompt_lookup(1, 4)), Speculative(head)):
        found = target.model.generate(**options, do_sample=False, custom_generate=method)
        assert torch.equal(found, expected)
