"""How much data gives what: nested subsets, and a fit that finds a known curve."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from commands import run_here

from specdraft.data.chat import split_holdout
from specdraft.recipes.load import load_recipe
from specdraft.train.curves.data_curve import make_curves, sentence
from specdraft.train.curves.saturation import Saturation, fit_saturation, predict
from specdraft.train.curves.sizes import EQUAL, GROWING, METHODS, plan_sizes

ROWS = [100, 300, 1000, 3000, 10000]
TRUE = Saturation(5.0, 8.0, 0.4)


def test_a_fit_finds_the_curve_that_was_sampled():
    fitted = fit_saturation(ROWS, [TRUE(n) for n in ROWS])
    assert (fitted.ceiling, fitted.slope) == pytest.approx((5.0, 0.4), rel=0.03)
    assert fitted(100_000) == pytest.approx(TRUE(100_000), rel=1e-3)


def test_three_sizes_foretell_the_fifth():
    said, _ = predict({n: [TRUE(n)] for n in ROWS[:3]}, ROWS[4])
    assert said == pytest.approx(TRUE(ROWS[4]), rel=0.02)


@pytest.mark.parametrize("values", [[2.0, 2.0, 2.0], [3.0, 2.5, 2.0]])
def test_data_that_bring_nothing_are_foretold_to_bring_nothing(values):
    fitted = fit_saturation(ROWS[:3], values)
    assert (fitted.gap, fitted(10**6)) == (0.0, pytest.approx(sum(values) / 3))


def test_the_interval_mostly_holds_the_truth_and_grows_with_the_noise():
    generator, widths = np.random.default_rng(0), {0.02: [], 0.1: []}
    held = 0
    for spread, found in widths.items():
        for _ in range(15):
            noisy = {n: TRUE(n) + spread * generator.normal(size=3) for n in ROWS}
            _, (low, high) = predict(noisy, 100_000)
            held += low < TRUE(100_000) < high
            found.append(high - low)
    assert held >= 22  # of 30, at 90%
    assert np.mean(widths[0.1]) > 2 * np.mean(widths[0.02])
    assert predict({n: [TRUE(n)] for n in ROWS[:3]}, 10**6)[1] is None


def planned(tmp_path, **changes):
    recipe = load_recipe("tiny", ["train.steps=80"])
    given = {"kinds": ["falcon", "medusa"], "rows": [40, 10, 20], "seeds": [0, 1]} | changes
    of_kind = {"medusa": ["optim.lr=0.02"]}
    return list(plan_sizes(recipe, "tiny", **given, overrides=[], of_kind=of_kind, out=tmp_path))


def test_the_largest_size_is_one_run_of_both_regimes(tmp_path):
    sizes = planned(tmp_path)
    assert len(sizes) == 2 * 2 * 3 * 2
    assert len({size.job for _, size in sizes}) == 2 * 2 * (3 + 2)
    steps = {
        regime: {s.rows: s.steps for r, s in sizes if r == regime} for regime in (EQUAL, GROWING)
    }
    assert steps == {EQUAL: {10: 80, 20: 80, 40: 80}, GROWING: {10: 20, 20: 40, 40: 80}}


@pytest.mark.parametrize("kind", METHODS)
def test_every_kind_is_made_of_one_recipe(tmp_path, kind):
    for _, size in planned(tmp_path, kinds=[kind]):
        recipe = load_recipe("tiny", size.job.settings)
        assert kind == "table" or recipe.kind == kind
        assert recipe.train.seed == size.seed
        assert (recipe.data.limit, recipe.train.steps) == (size.rows, size.steps)
    assert recipe.optim.lr == (0.02 if kind == "medusa" else load_recipe("tiny").optim.lr)


def test_subsets_are_nested():
    corpora = [
        [
            c.messages
            for c in split_holdout(load_recipe("tiny", [f"data.limit={n}"]).data)[0].conversations
        ]
        for n in (5, 20, 60)
    ]
    for smaller, larger in pairwise(corpora):
        assert larger[: len(smaller)] == smaller


class Made:
    """A job that has run: its folder holds what training leaves."""

    def __init__(self, folder, method: str, value: float):
        self.folder, self.path = folder, folder / "report.json"
        folder.mkdir(parents=True)
        run = {"method": method, "outputs": 2, "identical": 2, "speedup": 1.5}
        report = {"environment": {"cpu": "x"}, "runs": [run | {"tokens_per_step": value}]}
        self.path.write_text(json.dumps(report))
        (folder / "log.jsonl").write_text('{"kind": "train", "step": 4, "minutes": 0.5}\n')

    def report(self) -> dict:
        return json.loads(self.path.read_text())


def test_a_curve_says_what_ten_times_would_bring_and_how_the_first_sizes_missed(tmp_path):
    sizes = []
    for n in ROWS[:4]:
        for seed, off in enumerate((-0.02, 0.0, 0.02)):
            made = Made(tmp_path / f"{n}-{seed}", "falcon_chain", TRUE(n) + off)
            size = SimpleNamespace(kind="falcon", rows=n, steps=4, seed=seed, job=made)
            sizes.append((EQUAL, size))
    (curve,) = make_curves(sizes)["curves"]
    assert curve["means"] == pytest.approx([TRUE(n) for n in ROWS[:4]])
    ten = curve["ten_times"]
    assert ten["rows"] == 30000
    assert ten["tokens_per_step"] == pytest.approx(TRUE(30000), rel=0.02)
    assert ten["interval"][0] < TRUE(30000) < ten["interval"][1]
    assert abs(curve["back_test_error"]) < 0.05
    assert sentence(curve).startswith("falcon, equal steps: 30,000 rows would bring")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "10,20"], "a curve takes 3 sizes at least"),
        (["--rows", "10,20,4000"], "there are 3000 conversations to train on in tiny"),
        (["--rows", "10,x,30"], "give whole numbers"),
        (["--kinds", "falcon,eagel"], "there are falcon, eagle, eagle3, medusa, student, table"),
        (["train.steps=null", "train.epochs=2", "--rows", "1,2,3"], "give the steps that equal"),
        (["eagle:optim.lr=1", "optim.lr=no", "--rows", "1,2,3"], "optim.lr"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, message):
    done = run_here("train/curve.py", "tiny", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
