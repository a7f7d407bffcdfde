"""The Falcon head: its mask, its rollout, and drafting that meets what training showed."""

from typing import get_args, get_type_hints

import pytest
import torch
from random_models import VOCAB, kept_for_backward, random_head, random_target

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.falcon import FalconHead, block_index
from specdraft.models.fusion import FUSIONS, LSTM, LinearFusion
from specdraft.recipes.errors import TargetError
from specdraft.recipes.sections.drafters import HeadSection


@pytest.fixture(scope="module")
def target():
    return random_target()


class Decaying(LinearFusion):
    """A fusion of a test's own: what it says fades by half at every position."""

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
    """Every fusion by its name, and one that is added as a class and an entry of the table."""
    monkeypatch.setitem(FUSIONS, "decaying", Decaying)
    return request.param


def test_a_recipe_knows_every_fusion():
    assert get_args(get_type_hints(HeadSection)["fusion"]) == tuple(FUSIONS)


def pairs(batch: int, length: int, hidden: int = 16):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(batch, length, hidden, generator=generator)  # noqa: E731
    return draw(), draw()


def test_the_lstm_equals_torchs_own():
    torch.manual_seed(0)
    ours, theirs = LSTM(6, 4, 2), torch.nn.LSTM(6, 4, 2, batch_first=True)
    order = [*range(8), *range(12, 16), *range(8, 12)]  # theirs: input, forget, cell, output
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


def test_the_lstms_gradient_is_right():
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


def test_padding_never_moves_an_output(target):
    head = random_head(target)
    ahead, features = pairs(1, 12)
    blocks = block_index(12, 2, 1)[None]
    expected = head(ahead[:, :7], features[:, :7], blocks[:, :7], passes=3)
    valid = torch.arange(12)[None] < 7
    got = head(ahead, features, blocks, valid, passes=3)
    torch.testing.assert_close(got[:, :, :7], expected)


