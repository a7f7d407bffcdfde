"""The Falcon head: its mask, its rollout, and drafting that equals training."""

from typing import get_args, get_type_hints

import pytest
import torch
from random_models import VOCAB, draft_logits, kept_for_backward, random_head, random_target

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.falcon import FalconHead
from specdraft.models.sar.blocks import block_index
from specdraft.models.sar.coupling import COUPLINGS
from specdraft.models.sar.fusion import FUSIONS, LSTM, LinearFusion
from specdraft.models.sar.reading import READINGS
from specdraft.recipes.errors import TargetError
from specdraft.recipes.sections.drafters import HeadSection


@pytest.fixture(scope="module")
def target():
    return random_target()


class Decaying(LinearFusion):
    """A fusion defined by a test: its output fades by half at every position."""

    def start(self, sequences, device):
        return (torch.zeros(1, sequences, self.out_features, device=device),)

    def forward(self, inputs, state=()):
        (before,) = state or self.start(len(inputs), inputs.device)
        fused, told = [], super().forward(inputs)[0]
        for one in told.unbind(1):
            fused.append((fused[-1] if fused else before[0]) / 2 + one)
        return torch.stack(fused, 1), (torch.stack(fused, 1)[None],)


@pytest.fixture(params=[*FUSIONS, "decaying"])
def fusion(request, monkeypatch):
    """Every fusion by name, and one added as a class with an entry in the table."""
    monkeypatch.setitem(FUSIONS, "decaying", Decaying)
    return request.param


# What slots read, and how they are coupled; the paper's head first.
SLOTS = [
    {"reads": reads, "coupling": coupling}
    for coupling in ("none", "recurrent", "markov")
    for reads in ("own", "both", "newest")
    if coupling != "markov" or reads == "both"
]
NAMES = [f"{slots['reads']}-{slots['coupling']}" for slots in SLOTS]
every_slot = pytest.mark.parametrize("slots", SLOTS, ids=NAMES)


def test_a_recipe_accepts_every_reading_coupling_and_fusion():
    known = get_type_hints(HeadSection)
    for key, parts in (("reads", READINGS), ("coupling", COUPLINGS)):
        assert get_args(known[key]) == tuple(parts)
    # EAGLE-3's "layers" fuses no pairs, and only published heads are "biased".
    assert {*get_args(known["fusion"])} - {"layers"} == FUSIONS.keys() - {"biased"}


def pairs(batch: int, length: int, hidden: int = 16):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(batch, length, hidden, generator=generator)  # noqa: E731
    return draw(), draw()


def test_the_lstm_equals_torchs_own():
    torch.manual_seed(0)
    ours, theirs = LSTM(6, 4, 2), torch.nn.LSTM(6, 4, 2, batch_first=True)
    order = [*range(8), *range(12, 16), *range(8, 12)]  # torch: input, forget, cell, output
    for n in range(2):
        state = theirs.state_dict()
        state[f"weight_ih_l{n}"].copy_(ours.input[n].weight[order])
        state[f"bias_ih_l{n}"].copy_(ours.input[n].bias[order])
        state[f"weight_hh_l{n}"].copy_(ours.recurrent[n][order])
        state[f"bias_hh_l{n}"].zero_()
    x = torch.randn(3, 5, 6)
    fused, (hidden, cell) = ours(x)
    expected, (last_h, last_c) = theirs(x)
    torch.testing.assert_close(fused, expected)
    torch.testing.assert_close(hidden[:, :, -1], last_h)
    torch.testing.assert_close(cell[:, :, -1], last_c)


