"""The gain from more data: nested subsets, and a fit that finds a known curve."""

import json
from argparse import Namespace
from itertools import pairwise

import numpy as np
import pytest
from commands import run_here
from PIL import Image

from specdraft.data.chat import read_conversations, split_holdout
from specdraft.eval.engine.request import Completion, Step
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.metrics import Costs, counts
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.publishing.result import grid_of
from specdraft.recipes.load import load_recipe
from specdraft.train.curve import asked
from specdraft.train.curves.data_curve import make_curves, sentence
from specdraft.train.curves.forecast import Forecast, effective_rows
from specdraft.train.curves.picture import draw_curves
from specdraft.train.curves.saturation import Saturation, fit_saturation, reached_by_depth
from specdraft.train.curves.sizes import METHODS, POWERS, Size, plan_sizes

ROWS = [100, 300, 1000, 3000, 10000]
DEPTH = 6


def true_reached(rows: float) -> list[float]:
    """The share of steps whose first d tokens are accepted, for d = 1, 2, .."""
    later = [0.05 + 1.6 * rows**-0.3] * (DEPTH - 1)
    return np.cumprod(1 - np.array([0.2 + 2.0 * rows**-0.4, *later])).tolist()


def true(rows: float) -> float:
    """Tokens per step of these chains."""
    return 1 + sum(true_reached(rows))


def fit(by_size: dict[float, list]) -> Saturation:
    """The fit to what trainings of each size reach."""
    sizes = [size for size, runs in by_size.items() for _ in runs]
    return fit_saturation(sizes, [run for runs in by_size.values() for run in runs])


def noisy(reached: list[float], off: float) -> list[float]:
    """The same drafts if all shares of steps were higher by `off` tokens per step in sum."""
    return [share * (1 + off / sum(reached)) for share in reached]


def test_what_drafts_reach_is_counted_over_all_steps():
    accepted = [0, 2, 1, 3, 0, 2, 2]  # of drafts of three tokens
    steps = [Step(1, 0, 0, 0)] + [Step(one + 1, 3, 3, one) for one in accepted]
    reached = reached_by_depth(report_run(steps))
    assert reached == pytest.approx([5 / 8, 4 / 8, 1 / 8])
    assert 1 + sum(reached) == pytest.approx(sum(step.emitted for step in steps) / 8)


def test_a_drafter_whose_tokens_are_all_rejected_reaches_nothing():
    steps = [Step(1, 0, 0, 0), Step(1, 2, 2, 0)]
    assert sum(reached_by_depth(report_run(steps))) == 0.0


def test_a_fit_finds_the_curves_of_the_first_token_and_of_later_ones():
    fitted = fit({n: [true_reached(n)] * 3 for n in ROWS})
    found = {"floor": 0.2, "gap": 2.0, "slope": 0.4, "onset": 0.0}
    assert fitted.first.likeliest == pytest.approx(found, rel=0.11)
    found = {"floor": 0.05, "gap": 1.6, "slope": 0.3, "onset": 0.0}
    assert fitted.later.likeliest == pytest.approx(found, rel=0.11, abs=0.02)
    assert fitted(100_000) == pytest.approx(true(100_000), rel=0.03)


def test_a_fit_finds_where_errors_begin_to_fall():
    def reached(rows: float) -> list[float]:
        return [1 - 0.1 - 30 * (rows + 3000.0) ** -0.5]

    fitted = fit({n: [reached(n)] * 3 for n in ROWS})
    assert fitted.first.likeliest["onset"] == pytest.approx(3000)
    assert fitted(100_000) == pytest.approx(1 + reached(100_000)[0], rel=0.03)


def test_a_fit_to_three_sizes_predicts_the_fifth():
    fitted = fit({n: [true_reached(n)] * 3 for n in ROWS[:3]})
    low, high = fitted.interval(ROWS[4])
    assert fitted(ROWS[4]) == pytest.approx(true(ROWS[4]), rel=0.05)
    assert low < true(ROWS[4]) < high


