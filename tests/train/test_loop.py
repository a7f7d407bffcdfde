"""The training loop on toy rows: the same batch gives the same update however it is split.

As a script it is the job that other processes of these tests run:
    python tests/train/test_loop.py OUT [section.key=value ..] [pace=SECONDS per row read]
"""

from specdraft.recipes.entry import entry

import io
import itertools
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import end, start_ranks
from safetensors.torch import load_file

from specdraft.models.embeddings import TargetEmbeddings
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import from_dict
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.batches import Loader, SamplingPlan
from specdraft.train.fit.journal import StatusBar
from specdraft.train.fit.loop import fit
from specdraft.train.fit.run import Run
from specdraft.train.fit.schedules import learning_rate, total_steps
from specdraft.train.objectives.csgd import CoupledGlancing
from specdraft.train.objectives.head_batch import collate
from specdraft.train.objectives.text import collate_text

HIDDEN, VOCAB, SCALE = 16, 23, 3.0


class ToyRows:
    """Rows of random length whose feature depends on their last two tokens."""

    key = None

    def __init__(self, count=24, longest=14, pace=0.0):
        generator = torch.Generator().manual_seed(7)
        table = torch.randn(VOCAB, VOCAB, HIDDEN, generator=generator) * SCALE
        self.pace, self.rows = pace, []
        for _ in range(count):
            length = int(torch.randint(6, longest + 1, (), generator=generator))
            ids = torch.randint(VOCAB, (length,), generator=generator)
            mask = torch.arange(length) >= int(torch.randint(5, (), generator=generator))
            features = table[ids.roll(1), ids]
            self.rows.append({"input_ids": ids, "loss_mask": mask, "features": features})
        self.lengths = [len(row["input_ids"]) for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.pace)
        return self.rows[index]


def make_recipe(out, **changes):
    """A small recipe; changes are "section.key": value."""
    tree = {
        "name": "toy",
        "data": {"sources": ["tiny"]},
        "loss": {"distill_weight": 0.5},
        "optim": {"lr": 3.0e-3},
        "train": {"steps": 6, "batch_size": 8, "rollout": 2, "log_every": 3, "threads": 1},
        "output": {"dir": str(out)},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return from_dict(tree)


def make_head(k=2, **shape):
    torch.manual_seed(1)
    config = FalconConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        block_size=k,
        heads=2,
        kv_heads=2,
        intermediate_size=32,
        feature_scale=SCALE,
        **shape,
    )
    return FalconHead(config)


def make_ends():
    generator = torch.Generator().manual_seed(3)
    return TargetEmbeddings(*torch.randn(2, VOCAB, HIDDEN, generator=generator))


def train(out, data=None, evaluate=None, k=2, trackers=(), **changes):
    """Run `fit` in this process; return its state and the final weights."""
    AcceleratorState._reset_state(True)
    recipe, head = make_recipe(out, **changes), make_head(k)
    accelerator = make_accelerator(recipe)
    accelerator.log_with += trackers
    objective = CoupledGlancing(recipe, make_ends(), head.config)
    state = fit(head, data or ToyRows(), objective, recipe, accelerator, evaluate)
    return state, {name: tensor.clone() for name, tensor in head.state_dict().items()}


def log_lines(out, kind="train"):
    records = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == kind]
    assert found
    return found


def assert_close(weights, others, tolerance=2e-6):
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=tolerance, msg=name)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


