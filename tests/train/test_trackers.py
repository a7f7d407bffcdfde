"""Trackers of a run: tensorboard by default, others by name; a failing one cannot end a run."""

import json
from collections import defaultdict

import pytest
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_loop import log_lines, make_recipe, train

from specdraft.recipes.errors import RecipeError
from specdraft.train.fit.accelerator import make_accelerator

OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {},
    "mlflow": {"MLFLOW_TRACKING_URI": "file:./mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def board(out) -> dict[str, dict[int, float]]:
    """A run's tensorboard scalars by tag and step; fails if a step was reported twice."""
    events = EventAccumulator(str(out / "tensorboard" / "toy")).Reload()
    scalars = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert event.step not in scalars[tag]
            scalars[tag][event.step] = event.value
    return scalars


def test_tensorboard_has_the_figures_of_the_log(tmp_path):
    train(tmp_path)
    told = {record["step"]: record for record in log_lines(tmp_path)}
    scalars = board(tmp_path)
    assert scalars["train/loss"] == pytest.approx({s: r["loss"] for s, r in told.items()})
    second = {step: record["accuracy"][1] for step, record in told.items()}
    assert scalars["train/accuracy_1"] == pytest.approx(second)


def test_a_resumed_run_reports_each_step_to_tensorboard_once(tmp_path):
    train(tmp_path, **{"train.save_every": 4, "train.log_every": 1})
    (tmp_path / "checkpoints" / "step-6").rename(tmp_path / "gone")
    train(tmp_path, **{"train.save_every": 4, "train.log_every": 1})  # steps 5 and 6 again
    assert sorted(board(tmp_path)["train/loss"]) == [1, 2, 3, 4, 5, 6]


def test_a_run_without_trackers_keeps_its_log_and_warns_of_nothing(tmp_path, recwarn):
    train(tmp_path, **{"train.trackers": []})
    assert not (tmp_path / "tensorboard").exists()
    assert log_lines(tmp_path)
    assert [str(w.message) for w in recwarn if "log_with" in str(w.message)] == []


def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("specdraft.train.fit.trackers.get_available_trackers", lambda: [])
    recipe = make_recipe(tmp_path / "run", **{"train.trackers": ["comet_ml", "aim"]})
    with pytest.raises(RecipeError, match="comet_ml, aim is installed; pip install comet_ml aim"):
        make_accelerator(recipe)
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(
        RecipeError, match=r"must be one of tensorboard, wandb, .* nearest is wandb"
    ):
        make_recipe(tmp_path, **{"train.trackers": ["wandbb"]})


@pytest.mark.parametrize("name", OFFLINE)
def test_other_trackers_can_replace_tensorboard_offline(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    for key, value in {**OFFLINE[name], "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    train(tmp_path / "run", **{"train.trackers": [name]})
    assert not (tmp_path / "run" / "tensorboard").exists()


class Failing(GeneralTracker):
    """A tracker whose server disappears after `figures` records."""

    name, requires_logging_directory, tracker = "failing", False, None

    def __init__(self, figures: int):
        super().__init__()
        self.figures, self.told, self.settings = figures, [], {}

    def start(self):
        if not self.figures:
            raise ConnectionError("no route to host")

    def store_init_configuration(self, values):
        self.settings = json.loads(json.dumps(values))

    def log(self, values, step=None, **_):
        if len(self.told) == self.figures:
            raise ConnectionError("no route to host")
        self.told.append(step)


def test_a_tracker_that_fails_midway_is_dropped_and_the_run_goes_on(tmp_path, capsys):
    failing = Failing(1)
    state, _ = train(tmp_path, trackers=[failing])
    assert (state.step, failing.told, failing.settings["optim.lr"]) == (6, [3], 3.0e-3)
    assert "failing takes no more figures (ConnectionError: no route" in capsys.readouterr().err
    assert sorted(board(tmp_path)["train/loss"]) == [3, 6]


def test_a_tracker_that_fails_to_start_ends_the_run_before_its_bar(tmp_path, capsys):
    with pytest.raises(
        RecipeError, match=r"tracker fails to start .*no route to host.* leave it out"
    ):
        train(tmp_path, trackers=[Failing(0)])
    assert "train 0/6" not in capsys.readouterr().err