@pytest.mark.parametrize("values", [[0.6, 0.6, 0.6], [0.7, 0.6, 0.5]])
def test_a_flat_curve_predicts_no_gain_from_more_data(values):
    by_rows = {n: [[v, v * v]] * 3 for n, v in zip(ROWS, values, strict=False)}
    fitted, measured = fit(by_rows), [1 + v + v * v for v in values]
    assert fitted(10**6) == pytest.approx(fitted(100), rel=0.05)
    assert 0.95 * min(measured) < fitted(10**6) < 1.05 * max(measured)


def test_drafts_that_are_always_rejected_are_predicted_to_stay_so():
    assert fit({n: [[], []] for n in ROWS})(10**6) == 1.0


def test_later_tokens_that_few_sizes_reach_are_fitted_to_those():
    by_rows = {100: [[0.5]], 1000: [[0.5, 0.25]], 10_000: [[0.5, 0.25]]}
    assert fit(by_rows)(10**4) == pytest.approx(1.75, rel=0.1)


def test_the_interval_mostly_contains_the_truth_and_grows_with_the_noise():
    generator, widths = np.random.default_rng(0), {0.05: [], 0.3: []}
    held = 0
    for spread, found in widths.items():
        for _ in range(15):
            seeds = {n: spread * generator.normal(size=3) for n in ROWS}
            by_rows = {n: [noisy(true_reached(n), off) for off in seeds[n]] for n in ROWS}
            low, high = fit(by_rows).interval(100_000)
            held += low < true(100_000) < high
            found.append(high - low)
    assert held >= 22  # of 30, at 90%
    assert np.mean(widths[0.3]) > 1.3 * np.mean(widths[0.05])


def test_rows_that_are_read_again_teach_less_and_unread_ones_nothing():
    assert effective_rows(100, 100) == 100
    assert effective_rows(100, 40) == 40
    assert 100 < effective_rows(100, 200) < 200
    assert effective_rows(100, 400) == pytest.approx(336, abs=1)  # four times: nearly as new
    assert effective_rows(100, 10**9) == pytest.approx(100 * 7)  # no more than six times again


def points(steps_are: str, read: dict[int, float | None]) -> list[dict]:
    """Trainings whose drafts reach what their effective rows bring."""
    made = [{"steps_are": steps_are, "rows": n, "read": each} for n, each in read.items()]
    rows = (effective_rows(one["rows"], one["read"]) for one in made)
    return [one | {"reached_by_depth": true_reached(n)} for one, n in zip(made, rows, strict=True)]


def test_with_equal_steps_rows_that_are_never_read_bring_nothing():
    forecast = Forecast(points("equal", dict.fromkeys(ROWS, 3000)))
    assert forecast(100_000) == forecast(10_000) == forecast(3000)
    assert forecast(3000) == pytest.approx(true(3000), rel=0.03)


@pytest.mark.parametrize("steps_are", POWERS)
def test_a_table_counts_every_row_whatever_its_steps(tmp_path, steps_are):
    assert {size.read for _, size in planned(tmp_path, kinds=["table"])} == {None}
    forecast = Forecast(points(steps_are, dict.fromkeys(ROWS)))
    assert forecast(100_000) == pytest.approx(true(100_000), rel=0.03)


@pytest.mark.parametrize(("steps_are", "power"), POWERS.items())
def test_a_forecast_counts_the_rows_that_more_steps_read(steps_are, power):
    read = {n: 2 * 10_000 * (n / 10_000) ** power for n in ROWS}
    forecast = Forecast(points(steps_are, read))
    more = effective_rows(100_000, 2 * 10_000 * 10**power)
    assert forecast(100_000) == pytest.approx(true(more), rel=0.03)


def report_run(steps: list[Step]) -> dict:
    """What a report says of one output of these steps."""
    done = Completion(0, [1] * sum(step.emitted for step in steps), steps)
    return counts([Outcome([done], 1.0, Timing())], Costs(0.1, None))


