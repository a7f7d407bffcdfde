"""Forwards of fixed shapes equal packed ones; on a GPU they are replayed as CUDA graphs."""

import pytest
import torch
from decoding import PATHS, completions, decode, plain_tokens, prompts
from random_models import random_head, random_target

from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.level import TSD
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.drafters.whole_draft import DraftGrid
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.grid import KNOWN, MOST, Grid, GridTarget
from specdraft.eval.engine.plan import Segment
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Topology, chain
from specdraft.models.passes.graphs import Replays, slots_in_sight
from specdraft.models.passes.replayed import ReplayedPass
from specdraft.models.target import Target

NARROW = [path for path in PATHS if not any(path[:-1])]


@pytest.fixture(scope="module")
def target():
    return random_target()


GREEDY = [Request(prompt, 17) for prompt in prompts()]
SAMPLED = [
    Request(prompt, 15, seed=n, temperature=1.3, top_k=15, top_p=0.95)
    for n, prompt in enumerate(prompts())
]


@pytest.fixture(scope="module")
def plain(target):
    """The target's own answers to greedy and to sampled requests."""
    greedy = [plain_tokens(target, request.prompt, 17) for request in GREEDY]
    return greedy, decode(Decoder(target, None, 1, 128), SAMPLED)


@pytest.fixture
def fixed(monkeypatch):
    """Use fixed shapes everywhere, as on a GPU, and count the calls that take them."""
    counts = {"steps": 0, "packed": 0, "passes": 0, "drafts": 0}

    def counting(kind: type, method: str, name: str) -> None:
        whole = getattr(kind, method)

        def counted(self, *inputs):
            result = whole(self, *inputs)
            counts["packed" if result is None else name] += 1
            return result

        monkeypatch.setattr(kind, method, counted)

    monkeypatch.setattr(Target, "replays", property(lambda self: self.cuda_graphs))
    counting(GridTarget, "_grid_of", "steps")
    counting(ReplayedPass, "_replay", "passes")
    counting(DraftGrid, "draft", "drafts")
    return counts


def drafter_of(target: Target, name: str, rows: int):
    head = random_head(target, 2, fusion="linear", reads="newest", coupling="recurrent")
    return {
        "plain": lambda: None,
        "tree": lambda: FalconDrafter(head, target, StaticTree(PATHS, 2), rows, 128),
        "narrow": lambda: FalconDrafter(head, target, StaticTree(NARROW, 2), rows, 128),
        "dynamic": lambda: DynamicFalcon(head, target, None, rows, 128),
        "ssd": lambda: SSD(target, rows, 128, 4, 0.2),
        "tsd": lambda: TSD(target, rows, 128, 3, nodes=32),
    }[name]()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ["plain", "tree", "narrow", "dynamic", "ssd", "tsd"])
def test_forwards_of_fixed_shapes_change_no_output(target, plain, fixed, name, rows):
    for requests, expected in zip((GREEDY, SAMPLED), plain, strict=True):
        decoder = Decoder(target, drafter_of(target, name, rows), rows, 128)
        assert decode(decoder, requests, accepts=False) == expected
        assert fixed["steps"] >= 5


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"reads": "own"}),
        (2, {"reads": "both", "coupling": "markov", "feature_layers": (1,)}),
        (2, {"reads": "newest", "coupling": "recurrent", "layers": 2, "draft_vocab": 12}),
        (3, {"reads": "both", "coupling": "recurrent", "kv_heads": 4}),
    ],
)
@pytest.mark.parametrize("kind", ["narrow", "tree", "dynamic"])
def test_forwards_of_fixed_shapes_change_no_draft(target, fixed, kind, size, options, rows):
    head = random_head(target, size, fusion="linear", **options)
    tree = StaticTree(NARROW if kind == "narrow" else PATHS, size)
    requests = [Request(prompt, 9 + 3 * n) for n, prompt in enumerate(prompts())]
    steps = []
    for target.cuda_graphs in (False, True):
        before = fixed["passes"] + fixed["drafts"]
        drafter = (
            DynamicFalcon(head, target, None, rows, 128)
            if kind == "dynamic"
            else FalconDrafter(head, target, tree, rows, 128)
        )
        done = completions(Decoder(target, drafter, rows, 128), requests, accepts=False)
        steps.append([one.steps for one in done])
        went = fixed["passes"] + fixed["drafts"] > before
        assert went == (target.cuda_graphs and (kind != "dynamic" or rows == 1))
    assert steps[0] == steps[1]


def test_prompts_custom_masks_and_wide_trees_stay_packed(target, fixed):
    prompt = prompts()[1]
    request = Request(prompt, 5)
    assert decode(Decoder(target, None, 1, 128), [request]) == [plain_tokens(target, prompt, 5)]
    assert fixed["packed"] == 1  # the prompt
    packed = GridTarget(target, 1, 256)
    bias = torch.zeros(2, 5)
    assert packed._grid_of([Segment(0, 3, 2, bias)]) is None
    assert packed._grid_of([Segment(0, 3, MOST, bias, 0, chain(MOST - 1))])
    assert packed._grid_of([Segment(0, 3, MOST + 1, bias, 0, chain(MOST))]) is None


def test_a_grid_forgets_the_least_recently_used_tree_shape(target):
    packed = GridTarget(target, 1, 16)
    packed.pool.lengths[0] = 3
    grid = packed._grid_of([packed.segment(0, chain(2))])
    first, second = Topology([-1, 0, 0]), Topology([-1, 0, 1])
    for shape in (first, second):
        grid._number(Segment(0, 0, 3, None, 0, shape))
    for _ in range(KNOWN - 3):
        grid._number(Segment(0, 0, 3, None, 0, Topology([-1, 0, 0])))
    numbers = {grid._number(Segment(0, 0, 3, None, 0, first))}  # used again
    last = Topology([-1, 0, 1])
    numbers.add(grid._number(Segment(0, 0, 3, None, 0, last)))
    assert first in grid._numbers
    assert second not in grid._numbers
    assert len(numbers) == 2
    assert torch.equal(grid._known[grid._numbers[last]], grid._view(last))


def test_pads_never_write_into_rows_or_slots_in_use(target):
    packed = GridTarget(target, 3, 16)
    packed.pool.lengths[1] = 3
    grid = packed._grid_of([packed.segment(1, chain(2))])
    assert isinstance(grid, Grid)
    assert len(grid.ids) == 2 * grid.tokens  # row 0, below it, is included
    keys = packed.pool.layers[0].zero_()  # clears what the trial run wrote
    ids = torch.tensor([4, 5, 6])
    with torch.inference_mode():
        packed.forward(ids, 3 + torch.arange(3), [packed.segment(1, chain(2))])
    assert keys[:, 1, :, 3:6].any(-1).all()
    assert not keys[:, [0, 2], :, :16].any()
    assert not keys[:, 1, :, 6:16].any()
    assert not keys[:, 1, :, :3].any()


def test_cache_lengths_are_rounded_up_to_a_few_values():
    seen = {slots_in_sight(stop, 1000) for stop in range(1, 1001)}
    assert seen == {128, 256, 512, 1000}
    assert all(slots_in_sight(stop, 1000) >= stop for stop in range(1, 1001))


def test_a_function_that_cannot_be_captured_runs_uncaptured_with_a_warning():
    replays = Replays(torch.device("cpu"))
    replays.is_replaying = True  # though this device cannot capture

    def fails(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    replays._capture = fails
    with pytest.warns(UserWarning, match=r"target\.cuda_graphs: goes on without: operation not"):
        assert replays.run("key", lambda: 3) == 3
    assert replays.run("key", lambda: 4) == 4
