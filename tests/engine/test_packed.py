"""Grouping rows for attention changes no output: alone, in runs of equal length, or padded."""

import pytest
import torch
from decoding import PATHS, decode, plain_tokens, prompts
from random_models import random_head, random_target

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine import packed, plan
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.maxgram import PromptLookup


@pytest.fixture(scope="module", params=[2, 4], ids=["gqa", "mha"])
def target(request):
    return random_target(kv_heads=request.param)


def watched_cuts(monkeypatch, device: str) -> list:
    """The groups of segments that attend together, for every plan, as they are on a device."""
    made, whole = [], plan._attention_groups

    def seen(placed, _):
        cut = whole(placed, torch.device(device))
        made.append([[segment for _, segment in group] for group in cut])
        return cut

    monkeypatch.setattr(plan, "_attention_groups", seen)
    return made


@pytest.fixture
def cuts(monkeypatch):
    return watched_cuts(monkeypatch, "cpu")


@pytest.fixture
def cuts_as_on_cuda(monkeypatch):
    """On CUDA all short segments attend in one padded call; here the CPU does the same."""
    return watched_cuts(monkeypatch, "cuda")


def test_rows_of_different_lengths_in_one_attention_call_change_no_output(target, cuts_as_on_cuda):
    requests = [Request(prompt, 5 + 4 * n) for n, prompt in enumerate(prompts())]
    expected = [plain_tokens(target, r.prompt, r.max_new_tokens) for r in requests]
    for drafter in (
        None,
        PromptLookup(1, 5, 4),
        FalconDrafter(random_head(target, 2), target, StaticTree(PATHS, 2), 4, 128),
    ):
        assert decode(Decoder(target, drafter, 4, 128, prefill=9), requests) == expected
    groups = [group for cut in cuts_as_on_cuda for group in cut]
    assert any(len({segment.count for segment in group}) > 1 for group in groups)


@pytest.mark.parametrize("on", ["cuts", "cuts_as_on_cuda"])
def test_a_long_prompt_attends_alone_beside_other_rows_and_changes_no_output(target, request, on):
    cuts, long = request.getfixturevalue(on), (prompts()[5] * 4)[:90]
    requests = [Request(long, 6), Request(long, 6), *(Request(p, 9) for p in prompts(3))]
    expected = [plain_tokens(target, r.prompt, r.max_new_tokens) for r in requests]
    assert len(long) > plan.LONG
    for prefill in (1000, 80):
        decoder = Decoder(target, PromptLookup(1, 5, 5), 5, 128, prefill)
        assert decode(decoder, requests) == expected
        assert decode(decoder, requests[::-1]) == expected[::-1]
    beside = [cut for cut in cuts if sum(map(len, cut)) > 1]
    counts = [[segment.count for segment in group] for cut in beside for group in cut]
    assert max(map(max, counts)) > plan.LONG
    assert all(len(group) == 1 for group in counts if max(group) > plan.LONG)


def test_rows_separated_by_idle_rows_attend_in_calls_of_their_own(target, cuts):
    """Rows are idle if a pass does not pay for them; here they have ended."""
    lengths = [40, 40, *[3] * 8, 40]  # two adjacent rows, and one far away
    requests = [Request(prompts()[0], length) for length in lengths]
    expected = [plain_tokens(target, r.prompt, r.max_new_tokens) for r in requests]
    decoder = Decoder(target, PromptLookup(1, 5, len(lengths)), len(lengths), 128)
    decoder._fill_gaps = lambda: None
    assert decode(decoder, requests) == expected
    groups = [[[segment.row for segment in group] for group in cut] for cut in cuts]
    assert groups[1] == [[*range(len(lengths))]]  # all rows run: one group
    assert [[0, 1], [10]] in groups


def test_a_prompt_read_beside_drafts_does_not_widen_their_attention_call(target, cuts):
    """The queue's next prompt, longer than any draft, is read in a call of its own."""
    prompt = prompts()[0] * 4
    wide = len(prompt) + 3  # a draft of 3 follows it
    requests = [Request(prompt, 4), *(Request(prompt, 40 + n) for n in range(7))]
    requests.append(Request(prompt, 9))  # takes the first row once that has ended
    expected = [plain_tokens(target, r.prompt, r.max_new_tokens) for r in requests]
    assert decode(Decoder(target, PromptLookup(1, 3, 8), 8, 128), requests) == expected
    groups = [[[segment.count for segment in group] for group in cut] for cut in cuts]
    assert [[wide] * 8] in groups  # the first prompts, side by side
    (joined,) = [cut for cut in groups if [wide] in cut]
    assert wide <= plan.FEW
    assert max(map(max, (group for group in joined if group != [wide]))) < 5


def test_the_number_of_kept_masks_is_bounded(target):
    decoder = Decoder(target, None, 1, 64)
    for _ in range(3 * packed.KEPT_BIASES):
        decoder.packed.pool.lengths[0] = 7
        decoder.packed.segment(0, packed.Topology([-1, 0, 0]))
    assert decoder.packed._kept_bias.cache_info().currsize == packed.KEPT_BIASES