def planned(tmp_path, **changes):
    recipe = load_recipe("tiny", ["train.steps=80"])
    given = {"kinds": ["falcon", "medusa"], "rows": [40, 10, 20], "seeds": [0, 1]} | changes
    of_kind = {"medusa": ["optim.lr=0.02"]}
    return list(plan_sizes(recipe, "tiny", **given, overrides=[], of_kind=of_kind, out=tmp_path))


def test_all_regimes_share_the_run_of_the_largest_size(tmp_path):
    sizes = planned(tmp_path)
    assert len(sizes) == 2 * 2 * 3 * 3
    assert len({size.job for _, size in sizes}) == 2 * 2 * (3 + 2 + 2)
    steps = {regime: {s.rows: s.steps for r, s in sizes if r == regime} for regime in POWERS}
    assert steps == {
        "equal": {10: 80, 20: 80, 40: 80},
        "root": {10: 40, 20: 57, 40: 80},
        "growing": {10: 20, 20: 40, 40: 80},
    }
    assert {regime for regime, _ in planned(tmp_path, regimes=["root"])} == {"root"}


def test_extra_seeds_apply_only_to_the_first_three_sizes(tmp_path):
    more = planned(tmp_path, rows=[40, 10, 80, 20, 160], seeds=[0, 1], more_seeds=[1, 2, 7])
    for rows in (10, 20, 40, 80, 160):
        seeds = {0, 1, 2, 7} if rows < 80 else {0, 1}
        assert {size.seed for _, size in more if size.rows == rows} == seeds
    jobs = [size.job for regime, size in more if regime == "root"]
    assert len(jobs) == len(set(jobs)) == 2 * (3 * 4 + 2 * 2)


def test_extra_seeds_are_named_above_the_table():
    options = Namespace(recipe="tiny", seeds="0,1", more_seeds="2,7")
    told = asked(load_recipe("tiny"), options, [], {})
    assert told["source"].endswith("tiny, of the first 3 sizes with seeds 2,7 besides")
    assert told["seeds"] == [0, 1]


@pytest.mark.parametrize("kind", METHODS)
def test_one_recipe_plans_the_runs_of_every_kind(tmp_path, kind):
    for _, size in planned(tmp_path, kinds=[kind]):
        recipe = load_recipe("tiny", size.job.settings)
        assert kind == "table" or recipe.kind == kind
        assert recipe.train.seed == size.seed
        assert (recipe.data.limit, recipe.train.steps) == (size.rows, size.steps)
        assert recipe.data.shuffle_seed == size.seed
    assert recipe.optim.lr == (0.02 if kind == "medusa" else load_recipe("tiny").optim.lr)


def test_subsets_of_a_seed_are_nested_and_shuffled(tmp_path):
    drawn = {
        (size.rows, size.seed): split_holdout(load_recipe("tiny", size.job.settings).data)[0]
        for _, size in planned(tmp_path, kinds=["falcon"], regimes=["equal"])
    }
    first = [c.messages for c in read_conversations(["tiny"], limit=40).conversations]
    subsets = {size: [c.messages for c in corpus.conversations] for size, corpus in drawn.items()}
    for seed in (0, 1):
        nested = [subsets[rows, seed] for rows in (10, 20, 40)]
        for smaller, larger in pairwise(nested):
            assert larger[: len(smaller)] == smaller
        assert not any(part == first[: len(part)] for part in nested)
    assert subsets[40, 0] != subsets[40, 1]


class Made:
    """A finished job, with the files of training in its folder."""

    def __init__(self, folder, method: str, reached: list[float]):
        self.folder, self.path = folder, folder / "report.json"
        folder.mkdir(parents=True)
        run = {"method": method, "outputs": 2, "identical": 2, "near_ties": 0}
        run |= {"accepted_by_depth": reached, "tokens_per_step": 1 + sum(reached)}
        trained = {"train": {"batch_size": 1}}
        report = {"environment": {"cpu": "x"}, "recipe": trained, "runs": [run]}
        self.path.write_text(json.dumps(report))
        (folder / "log.jsonl").write_text('{"kind": "train", "step": 4, "minutes": 0.5}\n')

    def report(self) -> dict:
        return json.loads(self.path.read_text())


