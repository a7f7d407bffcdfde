"""The padded baseline: the same outputs, and as many pads as EMS-SD describes."""

import pytest
from decoding import PATHS, Foreseeing, decode, plain_tokens, prompts
from random_models import VOCAB, random_head, random_target

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.padded import PADDINGS, PaddedDecoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.maxgram import PromptLookup


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.mark.parametrize("mode", PADDINGS)
@pytest.mark.parametrize("rows", [1, 4])
def test_padded_decoding_changes_no_output(target, mode, rows):
    lengths = [5, 17, 9, 13]
    requests = [Request(p, n) for p, n in zip(prompts(4), lengths, strict=True)]
    expected = [plain_tokens(target, r.prompt, r.max_new_tokens) for r in requests]
    tree = StaticTree(PATHS, 2)
    answers = {tuple(r.prompt): answer for r, answer in zip(requests, expected, strict=True)}
    for drafter in (
        None,
        Foreseeing(answers),
        PromptLookup(1, 5, rows),
        FalconDrafter(random_head(target, 2), target, tree, rows, 128),
        FalconDrafter(random_head(target, 2, feature_layers=(1,)), target, tree, rows, 128),
        SSD(random_target(seed=3), rows, 128, gamma=3),
    ):
        decoder = PaddedDecoder(target, drafter, rows, 256, *PADDINGS[mode])
        outputs, right = [], isinstance(drafter, Foreseeing)
        for start in range(0, 4, rows):
            decoder.packed.begin(rows)
            outputs += decode(decoder, requests[start : start + rows], accepts=right)
        assert outputs == expected


def test_pads_are_counted_as_by_hand(target):
    """Two rows without a draft: prompts of 3 and 8 tokens, 2 and 4 new tokens."""
    requests = [Request([1, 2, 3], 2), Request([VOCAB - 1] * 8, 4)]
    decoder = PaddedDecoder(target, None, 2, 64)
    decoder.packed.begin(2)
    list(decoder.run(requests))
    # Prompts: 3 + 5 pads, and 8. Second step: 1 and 1. Then row 0 has ended: a pad each step.
    assert (decoder.timing.inputs, decoder.timing.input_pads) == (3 + 8 + 2 + 2, 5 + 2)
    # Cached before each step: nothing; 3 + 5 pads, and 8; then 9 and 10 of the second row.
    assert (decoder.timing.cached, decoder.timing.cache_pads) == (3 + 8 + 9 + 10, 5)