# -- the same update however the batch is split ----------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"glance.isolated": False},
        {"glance.isolated": True},
        {"loss.lk_weight": 0.5, "loss.depth_decay": 0.8},
        {"loss.lk_weight": 0.9, "loss.pace_smoothing": 0.5},
    ],
)
def test_eight_micro_batches_of_one_row_equal_one_of_eight_rows(tmp_path, changes):
    _, whole = train(tmp_path / "whole", **changes)
    _, cut = train(tmp_path / "cut", **changes, **{"train.accumulation": 8})
    # LK has a kink where p and q cross, and Adam amplifies rounding there.
    assert_close(whole, cut, 1e-5 if "loss.lk_weight" in changes else 2e-6)
    for a, b in zip(log_lines(tmp_path / "whole"), log_lines(tmp_path / "cut"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"])
        assert a["glanced"] == b["glanced"] > 0


@pytest.mark.parametrize("most", [1, 24, 40])
def test_splitting_a_batch_into_forwards_of_few_tokens_changes_no_update(tmp_path, most):
    _, whole = train(tmp_path / "whole")
    _, cut = train(tmp_path / "cut", **{"train.forward_tokens": most})
    assert_close(whole, cut)
    for a, b in zip(log_lines(tmp_path / "whole"), log_lines(tmp_path / "cut"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_a_forward_keeps_its_token_limit_and_pads_no_short_row_to_a_long_one():
    lengths = [5, 5, 900, 6, 5, 7, 300, 6]
    rows = [{"input_ids": torch.zeros(n), "loss_mask": torch.ones(n)} for n in lengths]
    plan = SamplingPlan(lengths, batch_size=8, seed=0)
    loader = Loader(rows, plan, collate_text, forward_tokens=24)
    parts = [batch.lengths for batch in loader.load(0)]
    assert sorted(itertools.chain(*parts)) == sorted(lengths)
    assert all(max(part) * len(part) <= 24 or len(part) == 1 for part in parts)
    assert len(parts) == 4  # 5 5 5, 6 6 7, 300, 900
    many = Loader(rows, plan, collate_text, forward_tokens=24, copies=3)  # of each row
    parts = [batch.lengths for batch in many.load(0)]
    assert all(max(part) * len(part) * 3 <= 24 or len(part) == 1 for part in parts)
    (padded,) = Loader(rows, plan, collate_text).load(0)
    assert padded.tokens.numel() == 8 * 900


def test_all_alignments_of_a_row_count_towards_the_token_limit(tmp_path, monkeypatch):
    sizes, step = [], Run.step

    def measured(run, batches, timer):
        sizes.extend((batch.tokens.numel(), len(batch.lengths)) for batch in batches)
        return step(run, batches, timer)

    monkeypatch.setattr(Run, "step", measured)
    train(tmp_path, **{"train.alignments": "all", "train.forward_tokens": 60, "train.steps": 2})
    assert all(tokens <= 60 or rows == 2 for tokens, rows in sizes)
    assert max(rows for _, rows in sizes) > 2  # blocks of two: two of each row


@pytest.mark.parametrize("cut", ["train.accumulation=2", "train.forward_tokens=24"])
def test_two_processes_equal_one(tmp_path, cut):
    changes = {"glance.isolated": True, "loss.lk_weight": 0.5, "loss.pace_smoothing": 0.5}
    _, one = train(tmp_path / "one", **changes)
    settings = (f"{key}={json.dumps(value)}" for key, value in changes.items())
    two = start_ranks(__file__, tmp_path / "two", cut, *settings)
    errors = end(two)
    assert [rank.returncode for rank in two] == [0, 0], errors
    assert_close(one, load_file(tmp_path / "two" / "falcon" / "model.safetensors"), 1e-5)
    (a, b), (c, d) = log_lines(tmp_path / "one"), log_lines(tmp_path / "two")
    for single, double in ((a, c), (b, d)):
        assert single["loss"] == pytest.approx(double["loss"], rel=1e-4)
        assert single["accuracy"] == pytest.approx(double["accuracy"])


def test_a_rank_requests_its_own_rows_one_step_before_reading_them(monkeypatch):
    done = []

    class Far(list):
        def will_read(self, rows):
            done.extend(("asked", row) for row in rows)

        def __getitem__(self, row):
            done.append(("read", row))
            return super().__getitem__(row)

    data = Far([{"input_ids": torch.zeros(5), "loss_mask": torch.ones(5)}] * 20)
    plan, epochs = SamplingPlan([5] * 20, batch_size=4, seed=0), []
    draw = plan._batches
    monkeypatch.setattr(plan, "_batches", lambda epoch: epochs.append(epoch) or draw(epoch))
    assert len([*Loader(data, plan, collate_text, rank=1, ranks=2).steps(0, 10)]) == 10
    assert epochs == [0, 1, 2]  # each epoch is drawn once
    own = [plan.rows(step)[2:] for step in range(11)]
    assert done == [
        (what, row)
        for step in range(10)
        for what, rows in (("asked", own[step + 1]), ("read", own[step]))
        for row in rows
    ]


def test_a_batch_that_cannot_be_split_is_refused():
    plan = SamplingPlan([5] * 8, batch_size=8, seed=0)
    with pytest.raises(RecipeError, match=r"train.batch_size is 8.*2 x 3"):
        Loader([], plan, collate, accumulation=2, ranks=3)


# -- learning --------------------------------------------------------------------------------------


def test_a_tiny_batch_can_be_memorised(tmp_path):
    changes = {
        "loss.soft_weight": 1.0,  # with random features the hard part stays above 0
        "loss.feature_noise": 0.0,
        "optim.lr": 1.0e-2,
        "optim.schedule": "cosine",
        "glance.start": 0.2,
        "train.steps": 200,
        "train.batch_size": 2,
        "train.rollout": 1,
        "train.log_every": 50,
    }
    train(tmp_path, data=ToyRows(count=2), **changes)
    first, *_, last = log_lines(tmp_path)
    assert last["loss"] < min(0.1, first["loss"] / 8)
    assert last["lr"] < first["lr"]


@pytest.mark.parametrize("changes", [{}, {"loss.lk_weight": 1.0, "loss.pace_smoothing": 0.5}])
def test_bfloat16_training_keeps_float32_master_weights(tmp_path, changes):
    state, weights = train(tmp_path, **changes, **{"train.precision": "bfloat16"})
    assert state.step == 6
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert all(record["loss"] > 0 for record in log_lines(tmp_path))


def test_glancing_decreases_over_training_and_can_be_off(tmp_path):
    train(tmp_path / "on", **{"train.steps": 30, "train.log_every": 10})
    train(tmp_path / "off", **{"glance.enabled": False})
    shares = [record["glanced"] for record in log_lines(tmp_path / "on")]
    assert shares[0] > shares[1] > shares[2] > 0
    assert all(record["glanced"] == 0 for record in log_lines(tmp_path / "off"))


def test_rows_without_a_supervised_position_give_zero_loss_and_change_no_weight(tmp_path):
    data = ToyRows()
    for row in data.rows:
        row["loss_mask"] = torch.zeros_like(row["loss_mask"])
    _, weights = train(tmp_path, data=data, **{"optim.weight_decay": 0.0})
    assert log_lines(tmp_path)[0]["loss"] == 0
    torch.testing.assert_close(weights, dict(make_head().state_dict()), rtol=0, atol=0)


def test_a_nan_gradient_is_an_error_that_names_the_learning_rate(tmp_path):
    data = ToyRows()
    data.rows[0]["features"] = data.rows[0]["features"] * float("nan")
    with pytest.raises(RecipeError, match=r"gradient's norm is nan at step \d.*optim.lr"):
        train(tmp_path, data=data)


# -- outputs ---------------------------------------------------------------------------------------


def test_the_head_with_the_most_tokens_per_step_is_kept(tmp_path):
    scores = {2: 1.5, 4: 2.5, 6: 2.0}
    seen = {}

    def evaluate(head, step):
        assert not head.training
        seen[step] = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        return {"tokens_per_step": scores[step]}

    state, _ = train(tmp_path, evaluate=evaluate, **{"train.eval_every": 2})
    assert state.best == {"tokens_per_step": 2.5}
    kept = FalconHead.from_pretrained(tmp_path / "falcon").state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in seen[4].items())
    assert [record["step"] for record in log_lines(tmp_path, "eval")] == [2, 4, 6]


def test_the_log_has_its_figures_and_tensorboard_has_events(tmp_path):
    train(tmp_path)
    record = log_lines(tmp_path)[-1]
    assert record["step"] == 6
    assert len(record["accuracy"]) == 2
    assert len(record["rollout_accuracy"]) == 1
    assert 0 <= record["data_wait"] <= 1
    assert record["tokens_per_second"] > 0
    assert list((tmp_path / "tensorboard").rglob("events.*"))


def test_the_last_step_is_logged_whatever_its_number(tmp_path):
    train(tmp_path, **{"train.steps": 5, "train.log_every": 3})
    assert [record["step"] for record in log_lines(tmp_path)] == [3, 5]


def test_the_bar_shows_the_most_important_figures_within_80_columns(tmp_path, capsys):
    speed = {"tokens_per_step": 2.5}
    train(tmp_path, evaluate=lambda *_: speed, **{"train.eval_every": 6, "train.log_every": 1})
    bar = re.split(r"[\r\n]", capsys.readouterr().err.strip())[-1]
    assert re.match(r"train 6/6 \S+<\S+, \S+k tok/s 2\.50 tok/step loss \S+ acc \.\d+/\.\d+", bar)
    assert len(bar.partition(" acc ")[0]) < 80


@pytest.mark.parametrize("columns", [70, 60, 59, 40])
def test_no_figure_of_the_bar_is_truncated(columns):
    bar = StatusBar(total=9, file=io.StringIO(), ncols=columns, bar_format="train {n_fmt}{postfix}")
    bar.figures = ("6.9k tok/s 4.62 tok/step", "loss 0.463", "acc .83/.82/.80", "lr 1.0e-05")
    whole = [" ".join(bar.figures[:count]) for count in range(len(bar.figures) + 1)]
    line = str(bar)
    assert len(line) <= columns
    assert line.partition(", ")[2] in whole
    assert ("acc" in line) == (columns >= 60)


def test_max_minutes_ends_a_run_cleanly_and_for_good(tmp_path):
    changes = {"train.max_minutes": 0.01, "train.steps": 100000}
    state, _ = train(tmp_path, **changes)
    assert 0 < state.step < 100000
    assert (tmp_path / "falcon" / "model.safetensors").is_file()
    again, _ = train(tmp_path, **changes)  # its time is used up
    assert again.step == state.step


# -- the order of the data -------------------------------------------------------------------------


def test_an_epoch_shows_every_row_and_the_next_one_differs():
    plan = SamplingPlan([5, 9, 7, 6, 8, 5, 7], batch_size=3, seed=0)
    epochs = [
        [row for step in range(3 * epoch, 3 * epoch + 3) for row in plan.rows(step)]
        for epoch in range(3)
    ]
    assert all(set(epoch) == set(range(7)) and len(epoch) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    fresh = SamplingPlan([5, 9, 7, 6, 8, 5, 7], batch_size=3, seed=0)
    assert fresh.rows(8) == plan.rows(8)


def test_rows_of_similar_length_share_a_batch():
    lengths = torch.randint(1, 1000, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = SamplingPlan(lengths, batch_size=8, seed=0)
    spread = [max(c) - min(c) for c in ([lengths[r] for r in plan.rows(s)] for s in range(64))]
    assert sum(spread) / 64 < 60  # about 800 without sorting


@pytest.mark.parametrize("batch_size", [8, 64])
def test_batches_of_conversations_have_little_padding(batch_size):
    """Lengths like ShareGPT's: log-normal around 2000 tokens, cut at 4096."""
    drawn = torch.empty(8192).log_normal_(7.8, 0.9, generator=torch.Generator().manual_seed(0))
    lengths = drawn.long().clamp(8, 4096).tolist()
    plan = SamplingPlan(lengths, batch_size, seed=0)
    batches = [[lengths[row] for row in plan.rows(n)] for n in range(plan.steps_per_epoch)]
    read = sum(max(batch) * len(batch) for batch in batches)
    assert sum(map(sum, batches)) > 0.95 * read
    # The order of training is still random: long and short batches are mixed.
    means = [sum(batch) / len(batch) for batch in batches]
    assert sum(a < b for a, b in itertools.pairwise(means)) < 0.7 * len(means)


def test_a_batch_larger_than_the_data_repeats_rows():
    plan = SamplingPlan([4, 4], batch_size=5, seed=0)
    for step in range(9):
        assert sorted(map(plan.rows(step).count, (0, 1))) == [2, 3]
    with pytest.raises(DataError, match="no rows to train on"):
        SamplingPlan([], batch_size=5, seed=0)


def test_ranks_and_micro_batches_take_the_same_rows_with_the_same_draws():
    data, plan = ToyRows(), SamplingPlan(ToyRows().lengths, batch_size=8, seed=5)
    pairs = partial(collate, block_size=2)
    (whole,) = Loader(data, plan, pairs).load(3)
    parts = [b for r in range(2) for b in Loader(data, plan, pairs, 2, rank=r, ranks=2).load(3)]
    assert [key for part in parts for key in part.keys] == whole.keys
    phases = [row[:5].tolist() for part in parts for row in part.blocks]
    assert phases == [row[:5].tolist() for row in whole.blocks]
    noise = torch.cat([part.noise(0.1, HIDDEN)[:, :5] for part in parts])
    assert torch.equal(noise, whole.noise(0.1, HIDDEN)[:, :5])


def test_random_draws_differ_for_every_row_step_and_seed():
    """Otherwise every step would reveal the same places under the same noise."""
    data, pairs = ToyRows(count=12), partial(collate, block_size=2)
    plans = [SamplingPlan(data.lengths, batch_size=4, seed=seed) for seed in (0, 1)]
    draws = [
        float(torch.rand((), generator=generator))
        for plan in plans
        for step in (0, 1, 3)
        for batch in Loader(data, plan, pairs).load(step)
        for purpose in ("glance", "noise")
        for generator in batch.generators(purpose)
    ]
    assert len(set(draws)) == len(draws) == 2 * 3 * 2 * 4
    orders = [[row for step in range(3) for row in plan.rows(step)] for plan in plans]
    assert orders[0] != orders[1]


def test_a_position_is_supervised_if_the_token_it_drafts_is():
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    row = {"input_ids": torch.arange(7), "loss_mask": mask, "features": torch.randn(7, 4)}
    short = {name: value[:2] for name, value in row.items()}
    for k in (1, 2, 3):
        batch = collate([row, short], [(0, 0, 0), (0, 0, 1)], k)
        for i in range(6):
            whole = batch.blocks[0, i] > 0 or batch.blocks[0].eq(0).sum() == k
            answered = i + k + 1 <= 6 and bool(mask[i + k + 1]) and whole
            assert bool(batch.supervised[0, i]) == answered
        assert not batch.supervised[1].any()
        assert batch.valid.sum(1).tolist() == [6, 1]


def test_phases_cover_every_alignment():
    row = {"input_ids": torch.arange(7), "loss_mask": torch.ones(7), "features": torch.randn(7, 4)}
    starts = {int((collate([row], [(0, step, 0)], 3).blocks[0] == 0).sum()) for step in range(40)}
    assert starts == {1, 2, 3}


# -- schedules -------------------------------------------------------------------------------------


def test_learning_rate_rises_then_follows_its_schedule():
    rates = {
        s: [learning_rate(n, 100, 2.0, 0.1, s) for n in range(100)]
        for s in ("constant", "linear", "cosine")
    }
    for schedule, rate in rates.items():
        assert rate[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
        assert max(rate) == 2.0
        assert sorted(rate[10:], reverse=True) == rate[10:]
        assert (rate[-1] < 0.05) == (schedule != "constant")


def test_epochs_become_steps(tmp_path):
    recipe = make_recipe(tmp_path, **{"train.steps": None, "train.epochs": 2})
    assert total_steps(recipe, 24) == 6
    assert total_steps(recipe, 25) == 8


@entry
def main():
    out, *arguments = sys.argv[1:]
    changes = {key: json.loads(value) for key, value in (a.split("=") for a in arguments)}
    torch.set_num_threads(1)
    pace = changes.pop("pace", 0.0)
    train(out, data=ToyRows(pace=pace), **changes)


if __name__ == "__main__":
    main()