def made_sizes(folder) -> list[tuple[str, Size]]:
    """Finished runs of four sizes with three seeds, which read every row once."""
    sizes = []
    for n in ROWS[:4]:
        for seed, off in enumerate((-0.02, 0.0, 0.02)):
            made = Made(folder / f"{n}-{seed}", "falcon_chain", noisy(true_reached(n), off))
            sizes.append(("growing", Size("falcon", n, n, seed, made)))
    return sizes


def test_a_curve_is_drawn_with_all_its_points_and_bands(tmp_path):
    report = make_curves(made_sizes(tmp_path), {n: 90 * n for n in ROWS})
    draw_curves(report, tmp_path)
    (picture,) = tmp_path.glob("*.png")
    assert picture.name == "curve-growing.png"
    with Image.open(picture) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert (0x54, 0xA5, 0xE0) in colours  # falcon's points and line
    assert len(colours) > 50  # its band


def test_training_minutes_are_found_even_if_the_log_ends_with_an_evaluation(tmp_path):
    (_, size), *_ = made_sizes(tmp_path)
    with (size.job.folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "eval", "step": 4, "tokens_per_step": 1.0}\n')
    assert size.minutes == 0.5


def test_a_curve_predicts_ten_times_the_data_and_reports_its_back_test_error(tmp_path):
    report = make_curves(made_sizes(tmp_path), {n: 90 * n for n in ROWS})
    (curve,) = report["curves"].values()
    assert curve["means"] == pytest.approx([true(n) for n in ROWS[:4]])
    ten = curve["ten_times"]
    assert ten["rows"] == 30000
    assert ten["tokens_per_step"] == pytest.approx(true(30000), rel=0.03)
    assert ten["interval"][0] < true(30000) < ten["interval"][1]
    assert abs(curve["back_test_error"]) < 0.05
    assert sentence(curve).startswith("falcon, growing steps: 30,000 rows would bring")
    head, *lines = grid_of(report)
    assert head == ["", "falcon", "falcon: minutes", "identical"]
    assert [line[0] for line in lines] == [
        *(f"{n:,} rows, {90 * n:,} tokens" for n in ROWS[:4]),
        "30,000 rows, foretold (90%)",
        "forecast of the first 3 sizes over the last",
    ]
    assert lines[0][1:] == [f"{true(100):.2f} +- 0.01", "0.50 +- 0.00", "6/6"]
    assert float(lines[-1][1]) == pytest.approx(1 + curve["back_test_error"], abs=0.01)


def test_a_curve_whose_caches_were_deleted_is_shown_without_their_tokens(tmp_path):
    _, *lines = grid_of(make_curves(made_sizes(tmp_path), {300: 27000}))
    assert [line[0] for line in lines[:2]] == ["100 rows", "300 rows, 27,000 tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "10,20"], "a curve takes 3 sizes at least"),
        (["--rows", "10,20,4000"], "there are 3000 conversations to train on in tiny"),
        (["--rows", "10,x,30"], "give whole numbers"),
        (["--more-seeds", "3,-4"], "--more-seeds 3,-4: give whole numbers"),
        (["--steps", "equal,grown"], "--steps grown: there are equal, root, growing"),
        (["--kinds", "falcon,eagel"], "there are falcon, eagle, eagle3, medusa, student, table"),
        (["train.steps=null", "train.epochs=2", "--rows", "1,2,3"], "give the steps that equal"),
        (["medusa:optim.lr=1", "--kinds", "eagle"], "no medusa is trained; add it to --kinds"),
        (["eagle:optim.lr=1", "optim.lr=no", "--rows", "1,2,3"], "optim.lr"),
        (["--kinds", "falcon,eagle", "eagle:optim.lr=no", "--rows", "1,2,3"], "optim.lr"),
    ],
)
def test_invalid_arguments_are_refused_at_once(arguments, message):
    done = run_here("train/curve.py", "tiny", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
