"""EWIF equals enumerated coin flips, mixing drafters gains nothing, plots show measured shares."""

import json
import random
from itertools import product

import pytest

from specdraft.eval.measure.ewif import (
    Proposer,
    best_assignment,
    ewif,
    expected_tokens,
    mixing_gains,
    mixtures,
    of_assignment,
    of_mixture,
    simulate,
)
from specdraft.eval.page.png import save_png
from specdraft.eval.papers.bench_report import chosen, read_report
from specdraft.eval.publishing.plots import (
    acceptance_by_position,
    of_horizontal_cascade,
    of_one_drafter,
)
from specdraft.recipes.errors import DataError


def drafters(seed: int, count: int) -> list[Proposer]:
    chance = random.Random(seed)
    return [Proposer(chance.random(), chance.random() / 2) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_expected_tokens_equal_the_weighted_sum_over_all_outcomes(seed):
    alphas = [one.alpha for one in drafters(seed, 5)]
    total = 0.0
    for coins in product((True, False), repeat=5):
        weight = 1.0
        for heads, alpha in zip(coins, alphas, strict=True):
            weight *= alpha if heads else 1 - alpha
        total += weight * (1 + [*coins, False].index(False))
    assert expected_tokens(alphas) == pytest.approx(total, abs=1e-12)


def test_ewif_of_one_drafter_equals_the_closed_form():
    alpha, cost = 0.7, 0.1
    for k in (0, 1, 4, 9):
        closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + k * cost))
        assert ewif([alpha] * k, k * cost) == pytest.approx(closed)
    assert ewif([], 0.0) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_simulated_steps_agree_with_the_formula(seed):
    team = drafters(seed, 4)
    alphas, cost = [one.alpha for one in team], sum(one.cost for one in team)
    steps = 40_000
    # A step gives 1 to 5 tokens: the standard deviation is at most 2.
    allowed = 4 * 2 / steps**0.5 / (1 + cost)
    assert abs(simulate(alphas, cost, steps, seed) - of_assignment(team)) < allowed
    assert abs(simulate([*alphas[1:], 0.0], cost, steps, seed) - of_assignment(team)) > allowed


@pytest.mark.parametrize(("size", "length", "parts"), [(2, 3, 4), (2, 4, 3), (3, 2, 4)])
def test_no_mixture_beats_the_best_assignment(size, length, parts):
    """Theorem 4.4, by trying a grid of mixtures, whose corners are the assignments."""
    for seed in range(12):
        team = drafters(seed, size)
        assert mixing_gains(team, length, parts) == pytest.approx(0, abs=1e-12)
        best = of_assignment(best_assignment(team, length))
        inner = [m for m in mixtures(size, length, parts) if all(1 not in row for row in m)]
        assert inner
        assert max(of_mixture(team, shares) for shares in inner) < best


def test_the_best_assignment_puts_the_drafter_of_higher_acceptance_first():
    for seed in range(20):
        team = drafters(seed, 2)
        alphas = [one.alpha for one in best_assignment(team, 5)]
        assert alphas == sorted(alphas, reverse=True)


RUNS = [
    {"method": "plain", "acceptance_by_depth": [], "batch_size": 1, "temperature": 0.0},
    {
        **{"method": "ssd", "acceptance_by_depth": [0.8, 0.5], "accepted_by_depth": [0.8, 0.3]},
        **{"batch_size": 1, "temperature": 0.0},
    },
    {"method": "ssd", "acceptance_by_depth": [0.7], "batch_size": 4, "temperature": 0.0},
]


def test_the_acceptance_plot_shows_the_measured_shares(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = acceptance_by_position(RUNS)
    given, reached = drawn.axes
    assert [list(line.get_ydata()) for line in given.lines] == [[0.8, 0.5], [0.7]]
    assert list(reached.lines[0].get_ydata()) == [0.8, 0.3]
    assert [line.get_label() for line in given.lines] == ["ssd, batch 1", "ssd, batch 4"]
    path = save_png(drawn, tmp_path / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["figure.png"]


def test_ewif_figures_have_a_line_per_cost_and_per_tail():
    pytest.importorskip("matplotlib")
    one = of_one_drafter(0.8, (0.1, 0.3), 6).axes[0]
    lines = [line for line in one.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == ["c = 0.1", "c = 0.3"]
    assert lines[0].get_ydata()[2] == ewif([0.8, 0.8], 0.2)
    large, small = Proposer(0.8, 0.1), Proposer(0.4, 0.01)
    several = of_horizontal_cascade(large, small, 6).axes[0].lines
    assert several[2].get_ydata()[3] == of_assignment([large] * 3 + [small] * 2)


def test_an_invalid_report_and_an_unknown_run_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_report(tmp_path / "gone.json")
    path = tmp_path / "report.json"
    for text in ("[1]", "{}", "runs", '{"recipe": {}, "runs": []}', '{"recipe": {}, "runs": [[]]}'):
        path.write_text(text)
        with pytest.raises(DataError, match="no report"):
            read_report(path)
    runs = [{"prompt_set": "a"} | run for run in RUNS]
    path.write_text(json.dumps({"recipe": {}, "runs": runs}))
    assert chosen(read_report(path)["runs"], ["ssd"]) == runs[1:]
    with pytest.raises(DataError, match="no run of 'gsd'; there are plain, ssd"):
        chosen(RUNS, ["gsd"])
