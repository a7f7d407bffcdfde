"""Encoder-decoders decode as the family's own `generate`, for sources of any length."""

import pytest
import torch
from decoding import PATHS, Foreseeing, decode, prompts
from random_models import HIDDEN, VOCAB, random_head, random_target
from random_seq2seq import FAMILIES, asked, generated, random_seq2seq
from transformers.generation import GenerateEncoderDecoderOutput

from specdraft.eval.custom_generate import Speculative, falcon, prompt_lookup, ssd
from specdraft.eval.drafters.cascade import CascadeDrafter
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.padded import PADDINGS, PaddedDecoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.source import ROOM, Sources
from specdraft.eval.lookup.maxgram import MaxGramDrafter, PromptLookup
from specdraft.eval.lookup.suffix import FirstSuffixes
from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, TargetError

SOURCES, NEXT = prompts(8), [*range(1, VOCAB), 0]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request) -> Target:
    return random_seq2seq(request.param)


def own(target: Target, length: int = 12) -> list[list[int]]:
    return [generated(target, source, length) for source in SOURCES]


def foreseeing(expected: list[list[int]]) -> Foreseeing:
    return Foreseeing({tuple(s): answer for s, answer in zip(SOURCES, expected, strict=True)})


def drafters(target: Target, rows: int) -> list:
    """One of every kind, with another model as student and with the target itself."""
    other = random_seq2seq(target.name, seed=3)
    table = MaxGramDrafter(FirstSuffixes, 4, next_id=NEXT, rows=rows)
    return [
        SSD(target, rows, 60, gamma=3),
        SSD(other, rows, 60, gamma=3),
        CascadeDrafter([target, other], table, [[2, 1, 1], [0, 1, 2], [0, 0, 2]], 1.0, rows, 60),
        PromptLookup(1, 4, rows),
        MaxGramDrafter(FirstSuffixes, 4, branches=2, next_id=NEXT, rows=rows),
        FalconDrafter(random_head(target, 2), target, StaticTree(PATHS, 2), rows, 60),
    ]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_decoding_gives_the_models_own_tokens(target, rows):
    expected = own(target)
    assert len({tuple(answer) for answer in expected}) > 5  # answers depend on the source
    for drafter in (None, foreseeing(expected)):
        decoder = Decoder(target, drafter, rows, 60, prefill=3)
        assert decode(decoder, asked(target, SOURCES)) == expected


def test_drafters_of_every_kind_change_no_output(target):
    expected = own(target)
    for drafter in drafters(target, 3):
        decoder = Decoder(target, drafter, 3, 60)
        assert decode(decoder, asked(target, SOURCES), accepts=False) == expected, drafter


def test_sampled_outputs_are_the_same_with_every_drafter(target):
    requests = asked(target, SOURCES, temperature=1.3, top_k=15, top_p=0.95)
    expected = [decode(Decoder(target, None, 1, 60), [request])[0] for request in requests]
    assert expected != own(target)
    for drafter in (None, foreseeing(expected), SSD(target, 3, 60, gamma=3)):
        assert decode(Decoder(target, drafter, 3, 60), requests, accepts=False) == expected, drafter


def test_padded_batches_change_no_output(target):
    expected = own(target)
    for paddings in PADDINGS.values():
        decoder = PaddedDecoder(target, foreseeing(expected), 3, 100, *paddings)
        decoder.packed.begin(3)
        assert decode(decoder, asked(target, SOURCES)[:3]) == expected[:3]


def test_a_longer_source_gets_room_while_others_run():
    target, sources = random_seq2seq("t5"), [*SOURCES[:2], [*range(VOCAB)] * 9, SOURCES[3]]
    assert len(sources[2]) > ROOM
    expected = [generated(target, source, 3 * n + 3) for n, source in enumerate(sources)]
    requests = [
        Request(target.start_ids, 3 * n + 3, source=source) for n, source in enumerate(sources)
    ]
    assert decode(Decoder(target, None, 2, 60), requests) == expected


def test_the_encoder_runs_once_per_request(target):
    decoder, reads = Decoder(target, None, 3, 60), []
    note = lambda *_: reads.append(1)  # noqa: E731
    hook = target.model.get_encoder().register_forward_hook(note)
    decode(decoder, asked(target, SOURCES))
    hook.remove()
    assert len(reads) == len(SOURCES)


def test_the_callers_model_keeps_its_attention(target):
    before = target.base.config._attn_implementation
    PackedTarget(target, 1, 32)
    assert target.base.config._attn_implementation == before
    assert generated(target, SOURCES[2], 4) == own(target)[2][:4]


# -- planted mistakes that the tests above must catch ------------------------------------------


def test_the_tests_catch_a_row_with_another_rows_source(target, monkeypatch):
    sources = [source[-3:] for source in SOURCES]
    expected = [generated(target, source, 12) for source in sources]
    decoder = Decoder(target, None, 3, 60)
    assert decode(decoder, asked(target, sources)) == expected
    read = Sources.states

    def turned(kept, rows):
        states = read(kept, rows)
        kept._new.reverse()
        return states

    monkeypatch.setattr(Sources, "states", turned)
    assert decode(decoder, asked(target, sources)) != expected


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_tests_catch_positions_by_cache_slots(name, monkeypatch):
    """Several nodes of a tree share a position."""
    target = random_seq2seq(name)
    expected = own(target)
    place = PackedTarget.forward

    def by_slots(packed, ids, positions, segments):
        found = [n for segment in segments for n in range(segment.start, segment.stop)]
        return place(packed, ids, torch.tensor(found), segments)

    monkeypatch.setattr(PackedTarget, "forward", by_slots)
    decoder = Decoder(target, foreseeing(expected), 3, 60)
    assert decode(decoder, asked(target, SOURCES)) != expected


