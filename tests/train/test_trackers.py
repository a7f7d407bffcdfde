"""What a run reports to: tensorboard by default, others by name, and none that can end a run."""

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
    """The scalars of tensorboard below a run, by tag and step; a step that was told twice fails."""
    events = EventAccumulator(str(out / "tensorboard" / "toy")).Reload()
    scalars = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert event.step not in scalars[tag]
            scalars[tag][event.step] = event.value
    return scalars


def test_the_board_holds_what_the_log_holds(tmp_path):
    train(tmp_path)
    told = {record["step"]: record for record in log_lines(tmp_path)}
    scalars = board(tmp_path)
    assert scalars["train/loss"] == pytest.approx({s: r["loss"] for s, r in told.items()})
    second = {step: record["accuracy"][1] for step, record in told.items()}
    assert scalars["train/accuracy_1"] == pytest.approx(second)


def test_a_resumed_run_tells_the_board_each_step_once(tmp_path):
    train(tmp_path, **{"train.save_every": 4, "train.log_every": 1})
    (tmp_path / "checkpoints" / "step-6").rename(tmp_path / "gone")
    train(tmp_path, **{"train.save_every": 4, "train.log_every": 1})  # steps 5 and 6 again
    assert sorted(board(tmp_path)["train/loss"]) == [1, 2, 3, 4, 5, 6]


def test_no_tracker_is_as_good_as_one(tmp_path, recwarn):
    train(tmp_path, **{"train.trackers": []})
    assert not (tmp_path / "tensorboard").exists()
    assert log_lines(tmp_path)
    assert [str(w.message) for w in recwarn if "log_with" in str(w.message)] == []


def test_a_tracker_that_is_not_installed_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("specdraft.train.fit.trackers.get_available_trackers", lambda: [])
    recipe = make_recipe(tmp_path / "run", **{"train.trackers": ["comet_ml", "aim"]})
    with pytest.raises(RecipeError, match="comet_ml, aim is installed; pip install comet_ml aim"):
        make_accelerator(recipe)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_there_is_not_is_told_with_those_that_there_are(tmp_path):
    with pytest.raises(
        RecipeError, match=r"must be one of tensorboard, wandb, .* nearest is wandb"
    ):
        make_recipe(tmp_path, **{"train.trackers": ["wandbb"]})


@pytest.mark.parametrize("name", OFFLINE)
def test_others_take_the_same_figures_offline(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    for key, value in {**OFFLINE[name], "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    train(tmp_path / "run", **{"train.trackers": [name]})
    assert not (tmp_path / "run" / "tensorboard").exists()


class Failing(GeneralTracker):
    """A tracker whose server goes away after `figures` records."""

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


def test_a_tracker_that_fails_on_the_way_is_left_out_and_the_run_goes_on(tmp_path, capsys):
    failing = Failing(1)
    state, _ = train(tmp_path, trackers=[failing])
    assert (state.step, failing.told, failing.settings["optim.lr"]) == (6, [3], 3.0e-3)
    assert "failing takes no more figures (ConnectionError: no route" in capsys.readouterr().err
    assert sorted(board(tmp_path)["train/loss"]) == [3, 6]


def test_a_tracker_that_does_not_start_is_told_with_its_reason_and_behind_no_bar(tmp_path, capsys):
    with pytest.raises(
        RecipeError, match=r"tracker fails to start .*no route to host.* leave it out"
    ):
        train(tmp_path, trackers=[Failing(0)])
    assert "train 0/6" not in capsys.readouterr().err