def test_the_lstms_gradient_passes_gradcheck():
    torch.manual_seed(0)
    lstm = LSTM(3, 2, 2).double()
    start = tuple(torch.randn(2, 2, 2, dtype=torch.double, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    weights = tuple(lstm.parameters())

    def run(x, h, c, *_):
        return lstm(x, (h, c))[1]

    assert torch.autograd.gradcheck(run, (x, *start, *weights))


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_position_sees_its_own_block_and_everything_before(target, phase):
    """Brute force: move one input at a time and see which outputs move."""
    head = random_head(target, block_size=3, fusion="linear", layers=2)
    ahead, features = pairs(1, 10)
    blocks = block_index(10, 3, phase)[None]
    before = head(ahead, features, blocks)[0, 0]
    for j in range(10):
        moved = features.clone()
        moved[0, j] += 1.0
        after = head(ahead, moved, blocks)[0, 0]
        changed = (after - before).abs().amax(-1) > 1e-6
        assert changed.tolist() == [bool(blocks[0, j] <= b) for b in blocks[0]], j


def test_padding_changes_no_output(target):
    head = random_head(target)
    ahead, features = pairs(1, 12)
    blocks = block_index(12, 2, 1)[None]
    expected = head(ahead[:, :7], features[:, :7], blocks[:, :7], passes=3)
    valid = torch.arange(12)[None] < 7
    got = head(ahead, features, blocks, valid, passes=3)
    torch.testing.assert_close(got[:, :, :7], expected)


@pytest.mark.parametrize(("k", "layers"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_rollout_equals_feeding_each_block_by_hand(target, fusion, k, layers):
    check_rollout(random_head(target, k, fusion=fusion, layers=layers))


@every_slot
@pytest.mark.parametrize("layers", [1, 2])
def test_rollout_equals_feeding_each_block_by_hand_for_all_slots(target, slots, layers):
    check_rollout(random_head(target, 3, fusion="lstm", layers=layers, **slots))


def check_rollout(head):
    """Pass r at block b == the head on true pairs up to block b - r, then block by block on its own
    predictions."""
    k = head.config.block_size
    ahead, features = pairs(1, 4 * k)
    blocks = block_index(4 * k, k, k)[None]
    rolled = head(ahead, features, blocks, passes=3)
    for b in range(4):
        stop = (b + 1) * k
        for number in range(min(3, b + 1)):
            fed = features.clone()
            for step in range(number):  # each block from the one before
                start = (b - number + 1 + step) * k
                fed[:, start : start + k] = head(ahead, fed, blocks)[0, :, start - k : start]
            expected = head(ahead, fed, blocks)[0]
            torch.testing.assert_close(
                rolled[number, :, b * k : stop], expected[:, b * k : stop], atol=1e-5, rtol=1e-4
            )


def test_rollout_feeds_a_block_only_from_a_complete_one(target):
    """As in drafting; a row's first block may be incomplete."""
    head = random_head(target, 3)
    given, blocks = pairs(1, 11), block_index(11, 3, 2)[None]
    rolled = head(*given, blocks, passes=2)
    torch.testing.assert_close(rolled[1, :, :5], rolled[0, :, :5])
    assert not torch.isclose(rolled[1, :, 5:], rolled[0, :, 5:]).all(-1).any()


@every_slot
@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_slot_sees_exactly_the_inputs_and_tokens_it_may(target, slots, phase):
    """Brute force: move one input or token at a time and see which outputs of complete blocks move.
    A coupled slot sees the token before its own, or all earlier ones of its block."""
    head = random_head(target, 3, fusion="linear", layers=2, **slots)
    (ahead, features), k = pairs(1, 12), 3
    blocks = block_index(12, k, phase)[None]
    whole = [i for i in range(12 - k) if blocks[0].bincount()[blocks[0, i]] == k]
    given = {"ahead": ahead, "features": features, "drafted": ahead}
    before = head(blocks=blocks, **given)[0, 0, whole]

    def moved(name: str, j: int) -> set[int]:
        other = given[name].clone()
        other[0, j] += 1.0
        after = head(blocks=blocks, **given | {name: other})[0, 0, whole]
        return {whole[n] for n in ((after - before).abs().amax(-1) > 1e-6).nonzero()[:, 0]}

    for j in range(12):
        assert moved("features", j) == {i for i in whole if blocks[0, j] <= blocks[0, i]}
        heard = set()  # positions whose earlier slots drafted the token after j
        for i in whole:
            slot = blocks[0, :i].eq(blocks[0, i]).sum()
            drafted_before = range(i + k - 1, i + k - 1 - slot, -1)
            if slots["coupling"] == "recurrent" and j in drafted_before:
                heard.add(i)
            if slots["coupling"] == "markov" and slot > 0 and j == i + k - 1:
                heard.add(i)
        assert moved("drafted", j) == heard


def read_block_by_block(head, given, revised, blocks, valid, passes):
    """`revised`, the slow way: every block, touched or not, is revised in a row of its own; later
    passes run as if nothing had been revised."""
    together = head(*given, blocks, valid, passes=passes)
    for row, length in enumerate(valid.sum(1).tolist()):
        for b in blocks[row, :length].unique():
            here = (blocks[row] == b) & valid[row]
            one = [x[row : row + 1].clone() for x in given]
            for x, other in zip(one, revised[:2], strict=True):
                x[0] = torch.where((revised[2][row] & here)[:, None], other[row], x[0])
            drafted = given[0][row : row + 1]
            mine = blocks[row : row + 1], valid[row : row + 1]
            alone = head(*one, *mine, drafted=drafted)[0, 0]
            where = here.nonzero()[:, 0]
            together = together.index_put(
                (torch.tensor([0]), torch.tensor([row]), where), alone[where]
            )
    return together


def outcome(predicted, valid, head):
    """Predictions and the gradient of every weight, for a loss without padding."""
    cotangent = torch.randn(predicted.shape, generator=torch.Generator().manual_seed(5))
    head.zero_grad()
    (predicted * cotangent)[:, valid].sum().backward()
    return [predicted[:, valid], *(weight.grad for weight in head.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("k", "layers", "share"), [(1, 1, 0.5), (2, 1, 0.2), (2, 2, 1.0), (3, 2, 0.3), (4, 1, 0.15)]
)
def test_a_revised_block_affects_only_itself(target, fusion, checkpointing, k, layers, share):
    head = random_head(target, k, fusion=fusion, layers=layers)
    check_revision(head, checkpointing, share)


@every_slot
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_revised_block_affects_only_itself_for_all_slots(target, slots, checkpointing):
    check_revision(random_head(target, 3, layers=2, **slots), checkpointing, 0.3)


def check_revision(head, checkpointing: bool, share: float):
    """Rows of different lengths and phases, one without a revision. Blocks that are not revised,
    and so not read again, predict the same as if they were. Incomplete blocks count only for the
    paper's head."""
    k = head.config.block_size
    head.checkpointing = checkpointing
    given, other = pairs(4, 14), [x.flip(0) for x in pairs(4, 14)]
    blocks = torch.stack([block_index(14, k, 1 + row % k) for row in range(4)])
    valid = torch.arange(14) < torch.tensor([[14], [13], [9], [4]])
    drawn = torch.rand(4, 14, generator=torch.Generator().manual_seed(k)) < share
    touched = drawn & valid & (torch.arange(4) != 1)[:, None]
    revised = [torch.where(touched[..., None], x, y) for x, y in zip(other, given, strict=True)]
    revised = (*revised, touched)
    by_block = read_block_by_block(head, given, revised, blocks, valid, 2)
    together = head(*given, blocks, valid, passes=2, revised=revised, drafted=given[0])
    if not head.config.is_plain:
        valid = valid & whole_blocks(blocks, valid, k)
    expected = outcome(by_block, valid, head)
    for ours, theirs in zip(outcome(together, valid, head), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(together[0], head(*given, blocks, valid)[0])


def whole_blocks(blocks, valid, k):
    """Positions [B, T] of blocks that have all K positions, and the K - 1 tokens after them."""
    sizes = torch.zeros_like(blocks).scatter_add(1, blocks, valid.long())
    lengths = valid.sum(1, keepdim=True)
    return (sizes.gather(1, blocks) == k) & (torch.arange(blocks.shape[1]) < lengths - k + 1)


def test_revising_nothing_changes_nothing(target, fusion):
    head = random_head(target, 2, fusion=fusion)
    given, blocks = pairs(2, 9), block_index(9, 2, 1).expand(2, -1)
    nowhere = torch.zeros(2, 9, dtype=torch.bool)
    expected = head(*given, blocks, passes=2)
    assert torch.equal(head(*given, blocks, passes=2, revised=(*given, nowhere)), expected)


@pytest.mark.parametrize("touched", [1, 3])
def test_only_revised_blocks_are_read_again(target, touched):
    """The decoder layer reads every position, then as many blocks as the row with most has."""
    head = random_head(target, 3)
    given, blocks = pairs(2, 12), block_index(12, 3, 3).expand(2, -1)
    where = torch.zeros(2, 12, dtype=torch.bool)
    where[0, : 3 * touched : 3] = where[1, 4] = True
    read = []
    head.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    head(*given, blocks, revised=(*given, where))
    assert read == [12, 3 * touched]


@pytest.mark.parametrize("revise", [False, True])
def test_checkpointing_keeps_less_memory_and_changes_no_bit(target, revise):
    ahead, features = pairs(2, 12)
    blocks = block_index(12, 2, 1).expand(2, -1)
    touched = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    revised = (features, ahead, touched) if revise else None
    outcomes = []
    for checkpointing in (False, True):
        head = random_head(target, layers=2)
        head.checkpointing = checkpointing
        inputs = (ahead, features, blocks)
        predicted, kept = kept_for_backward(head, *inputs, passes=3, revised=revised)
        predicted.square().sum().backward()
        outcomes.append((kept, predicted, *(weight.grad for weight in head.parameters())))
    (whole, *expected), (less, *got) = outcomes
    assert less < 0.6 * whole
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafting_predicts_what_the_head_predicts_in_training(target, fusion, k):
    check_draft(random_head(target, k, fusion=fusion), target)


@every_slot
@pytest.mark.parametrize(
    ("fusion", "k", "layers"), [("linear", 2, 2), ("lstm", 3, 1), ("linear", 4, 1)]
)
def test_drafting_predicts_what_is_trained_for_all_slots(target, slots, fusion, k, layers):
    # In deeper layers, slots that read their own position keep keys of earlier block boundaries.
    layers = 1 if slots["reads"] == "own" else layers
    check_draft(random_head(target, k, fusion=fusion, layers=layers, **slots), target)


def check_draft(head, target):
    """Whatever was accepted, a draft equals the head over the whole sequence at once, with blocks
    right-aligned at the newest position."""
    k = head.config.block_size
    prompt = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    paths = [(0,) * n for n in range(1, 2 * k + 1)] + [(1,) + (0,) * n for n in range(2 * k)]
    drafter = FalconDrafter(head, target, StaticTree(paths, k), 1, 128)
    seen = []

    class Recorder:
        """Records each draft with the sequence it was made for."""

        forwards, max_nodes, rules = 0, drafter.max_nodes, drafter.rules
        start, observe, from_tokens = drafter.start, drafter.observe, False

        def draft(self, rows):
            trees = drafter.draft(rows)
            seen.append(dict(zip(drafter.tree.paths, trees[0].tokens.tolist(), strict=True)))
            return trees

    done = next(Decoder(target, Recorder(), 1, 128).run([Request(prompt, 14)]))
    tokens, length = prompt + done.tokens, len(prompt)
    # The first step reads the prompt and drafts nothing.
    assert len(seen) == len(done.steps) - 1 > 3
    for draft, step in zip(seen, done.steps, strict=False):
        length += step.emitted
        expected = brute_force_draft(head, target, tokens[:length], k)
        assert len(expected) == len(draft)
        assert {path: draft[path] for path in expected} == expected


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_does_not_depend_on_other_rows(target, fusion, k):
    check_rows(random_head(target, k, fusion=fusion), target)


@every_slot
def test_a_draft_does_not_depend_on_other_rows_for_all_slots(target, slots):
    check_rows(random_head(target, 3, fusion="linear", **slots), target)


def check_rows(head, target):
    """Rows admitted late bring short and long prompts that are read together with other rows."""
    k = head.config.block_size
    tree = StaticTree([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)], k)
    generator = torch.Generator().manual_seed(4)
    lengths = ((2, 9), (70, 3), (4, 12), (30, 5), (5, 9), (100, 6), (3, 4))
    requests = [
        Request(torch.randint(VOCAB, (length,), generator=generator).tolist(), new)
        for length, new in lengths
    ]

    def drafted(rows: int, some: list[Request]) -> list[list]:
        decoder = Decoder(target, FalconDrafter(head, target, tree, rows, 160), rows, 160)
        done = sorted(decoder.run(some), key=lambda one: one.index)
        return [[step.tokens for step in one.steps] for one in done]

    assert drafted(3, requests) == [drafted(1, [request])[0] for request in requests]


def brute_force_draft(head, target, tokens, k):
    """Redo the two chains of a draft, slot by slot."""
    expected = {}
    for first in (0, 1):
        path, drafted = (), []
        for rank in (first, *[0] * (2 * k - 1)):
            path = (*path, rank)
            logits = draft_logits(head, target, tokens, drafted)
            expected[path] = int(logits.topk(2).indices[rank])
            drafted.append(expected[path])
    return expected


def test_a_saved_head_loads_unchanged(target, tmp_path):
    head = random_head(target, layers=2)
    head.save_pretrained(tmp_path)
    again = FalconHead.from_pretrained(tmp_path)
    assert again.config == head.config
    ahead, features = pairs(2, 6)
    blocks = block_index(6, 2, 2).expand(2, -1)
    assert torch.equal(again(ahead, features, blocks), head(ahead, features, blocks))
    expected = {"config.json", "model.safetensors", "SHA256SUMS"}
    assert expected == {path.name for path in tmp_path.iterdir()}


def test_a_head_refuses_another_target(target):
    head = random_head(target)
    head.check_target(target.identity())
    with pytest.raises(TargetError, match="trained for random-0"):
        head.check_target(random_target(seed=9).identity())


def test_scales_make_a_head_independent_of_the_targets_magnitudes(target):
    """The target's embeddings are 10 times larger, its features 100 times."""
    head = random_head(target)
    large = random_head(target)
    large.config = type(head.config)(
        **{**vars(head.config), "embed_scale": 3.0, "feature_scale": 100.0}
    )
    ahead, features = pairs(1, 8)
    blocks = block_index(8, 2, 2)[None]
    got = large(10 * ahead, 100 * features, blocks, passes=2)
    expected = 100 * head(ahead, features, blocks, passes=2)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