# -- files and refusals ------------------------------------------------------------------------


def test_a_target_saved_and_loaded_is_the_same(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    small = random_seq2seq(target.name)  # no tokenizer is needed here
    loaded = type(target.model).from_pretrained(tmp_path)
    again = Target(loaded, None, "again")
    assert again.start_ids == small.start_ids
    assert again.finish == target.finish
    ids = torch.tensor([[1, 2, 3]])
    features = again.features(ids, source=ids)
    torch.testing.assert_close(features, target.features(ids, source=ids))
    both = TargetEmbeddings.load(str(tmp_path))
    assert torch.equal(both.embedding, target.embedding.weight)
    assert torch.equal(both.embed(ids), target.embed(ids))  # mBART scales them
    logits = both.finish(features @ both.lm_head_weight.T)
    torch.testing.assert_close(logits, target.logits(features))


def test_a_missing_unexpected_or_invalid_source_is_refused():
    for target, request in (
        (random_seq2seq("t5"), Request([0], 4)),
        (random_target(), Request([0], 4, source=[1, 2])),
        (random_seq2seq("t5"), Request([0], 4, source=[1, VOCAB])),
        (random_seq2seq("bart"), Request([2], 4, source=[1] * 129)),
    ):
        (done,) = Decoder(target, None, 1, 60).run([request])
        assert done.reason == "refused"
        assert "source" in str(done.error)


def test_a_model_without_a_decoder_start_token_is_refused():
    target = random_seq2seq("t5")
    target.model.generation_config.decoder_start_token_id = None
    target.config.decoder_start_token_id = None
    with pytest.raises(TargetError, match="decoder_start_token_id"):
        Target(target.model, None, "t5")
    assert target.hidden_size == HIDDEN


# -- inside transformers' generate -----------------------------------------------------------------


def batch(sources: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """Sources padded with zeros, and their mask."""
    longest = max(map(len, sources))
    pads = [[0] * (longest - len(source)) for source in sources]
    pairs = [*zip(pads, sources, strict=True)]
    left = side == "left"
    ids = [pad + source if left else source + pad for pad, source in pairs]
    ones = [[1] * len(source) for source in sources]
    mask = [pad + one if left else one + pad for pad, one in zip(pads, ones, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def speculatives(target: Target) -> list[Speculative]:
    head = random_head(target, 2)
    return [Speculative(prompt_lookup(1, 4)), Speculative(falcon(head, "tiny_k2")), Speculative()]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_generate_gives_its_own_tokens_for_padded_sources(target, rows, side):
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    inputs = batch(SOURCES[:rows], side)
    expected = target.model.generate(**inputs, **options)
    for fast in speculatives(target):
        assert torch.equal(
            target.model.generate(**inputs, **options, custom_generate=fast), expected
        )
        assert fast.last.tokens == rows * (expected.shape[1] - 1) or target.name == "bart"


def test_a_student_reads_padded_sources_as_the_target_does(target):
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    inputs, fast = batch(SOURCES[:3], "left"), Speculative(ssd(target))
    expected = target.model.generate(**inputs, **options)
    assert torch.equal(target.model.generate(**inputs, **options, custom_generate=fast), expected)
    assert fast.last.tokens_per_step > 3  # it drafts the target's own tokens


@pytest.mark.parametrize("place", [-2, slice(None)], ids=["inside", "all"])
def test_padding_inside_a_source_is_refused(target, place):
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    inputs, fast = batch(SOURCES[:3], "left"), Speculative(prompt_lookup(1, 4))
    inputs["attention_mask"][0, place] = 0
    with pytest.raises(DataError, match="inside a source"):
        target.model.generate(**inputs, **options, custom_generate=fast)


def test_encoder_outputs_and_padding_that_shifts_positions_are_refused(target):
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model, inputs = target.model, batch(SOURCES[:2], "right")
    said = model.get_encoder()(input_ids=inputs["input_ids"])
    with pytest.raises(DataError, match="encoder_outputs of your own"):
        model.generate(**inputs, encoder_outputs=said, **options, custom_generate=Speculative())
    start = next(iter(target.start_ids))
    inputs["decoder_input_ids"] = torch.tensor([[0, 0, start, 5], [start, 7, 8, 9]])
    inputs["decoder_attention_mask"] = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    if target.context:  # padding uses up learned positions
        with pytest.raises(DataError, match="give decoder_input_ids of one length"):
            model.generate(**inputs, **options, custom_generate=Speculative())
    else:
        ours = model.generate(**inputs, **options, custom_generate=Speculative())
        assert torch.equal(ours, model.generate(**inputs, **options))


def test_generate_samples_several_equal_answers_with_every_drafter(target):
    options = {"max_new_tokens": 10, "do_sample": True, "num_return_sequences": 3}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True}
    found = []
    for fast in speculatives(target):
        torch.manual_seed(3)
        inputs = batch(SOURCES[:2], "right")
        output = target.model.generate(**inputs, **options, custom_generate=fast)
        assert isinstance(output, GenerateEncoderDecoderOutput)
        found.append(output.sequences)
    assert found[0].shape[0] == 6
    assert len({tuple(row) for row in found[0].tolist()}) > 3
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])
