"""On a GPU every family decodes as its own model does, also inside `generate`."""

from functools import partial

import pytest
import test_alibi
import test_families
import test_recurrent
import test_scores
import test_windows
import torch
from decoding import Foreseeing, decode, plain_tokens, prompts
from random_families import LATENT, random_model
from random_models import moved, random_head, random_target
from random_seq2seq import FAMILIES as SEQ2SEQ
from random_seq2seq import asked, generated, random_seq2seq
from test_custom_generate import batch, one

from specdraft.eval.custom_generate import Speculative, falcon, no_drafter, prompt_lookup
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.target import Target

MAKERS = {
    **{name: partial(test_families.random_family, name) for name in test_families.FAMILIES},
    **{name: partial(test_alibi.leaning, name) for name in test_alibi.FAMILIES},
    **{name: partial(test_scores.scored, name) for name in test_scores.FAMILIES},
    **{name: partial(test_recurrent.recurrent, name) for name in test_recurrent.FAMILIES},
    **{f"{n}-window": partial(test_windows.windowed, n, 9) for n in test_windows.FAMILIES},
}


def latent() -> Target:
    model = random_model("DeepseekV3", **LATENT, first_k_dense_replace=2, v_head_dim=5)
    return Target(model, None, "latent")


@pytest.mark.parametrize("name", [*MAKERS, "latent"])
def test_decoding_gives_the_models_own_tokens(device, name):
    target = moved(MAKERS.get(name, latent)(), device)
    expected = [plain_tokens(target, prompt, 8) for prompt in prompts(3)]
    answers = {tuple(p): answer for p, answer in zip(prompts(3), expected, strict=True)}
    requests = [Request(prompt, 8) for prompt in prompts(3)]
    for rows in (1, 3):
        decoder = Decoder(target, Foreseeing(answers, target.device), rows, 64, prefill=9)
        assert decode(decoder, requests) == expected


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_an_encoder_decoder_gives_its_own_tokens(device, name):
    target, sources = random_seq2seq(name), prompts(4)
    target = moved(target, device)
    expected = [generated(target, source, 8) for source in sources]
    answers = {tuple(s): answer for s, answer in zip(sources, expected, strict=True)}
    foreseeing = Foreseeing(answers, target.device)
    for drafter in (None, foreseeing, SSD(target, 3, 60, gamma=3)):
        decoder = Decoder(target, drafter, 3, 60, prefill=3)
        assert decode(decoder, asked(target, sources, 8), accepts=False) == expected


@pytest.mark.parametrize("inputs", [one(), batch()], ids=["batch 1", "padded batch 3"])
def test_generate_gives_the_same_tokens_with_drafts(device, inputs):
    model = moved(random_target(), device).model
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    head = random_head(Target.of_model(model), 2)
    methods = [no_drafter, prompt_lookup(1, 4), falcon(head, tree="tiny_k2")]
    samples = []
    for method in map(Speculative, methods):
        options = {**inputs, "max_new_tokens": 12, "custom_generate": method}
        assert torch.equal(model.generate(**options, do_sample=False), expected)
        torch.manual_seed(7)
        samples.append(model.generate(**options, do_sample=True, temperature=1.5, top_k=9))
    assert all(torch.equal(found, samples[0]) for found in samples)
    assert not torch.equal(samples[0], expected)