@pytest.mark.parametrize(("k", "layers"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_rollout_equals_feeding_each_block_by_hand(target, fusion, k, layers):
    """Pass r at block b == running the head on true pairs up to block b - r, and then block by
    block on its own predictions."""
    head = random_head(target, k, fusion=fusion, layers=layers)
    ahead, features = pairs(1, 4 * k)
    blocks = block_index(4 * k, k, k)[None]
    rolled = head(ahead, features, blocks, passes=3)
    for b in range(4):
        for number in range(min(3, b + 1)):
            fed = features.clone()
            for step in range(number):  # predict block by block, from the block before
                start = (b - number + 1 + step) * k
                so_far = head(ahead[:, :start], fed[:, :start], blocks[:, :start])[0]
                fed[:, start : start + k] = so_far[:, start - k :]
            stop = (b + 1) * k
            expected = head(ahead[:, :stop], fed[:, :stop], blocks[:, :stop])[0]
            torch.testing.assert_close(
                rolled[number, :, b * k : stop], expected[:, b * k : stop], atol=1e-5, rtol=1e-4
            )


def read_block_by_block(head, given, revised, blocks, valid, passes):
    """What `revised` asks for, the slow way: every block, touched or not, at the end of a row of
    its own, revised there and nowhere before; later passes as if nothing was ever revised."""
    together = head(*given, blocks, valid, passes=passes)
    for row, length in enumerate(valid.sum(1).tolist()):
        for b in blocks[row, :length].unique():
            here = torch.arange(blocks.shape[1])[blocks[row] == b].clamp(max=length - 1).unique()
            stop = int(here.max()) + 1
            one = [x[row : row + 1, :stop].clone() for x in given]
            for x, other in zip(one, revised[:2], strict=True):
                x[0, here] = torch.where(revised[2][row, here, None], other[row, here], x[0, here])
            alone = head(*one, blocks[row : row + 1, :stop])[0, 0]
            together = together.index_put(
                (torch.tensor([0]), torch.tensor([row]), here), alone[here]
            )
    return together


def outcome(predicted, valid, head):
    """Predictions and the gradient of every weight, for a loss on what is no padding."""
    cotangent = torch.randn(predicted.shape, generator=torch.Generator().manual_seed(5))
    head.zero_grad()
    (predicted * cotangent)[:, valid].sum().backward()
    return [predicted[:, valid], *(weight.grad for weight in head.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("k", "layers", "share"), [(1, 1, 0.5), (2, 1, 0.2), (2, 2, 1.0), (3, 2, 0.3), (4, 1, 0.15)]
)
def test_a_revised_block_is_read_by_itself_alone(target, fusion, checkpointing, k, layers, share):
    """Rows of other lengths and phases, one without any revision; also what is not revised, and so
    is not read again, predicts what it would if it were."""
    head = random_head(target, k, fusion=fusion, layers=layers)
    head.checkpointing = checkpointing
    given, other = pairs(4, 14), [x.flip(0) for x in pairs(4, 14)]
    blocks = torch.stack([block_index(14, k, 1 + row % k) for row in range(4)])
    valid = torch.arange(14) < torch.tensor([[14], [13], [9], [4]])
    drawn = torch.rand(4, 14, generator=torch.Generator().manual_seed(k)) < share
    touched = drawn & valid & (torch.arange(4) != 1)[:, None]
    revised = [torch.where(touched[..., None], x, y) for x, y in zip(other, given, strict=True)]
    revised = (*revised, touched)
    expected = outcome(read_block_by_block(head, given, revised, blocks, valid, 2), valid, head)
    together = head(*given, blocks, valid, passes=2, revised=revised)
    for ours, theirs in zip(outcome(together, valid, head), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(together[0], head(*given, blocks, valid)[0])


def test_revising_nothing_changes_nothing(target, fusion):
    head = random_head(target, 2, fusion=fusion)
    given, blocks = pairs(2, 9), block_index(9, 2, 1).expand(2, -1)
    nowhere = torch.zeros(2, 9, dtype=torch.bool)
    expected = head(*given, blocks, passes=2)
    assert torch.equal(head(*given, blocks, passes=2, revised=(*given, nowhere)), expected)


@pytest.mark.parametrize("touched", [1, 3])
def test_only_what_is_revised_is_read_again(target, touched):
    """The decoder layer meets every position once, and then the blocks of the fullest row."""
    head = random_head(target, 3)
    given, blocks = pairs(2, 12), block_index(12, 3, 3).expand(2, -1)
    where = torch.zeros(2, 12, dtype=torch.bool)
    where[0, : 3 * touched : 3] = where[1, 4] = True
    read = []
    head.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    head(*given, blocks, revised=(*given, where))
    assert read == [12, 3 * touched]


@pytest.mark.parametrize("revise", [False, True])
def test_checkpointing_keeps_less_and_changes_no_bit(target, revise):
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
    """Whatever was accepted before, a draft equals the head over the whole sequence at once, with
    the block boundary right-aligned at the newest position."""
    head = random_head(target, k, fusion=fusion)
    prompt = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    paths = [(0,) * n for n in range(1, 2 * k + 1)] + [(1,) + (0,) * n for n in range(2 * k)]
    drafter = FalconDrafter(head, target, StaticTree(paths, k), 1, 128)
    seen = []

    class Recorder:
        """Notes each draft beside the sequence it was made for."""

        forwards, max_nodes, rules = 0, drafter.max_nodes, drafter.rules
        start, observe, from_tokens = drafter.start, drafter.observe, False

        def draft(self, rows):
            trees = drafter.draft(rows)
            seen.append(dict(zip(drafter.tree.paths, trees[0].tokens.tolist(), strict=True)))
            return trees

    done = next(Decoder(target, Recorder(), 1, 128).run([Request(prompt, 14)]))
    tokens, length = prompt + done.tokens, len(prompt)
    # The first step reads the prompt, with nothing to draft from.
    assert len(seen) == len(done.steps) - 1 > 3
    for draft, step in zip(seen, done.steps, strict=False):
        length += step.emitted
        expected = brute_force_draft(head, target, tokens[:length], draft, k)
        assert len(expected) == len(draft)
        assert {path: draft[path] for path in expected} == expected


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_does_not_depend_on_the_rows_beside_it(target, fusion, k):
    """Rows that are admitted late bring prompts, short and long, that others are read beside."""
    head = random_head(target, k, fusion=fusion)
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


def brute_force_draft(head, target, tokens, draft, k):
    """Redo the two chains of a draft by whole-sequence forwards of the head."""
    ids = torch.tensor([tokens])
    features, ahead = target.features(ids)[:, :-1], target.embed(ids[:, 1:])
    expected = {}
    for first in (0, 1):
        fed, next_ahead = features, ahead
        path = ()
        for number in range(2):
            count = fed.shape[1]
            blocks = block_index(count, k, (count - 1) % k + 1)[None]
            out = head(next_ahead, fed, blocks)[0][:, -k:]
            ranked = target.logits(out)[0].topk(2).indices
            for n in range(k):
                rank = first if number == n == 0 else 0
                path = (*path, rank)
                expected[path] = int(ranked[n, rank])
            block = torch.tensor([[expected[path[: len(path) - k + n + 1]] for n in range(k)]])
            fed = torch.cat((fed, out), 1)
            next_ahead = torch.cat((next_ahead, target.embed(block)), 1)
    return expected


def test_a_saved_head_is_the_same_head(target, tmp_path):
    head = random_head(target, layers=2)
    head.save_pretrained(tmp_path)
    again = FalconHead.from_pretrained(tmp_path)
    assert again.config == head.config
    ahead, features = pairs(2, 6)
    blocks = block_index(6, 2, 2).expand(2, -1)
    assert torch.equal(again(ahead, features, blocks), head(ahead, features, blocks))
    assert {"config.json", "model.safetensors", "README.md"} == {p.name for p in tmp_path.iterdir()}


def test_a_head_knows_its_target(target):
    head = random_head(target)
    head.check_target(target.identity())
    with pytest.raises(TargetError, match="trained for random-0"):
        head.check_target(random_target(seed=9).identity())


def test_scales_make_a_head_indifferent_to_the_targets_units(target):
    """The same head on a target whose embeddings and features are 10 and 100 times larger."""
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
