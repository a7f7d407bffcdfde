"""Costs: curves fitted to measurements, stored points, targets of a given shape, the command."""

import io
import json
import platform
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from commands import run_here
from random_models import random_head, random_target
from random_seq2seq import random_seq2seq

from specdraft.eval.costing import bench as benches
from specdraft.eval.costing import drafts, room, shapes
from specdraft.eval.costing.bench import (
    FRESH,
    PROMPT,
    STEPS,
    WARM_UP,
    Cell,
    TargetBench,
    Try,
    turns,
    visit,
)
from specdraft.eval.costing.curves import fit, knots, nonnegative
from specdraft.eval.costing.drafts import DraftBench, shape_of
from specdraft.eval.costing.grid import Grid
from specdraft.eval.costing.ledger import BUSY, Ledger, fitted, unrest
from specdraft.eval.costing.measuring import measure_costs, subject
from specdraft.eval.costing.show import print_costs
from specdraft.eval.drafters.best_first import BestFirst
from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.pass_options import PassOptions
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.measure.report import verify_curve
from specdraft.eval.methods.setup import Setup, measured_costs
from specdraft.eval.methods.trained import Trained
from specdraft.eval.pricing.cost import SCHEMA, CostModel, Curve, load_costs, verify_terms
from specdraft.eval.pricing.machine import machine, processor
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.student import pruned
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import Screen

SUBJECT = {
    "environment": {"cpu": "x", "threads": 1, "commit": "a"},
    "target": {"name": "t", "weights": "0"},
    "drafter": None,
}
SMALL = Grid(nodes=(1, 2, 4), rows=(1, 2), cached=(8,), repeats=2)
TINY = ["eval/costs.py", "recipes/tiny.yaml", "--nodes", "1,4", "--rows", "1,2"]
TINY += ["--cached", "16", "--repeats", "2", "train.threads=1"]


# Curves.


def surface(rows: int, nodes: int, cached: int) -> float:
    """The cost of a target whose forward is flat up to 16 tokens and linear after that."""
    return 3 + 0.1 * rows + 0.05 * max(rows * nodes - 16, 0) + 0.002 * rows * cached


def verified(cost=surface) -> list[dict]:
    names = ("rows", "nodes", "cached")
    return [
        {**dict(zip(names, place, strict=True)), "ms": cost(*place)} for place in Grid().places()
    ]


def loop() -> list[dict]:
    places = product((1, 2, 8), (1, 4, 16))
    return [{"rows": rows, "nodes": nodes, "ms": 0.2 + 0.01 * rows} for rows, nodes in places]


def test_a_fit_recovers_a_cost_surface_at_measured_and_other_points():
    costs = fitted(verified(), loop(), [])
    assert costs.verify.worst_error < 1e-6
    for place in [(1, 20, 100), (3, 10, 64), (5, 1, 200), (1, 200, 256)]:
        assert costs.verify_ms(*place) == pytest.approx(surface(*place), rel=1e-4)
    assert costs.loop_ms(4) == pytest.approx(0.24)


def test_a_narrow_terminal_shows_all_columns_of_the_costs():
    points = [{"what": "verify", **point} for point in verified()]
    screen = Screen(width=30, record=True, file=io.StringIO())
    print_costs(points, fitted(verified(), loop(), []), screen)
    shown = screen.export_text()
    lines = [line.split() for line in shown.splitlines()]
    assert ["rows", "node", "nodes", "nodes"] in lines
    assert {str(rows) for rows in Grid.rows} <= {line[0] for line in lines if line}
    assert "…" not in shown


def test_a_fit_to_noisy_points_has_no_negative_weight():
    generator = torch.Generator().manual_seed(0)

    def noisy(*place: int) -> float:
        return surface(*place) * float(torch.rand(1, generator=generator) + 0.5)

    costs = fitted(verified(noisy), loop(), [])
    assert all(weight >= 0 for weight in costs.verify.weights.values())
    ms = [costs.verify_ms(1, nodes, 64) for nodes in range(1, 300)]
    assert ms == sorted(ms)
    assert 0 < costs.verify.median_error < costs.verify.worst_error


def test_rows_of_two_widths_reveal_the_cost_of_pads():
    at = {"nodes": 8, "widest": 15, "cached": 64}
    ragged = [at | {"rows": n, "ms": surface(n, 8, 64) + 0.7 * n} for n in (2, 4, 8)]
    costs = fitted(verified(), loop(), [], ragged)
    assert costs.pad_ms == pytest.approx(0.1, rel=1e-3)
    assert costs.verify_ms(4, 8, 64) == pytest.approx(surface(4, 8, 64), rel=1e-3)
    assert fitted(verified(), loop(), []).pad_ms == 0


def test_nonnegative_least_squares_equals_trying_every_active_set():
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        system = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        best = min(
            float((system[:, [*chosen]] @ weights - 1).norm())
            for count in range(5)
            for chosen in map(tuple, subsets(4, count))
            for weights in [solved(system[:, [*chosen]])]
            if (weights >= 0).all()
        )
        found = nonnegative(system)
        assert (found >= 0).all()
        assert float((system @ found - 1).norm()) == pytest.approx(best, rel=1e-9)


def subsets(size: int, count: int) -> list[list[int]]:
    masks = product((False, True), repeat=size)
    return [[n for n in range(size) if mask[n]] for mask in masks if sum(mask) == count]


def solved(system: torch.Tensor) -> torch.Tensor:
    ones = system.new_ones(len(system), 1)
    return torch.linalg.lstsq(system, ones).solution[:, 0] if system.shape[1] else ones[:0, 0]


def test_equal_columns_do_not_break_a_fit():
    terms = [{"passes": n, "rounds": n} for n in (1, 2, 3)]
    curve = fit(terms, [2.0, 4.0, 6.0])
    assert sum(curve.weights.values()) == pytest.approx(2)
    assert curve.worst_error < 1e-9


def test_a_curve_continues_linearly_after_its_last_knot():
    places = knots([1, 2, 4, 8])
    assert places == (1, 2, 4)
    terms = [verify_terms(1, nodes, 0, places) for nodes in (1, 2, 4, 8)]
    curve = fit(terms, [1.0, 1.0, 2.0, 6.0])
    assert curve.ms(verify_terms(1, 16, 0, places)) == pytest.approx(14)


def test_verifying_drafts_may_have_a_fixed_cost_besides_their_nodes():
    places = [(rows, nodes) for rows in (1, 2, 4, 8) for nodes in (1, 2, 6, 16)]
    ms = [2 + 0.1 * rows * nodes + (0.5 + 0.2 * rows) * (nodes > 1) for rows, nodes in places]
    curve = fit([verify_terms(*place, 0, (1,)) for place in places], ms)
    assert curve.worst_error < 1e-6
    assert curve.weights["drafts"] == pytest.approx(0.5)
    assert curve.weights["row drafts"] == pytest.approx(0.2)


def test_costs_survive_a_round_trip_through_json():
    draft = fit([{"draft": 1}], [2.0])
    costs = fitted(verified(), loop(), [])
    for one in (costs, CostModel(costs.verify, costs.knots, costs.loop, draft)):
        assert CostModel.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(DataError, match="no drafter"):
        costs.draft_ms([1], [1])


# Stored points.


def cells(counted: list) -> list[Cell]:
    def opened(place: tuple) -> object:
        counted.append(place)
        return lambda: 1e-3 * surface(*place)

    names = ("rows", "nodes", "cached")
    verify = [
        Cell("verify", dict(zip(names, place, strict=True)), partial(opened, place))
        for place in SMALL.places()
    ]
    return [*verify, Cell("loop", {"rows": 1, "nodes": 1}, partial(opened, (1, 1, 1)))]


def still() -> float:
    """The pace of a machine that does nothing else, in seconds."""
    return 1e-3


def measured(path: Path, subject: dict = SUBJECT, stop: int | None = None) -> tuple[Ledger, list]:
    ledger, counted = Ledger(path, "tiny", subject), []
    for turn, cell in turns(cells(counted), SMALL.repeats):
        if len(ledger.tries(cell)) <= turn:
            ledger.add(cell, visit(cell, still))
            if len(counted) == stop:
                break
    ledger.write()
    return ledger, counted


def test_an_interrupted_measurement_resumes_where_it_stopped(tmp_path):
    path, whole = tmp_path / "costs.json", 2 * len(cells([]))
    _, first = measured(path, stop=7)
    assert json.loads(path.read_text())["model"] is None
    with pytest.raises(DataError, match="is not whole; the command that began it"):
        load_costs(path)
    ledger, second = measured(path)
    assert "continuing from the " in ledger.note
    assert len(first) + len(second) == whole
    assert measured(path)[1] == []


def test_of_two_commands_at_once_one_measures_and_the_other_takes_its_costs(tmp_path, monkeypatch):
    recipe, target, visits = load_recipe("tiny"), random_target(vocab=40), []
    monkeypatch.setattr(
        "specdraft.eval.costing.measuring.visit", lambda *args: visits.append(args) or visit(*args)
    )

    def measure(_: int) -> int:
        return len(measure_costs(recipe, target, Trained(), SMALL, tmp_path / "costs.json").points)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(measure, range(2))
    assert first == second
    assert len(visits) == SMALL.repeats * first
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_every_turn_measures_all_cells_in_its_own_reproducible_order():
    made = list(turns(cells([]), 3))
    orders = [[cell.key for turn, cell in made if turn == number] for number in range(3)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert orders[0] != orders[1]
    assert [c.key for _, c in turns(cells([]), 3)] == [cell.key for _, cell in made]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("target", {"name": "u", "weights": "1"}, "another target: measuring again"),
        ("environment", {"cpu": "y", "threads": 2}, "another cpu, threads: measuring again"),
    ],
)
def test_costs_of_another_target_or_machine_are_measured_again(tmp_path, part, value, said):
    path = tmp_path / "costs.json"
    _, first = measured(path)
    ledger, again = measured(path, SUBJECT | {part: value})
    assert said in ledger.note
    assert again == first


def test_costs_of_another_version_are_named_and_measured_again(tmp_path):
    path = tmp_path / "costs.json"
    ledger, first = measured(path)
    ledger.fit()
    ledger.write()
    load_costs(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 1}))
    with pytest.warns(UserWarning, match="measured by another version of specdraft"):
        load_costs(path)
    ledger, again = measured(path)
    assert "another version of specdraft: measuring again" in ledger.note
    assert again == first


def test_a_target_with_another_weight_layout_is_measured_again(tmp_path):
    target, path = random_target(vocab=40), tmp_path / "costs.json"
    usual = subject(target, Trained(), PassOptions())
    measured(path, usual)
    assert measured(path, subject(random_target(vocab=40), Trained(), PassOptions()))[1] == []
    target.prepacked = PrepackedWeights(0)
    ledger, again = measured(path, subject(target, Trained(), PassOptions()))
    assert "another target: measuring again" in ledger.note
    assert again


def test_another_commit_does_not_invalidate_costs(tmp_path):
    measured(tmp_path / "costs.json")
    environment = SUBJECT["environment"] | {"commit": "b"}
    assert measured(tmp_path / "costs.json", SUBJECT | {"environment": environment})[1] == []


def test_processors_of_one_name_but_two_generations_are_different_machines(tmp_path):
    lines = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n"
    names = []
    for number, generation in enumerate([(25, 1), (26, 2)]):
        (tmp_path / str(number)).write_text(2 * lines.format(*generation))
        names.append(processor(tmp_path / str(number)))
    assert names == ["AMD EPYC (family 25, model 1)", "AMD EPYC (family 26, model 2)"]
    (tmp_path / "arm").write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert processor(tmp_path / "arm") == processor(tmp_path / "absent") == platform.processor()


def test_another_head_invalidates_only_the_costs_of_drafting(tmp_path):
    path = tmp_path / "costs.json"
    ledger, _ = measured(path)
    ledger.add(Cell("draft", {"rows": 1, "paths": [1], "levels": [1]}, open=list), Try(1.0, 1.0))
    ledger.write()
    ledger, again = measured(path, SUBJECT | {"drafter": {"kind": "head", "weights": "2"}})
    assert ledger.note == ""
    assert again == []
    assert ledger.of("draft") == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "points": [{}]}'])
def test_a_file_that_holds_no_costs_is_refused(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(DataError, match="holds no costs"):
        Ledger(tmp_path / "costs.json", "tiny", SUBJECT)
    with pytest.raises(DataError, match="holds no costs"):
        load_costs(tmp_path / "costs.json")


POINT = {"what": "draft", "rows": 1, "paths": [1], "levels": [1], "ms": 2.0, "tries": [2.0, 2.1]}
POINT |= {"paces": [1.0, 1.1]}


@pytest.mark.parametrize(
    "change",
    [
        {"what": "drafts"}, {"what": ["draft"]}, {"rows": None}, {"rows": 10**400}, {"levels": []},
        {"paths": 1}, {"nodes": 3}, {"ms": "2"}, {"ms": 0}, {"ms": float("nan")}, {"tries": []},
        {"tries": [2.0, None]}, {"tries": [2.0, float("inf")]}, {"paces": [1.0]},
        {"paces": [1.0, 0]},
    ],
)  # fmt: skip
def test_an_invalid_point_is_refused_before_anything_is_measured(tmp_path, change):
    file = tmp_path / "costs.json"
    for point in (POINT, POINT | change):
        file.write_text(json.dumps({"schema": SCHEMA, **SUBJECT, "points": [POINT, point]}))
        if point is POINT:
            assert len(Ledger(file, "tiny", SUBJECT).points) == 1
    with pytest.raises(DataError, match="holds no costs; delete it"):
        Ledger(file, "tiny", SUBJECT)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("verify", None), ("loop", {}), ("knots", []), ("knots", ["4"]), ("weights", []),
        ("weights", {}), ("weights", {"forward": None}), ("weights", {"forward": -1.0}),
        ("weights", {"pads": float("nan")}), ("weights", {"pads": 10**400}), ("weights", {"x": 1}),
    ],
)  # fmt: skip
def test_an_invalid_cost_model_is_refused(tmp_path, part, value):
    content = {"schema": SCHEMA, **SUBJECT, "points": []}
    content["model"] = fitted(verified(), loop(), []).to_dict()
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(content))
    load_costs(file)
    place = content["model"]["verify"] if part == "weights" else content["model"]
    place[part] = place[part] | value if part == "weights" and value else value
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="holds no costs; delete it"):
        load_costs(file)


@pytest.mark.parametrize("points", [[], None, [None], [{"what": "verify"}], "whole"])
def test_damaged_points_leave_a_reports_cost_curve_empty(tmp_path, points):
    whole = [{"what": "verify", "tries": [1.0], **point} for point in verified()]
    content = {"schema": SCHEMA, **SUBJECT, "model": fitted(verified(), loop(), []).to_dict()}
    content["points"] = whole if points == "whole" else points
    (tmp_path / "costs.json").write_text(json.dumps(content))
    shown = verify_curve(tmp_path / "costs.json")
    assert [one["nodes"] for one in shown] == ([*Grid().nodes] if points == "whole" else [])


def test_drafts_have_no_price_if_costs_are_of_a_drafter_of_another_kind_or_shape(tmp_path):
    """Kinds of drafters share a run's folder, and their passes cost differently."""
    target = random_target(vocab=40)
    head, other = random_head(target, 3), random_head(target, 3, seed=2)
    heads = MedusaHeads.of(MedusaConfig(target.hidden_size, 40, heads=2), target.lm_head_weight)
    recipe = load_recipe("recipes/tiny.yaml", [f"output.dir={tmp_path}"])
    setup = Setup(recipe, target, Trained(head=head), 1, 64)
    assert measured_costs(setup, "head") is None
    costs = fitted(verified(), loop(), [POINT])
    seen = {"feature_scale": 2.0, "window": 16}
    for trained, options, priced in [
        (Trained(head=head), PassOptions(), True),
        (Trained(head=other), PassOptions(), True),  # same size
        (Trained(head=random_head(target, 3, **seen)), PassOptions(), True),  # of other rows
        (Trained(head=head), PassOptions(compiles=True), False),
        (Trained(head=random_head(target, 2)), PassOptions(), False),
        (Trained(medusa=heads), PassOptions(), False),
        (Trained(), PassOptions(), False),
    ]:
        content = {"schema": SCHEMA, **subject(target, trained, options), "model": costs.to_dict()}
        (tmp_path / "costs.json").write_text(json.dumps(content))
        found = measured_costs(setup, "head")
        assert found.verify == costs.verify
        assert found.draft == (costs.draft if priced else None)


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({}, None),
        ({"threads": 64, "torch": "1.0"}, None),  # the same processor
        ({"cpu": "Abacus"}, "another machine .cpu Abacus, not "),
        ({"gpu": "Abacus"}, "another machine .gpu Abacus, not None"),
    ],
)
def test_costs_of_another_machine_give_a_warning(tmp_path, recwarn, there, told):
    target = random_target(vocab=40)
    content = {"schema": SCHEMA, **subject(target, Trained(), PassOptions()), "points": []}
    content["model"] = fitted(verified(), loop(), []).to_dict()
    content["environment"] = {**machine(target.device), **there}
    (tmp_path / "costs.json").write_text(json.dumps(content))
    load_costs(tmp_path / "costs.json")  # compared with no target or machine
    assert not recwarn
    load_costs(tmp_path / "costs.json", target)
    assert [bool(re.search(told, str(one.message))) for one in recwarn] == [True] * bool(told)


def test_scattered_paces_reveal_a_busy_machine():
    quiet, busy = {"paces": [1.0, 1.01, 1.02]}, {"paces": [1.0, 1.3, 2.5, 1.1]}
    assert unrest([quiet, quiet, busy]) < BUSY < unrest([busy, busy, quiet])


def test_what_a_machine_does_beside_a_visit_does_not_change_the_costs_it_finds(tmp_path):
    """Half of the time everything takes 1.6 times as long, and changes within a visit, too."""
    state = random.Random(0)
    slow = [1.0]

    def drifting() -> float:
        if state.random() < 0.05:
            slow[0] = state.choice([1.0, 1.6])
        return slow[0]

    ledger = Ledger(tmp_path / "costs.json", "tiny", SUBJECT)
    names = ("rows", "nodes", "cached")
    places = [dict(zip(names, place, strict=True)) for place in Grid().places()]
    loops = [{"rows": 1, "nodes": nodes} for nodes in (1, 4)]
    cells = [Cell("verify", at, partial(steps, surface(*at.values()), drifting)) for at in places]
    cells += [Cell("loop", at, partial(steps, 0.2, drifting)) for at in loops]
    for _, cell in turns(cells, 7):
        ledger.add(cell, visit(cell, steps(surface(1, 1, 64), drifting)))
    costs = ledger.fit()
    usual = costs.verify_ms(1, 1, 64) / surface(1, 1, 64)  # the mean pace, in the quickest
    assert 1.1 < usual < 1.5
    assert costs.verify.worst_error < 0.02
    for place in [(1, 20, 100), (3, 10, 64), (5, 1, 200)]:
        assert costs.verify_ms(*place) == pytest.approx(usual * surface(*place), rel=0.02)


def steps(ms: float, drifting: Callable[[], float]) -> Callable[[], float]:
    """What takes so many milliseconds on a machine whose pace drifts."""
    return lambda: 1e-3 * ms * drifting()


def test_a_visit_tells_what_its_cell_took_beside_the_pace_before_and_behind():
    paces = iter([1.0, 3.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    runs = iter([9.0] * WARM_UP + [4.0, 8.0, 6.0, 1.0, 1.0])
    cell = Cell("verify", {"rows": 1}, open=lambda: lambda: next(runs))
    with patch.object(benches, "ENOUGH", 1.0):
        found = visit(cell, lambda: next(paces))
    # Paces around the runs: 2, 4, 3, 1, 1; runs in paces: 2, 2, 2, 1, 1.
    assert found == Try(ms=2 * 2000.0, pace=2000.0)


# What is timed.


def test_a_grid_fits_the_targets_context():
    grid = Grid().within(256)
    assert grid.capacity <= 256
    assert grid.cached == (64,)
    assert max(Grid().within(100).nodes) == 96
    for nodes in ((1,), (1, 4), (1, 2, 12, 100)):  # the longest of several rows fits, too
        for context in (*range(3, 40), 128):
            assert Grid(nodes, cached=(2000,)).within(context).capacity <= context
    assert len({*Grid().places()}) == len([*Grid().places()])


def trees_of(bench: DraftBench) -> list[tuple]:
    found = {(tuple(c.at["paths"]), tuple(c.at["levels"])) for c in bench.cells()}
    return sorted(found)


@pytest.mark.parametrize("target", [random_target(vocab=40), random_seq2seq("bart", vocab_size=40)])
def test_every_kind_of_drafter_can_be_timed(target):
    layers = TargetBench(target, SMALL)
    pace = layers.pace()
    assert all(min(visit(cell, pace)) > 0 for cell in layers.cells())
    coupled = {"coupling": "recurrent", "reads": "both", "fusion": "linear"}
    heads = MedusaHeads.of(MedusaConfig(target.hidden_size, 40, heads=2), target.lm_head_weight)
    drafters = [
        Trained(head=random_head(target, 3, **coupled)),
        Trained(head=random_head(target, 1, fusion="linear")),
        Trained(medusa=heads),
        Trained(student=Target(pruned(target, (1,), False), None, "pruned")),
    ]
    for trained in drafters:
        bench = DraftBench(target, trained, SMALL)
        few = sorted(bench.cells(), key=lambda cell: len(cell.at["levels"]))
        assert all(min(visit(cell, pace)) > 0 for cell in (few[0], few[-1]))
        assert len(trees_of(bench)) > 1
    assert list(DraftBench(target, Trained(), SMALL).cells()) == []


def keep(made: list, maker: type, *sizes, **settings):
    """Make a drafter and record it."""
    made.append(maker(*sizes, **settings))
    return made[-1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["coupled", "eagle", "student"])
@torch.inference_mode()
def test_a_best_first_draft_is_timed_with_the_stated_number_of_passes(monkeypatch, kind, rows):
    target = random_target(vocab=40)
    coupled = {"coupling": "recurrent", "reads": "both", "fusion": "linear"}
    trained = {
        "coupled": lambda: Trained(head=random_head(target, 3, **coupled)),
        "eagle": lambda: Trained(head=random_head(target, 1, fusion="linear")),
        "student": lambda: Trained(student=Target(pruned(target, (1,), False), None, "pruned")),
    }[kind]()
    made = []
    for maker in (DynamicFalcon, BestFirst):
        opened = partial(keep, made, maker)
        monkeypatch.setattr(drafts, maker.__name__, opened)
    bench = DraftBench(target, trained, replace(SMALL, rows=(1, rows)))
    monkeypatch.setattr(drafts, "SEVERAL", (3,))
    cells = [cell for cell in bench.cells() if cell.at.get("best_first")]
    cells = [cell for cell in cells if cell.at["rows"] == rows]
    assert len(cells) > 2
    for cell in cells:
        go = cell.open()
        for _ in range(3):
            before = made[-1].forwards
            go()
            done = made[-1].forwards - before
            # Twice: the prompts are drafted for, too. Reading committed tokens costs no extra.
            assert done == 2 * rows * len(cell.at["paths"])


def test_choosing_nodes_on_the_host_has_its_own_price():
    def ms(rows: int, passes: int, best_first: bool) -> float:
        return (
            0.5
            + 0.3 * passes
            + 0.02 * rows * passes * (1 + best_first)
            + 0.05 * passes * best_first
        )

    draft = []
    for rows, passes, best_first in product((1, 4, 16), (1, 2, 3), (False, True)):
        at = {"rows": rows, "paths": [1] * passes, "levels": [1] * 3 * passes}
        at |= {"best_first": True} if best_first else {}
        draft.append(at | {"ms": ms(rows, passes, best_first)})
    costs = fitted(verified(), loop(), draft)
    for rows, passes in product((1, 8, 24), (1, 2, 3)):
        paths, levels = [1] * passes, [1] * 3 * passes
        more = costs.draft_ms(paths, levels, rows, best_first=True)
        more -= costs.draft_ms(paths, levels, rows)
        assert more == pytest.approx(passes * (0.05 + 0.02 * rows), rel=0.02)


@torch.inference_mode()
def test_timed_forwards_and_drafts_of_as_many_rows_alternate():
    target, done = random_target(vocab=40), []
    forwards = TargetBench(target, SMALL)
    drafts = DraftBench(target, Trained(head=random_head(target, 2)), SMALL)
    for bench in (forwards, drafts):
        bench.between = lambda rows: partial(done.append, rows)
        for cell in bench.cells():
            done.clear()
            visit(cell, still)
            plain = cell.at.get("nodes") == 1  # has no drafts
            assert {*done} == (set() if plain else {cell.at["rows"]})
    done.clear()
    for rows in (1, 2):
        assert min(drafts.draft(rows)(), forwards.forward(rows)()) > 0
    assert DraftBench(target, Trained(), SMALL).draft(1)() is None
    assert not done


@pytest.mark.parametrize("compiles", [False, True])
def test_a_compiling_drafter_is_made_once_per_row_count_for_all_visits(compiles):
    """torch.compile's limit per process is too low for a graph per visit and head."""
    target = random_target(vocab=40)
    head, made = random_head(target, 2), []
    bench = DraftBench(target, Trained(head=head), SMALL, PassOptions(compiles))

    def make(rows):
        made.append(rows)
        return FalconDrafter(head, target, StaticTree.chain(2, 2), rows, bench.capacity)

    for rows in (1, 2):
        cell = bench._cell(([1], [2], make), rows)
        for _ in range(3):
            assert visit(cell, still).ms > 0
    assert made == ([1, 2] if compiles else [1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize(("nodes", "brought"), [(1, 1), (2, 2), (4, FRESH), (16, FRESH)])
def test_timed_loop_steps_accept_tokens_of_their_trees(nodes, brought):
    bench = TargetBench(random_target(vocab=40), Grid((1, nodes), (1, 2), (8,)))
    at = {"rows": 2, "nodes": nodes}
    (cell,) = (one for one in bench.cells() if one.what == "loop" and one.at == at)
    counts, observe = [], bench.guesser.observe
    bench.guesser.observe = lambda row, tokens, *rest: (
        counts.append(len(tokens)), observe(row, tokens, *rest),
    )  # fmt: skip
    with torch.inference_mode():
        cell.open()()
    assert len(counts) >= 2 * STEPS
    assert {*counts} == {brought}


def test_timed_loop_steps_reuse_tree_shapes_as_decoding_does():
    guesser = TargetBench(random_target(vocab=40), SMALL).guesser
    for nodes in (1, 2, 4, 16):
        assert guesser.tree(nodes).topology is guesser.tree(nodes, [3]).topology


def test_points_of_any_grid_are_timed_beside_the_same_forward():
    """A ledger goes on with another grid, and its points share one pace."""
    target, read = random_target(vocab=40), []
    for grid in (SMALL, Grid((3, 4), (2, 3), (16, 20))):
        bench = TargetBench(target, grid)
        pace, forward = bench.pace(), bench.decoder.packed.forward
        bench.decoder.packed.forward = lambda ids, places, segments, forward=forward: (
            read.append((len(ids), places.tolist())), forward(ids, places, segments),
        )[1]  # fmt: skip
        with torch.inference_mode():
            assert pace() > 0
    assert read[0] == read[1] == (1, [PROMPT])


def test_several_rows_are_timed_with_caches_of_different_lengths():
    bench = TargetBench(random_target(vocab=40), Grid((1, 4), (1, 3), (8,)))
    found = {}
    for cell in bench.cells():
        if cell.what == "verify":
            cell.open()()
            rows = cell.at["rows"]
            found[rows] = bench.decoder.packed.pool.lengths[:rows]
    assert found == {1: [8], 3: [4, 8, 12]}


def test_several_rows_are_also_timed_with_trees_of_two_sizes():
    bench = TargetBench(random_target(vocab=40), Grid((1, 3, 9), (1, 2, 3), (8,)))
    ragged = {cell.at["rows"]: cell for cell in bench.cells() if cell.what == "ragged"}
    assert ragged.keys() == {2, 3}
    read, forward = [], bench.decoder.packed.forward
    bench.decoder.packed.forward = lambda *inputs: (
        read.append([segment.count for segment in inputs[-1]]), forward(*inputs),
    )[1]  # fmt: skip
    for cell in ragged.values():
        assert cell.at | {"rows": 0} == {"rows": 0, "nodes": 3, "cached": 8, "widest": 5}
        with torch.inference_mode():
            assert cell.open()() > 0
    assert read == [[1, 5], [1, 5, 3]]


def test_a_head_that_reads_layers_of_the_target_is_timed_with_them(monkeypatch):
    target = random_target(vocab=40)
    head = random_head(target, 2, feature_layers=(1,))
    cell = next(DraftBench(target, Trained(head=head), SMALL).cells())
    assert visit(cell, still).ms > 0
    bench, widths = TargetBench(target, SMALL, (1,)), set()
    packed = bench.decoder.packed
    forward = packed.forward

    def watched(*inputs):
        features = forward(*inputs)
        widths.add(features.shape[-1])
        return features

    monkeypatch.setattr(packed, "forward", watched)
    assert visit(next(bench.cells()), bench.pace()).ms > 0
    assert widths == {2 * target.hidden_size}


def test_a_trees_shape_lists_the_heads_paths_and_levels_per_pass():
    paths = [(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1), (1, 0), (1, 0, 0)]
    assert shape_of(StaticTree(paths, 2)) == ([1, 2], [2, 2])
    assert shape_of(StaticTree(paths, 2, coupled=True)) == ([1, 2], [1, 2, 2])


# Targets of a shape.

PUBLISHED = {"llama1b": 1.236e9, "llama7b": 6.738e9, "llama13b": 13.016e9, "llama70b": 68.977e9}


def test_every_named_shape_has_its_models_published_parameter_count():
    assert PUBLISHED.keys() == shapes.SHAPES.keys()
    for name, count in PUBLISHED.items():
        assert shapes.SHAPES[name].parameters == pytest.approx(count, rel=0.05)


def test_a_sketch_counts_a_models_parameters_and_bytes():
    skeleton = shapes.sketch(shapes.find_shape("llama1b"), load_recipe("recipes/tiny.yaml"))
    assert skeleton.parameters == pytest.approx(PUBLISHED["llama1b"], rel=0.01)
    assert skeleton.bytes > 4 * skeleton.parameters


def test_a_shape_too_large_for_memory_is_refused_before_it_is_built():
    recipe = load_recipe("recipes/tiny.yaml")
    skeleton = shapes.sketch(shapes.find_shape("llama1b"), recipe)
    with (
        patch.object(room, "free_bytes", lambda device: 3_000_000_000),
        patch.object(Target, "random", side_effect=AssertionError("it was built")),
        pytest.raises(RecipeError, match=r"needs \d\.\d GB of memory, and 3\.0 GB are free"),
    ):
        shapes.build(skeleton, recipe, 384, torch.device("cpu"))


def test_a_shape_given_by_path_is_named_after_its_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path / "mine")
    for name in (".", "config.json", "../mine", str(tmp_path / "mine" / "config.json")):
        assert shapes.find_shape(name).name == "mine"


def test_an_unknown_shape_is_refused_with_the_nearest_name_or_the_reason(tmp_path):
    with pytest.raises(RecipeError, match="nearest is llama7b"):
        shapes.find_shape("llama7")
    for values, said in [
        ({"hidden_size": 3}, "no config of a model"),
        ({"model_type": "clip"}, "clip is no causal LM"),
        ({"model_type": "t5"}, "t5 is no causal LM"),
        ({"model_type": "unheard-of"}, "cannot be read"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(RecipeError, match=said):
            shapes.find_shape(str(tmp_path))


# The command.


def test_the_command_measures_plots_and_reuses_its_points(tmp_path):
    out = tmp_path / "costs.json"
    done = run_here(*TINY, f"output.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "costs of the target alone" in done.stderr
    assert "ms to verify" in done.stdout
    content = json.loads(out.read_text())
    assert {len(point["tries"]) for point in content["points"]} == {2}
    assert content["target"]["name"] == "tiny"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    costs = load_costs(out, Target.load("tiny"))
    assert isinstance(costs.verify, Curve)
    assert costs.verify_ms(2, 4, 16) >= costs.verify_ms(1, 1, 16) > 0
    other = random_target()
    for name, whose in (("random-0", "tiny, not of random-0"), ("tiny", "tiny with other weights")):
        other.name = name
        with pytest.raises(DataError, match=f"is of {whose}; measure this one"):
            load_costs(out, other)
    done = run_here(*TINY, f"output.dir={tmp_path}")
    assert "points are measured already" in done.stderr
    assert json.loads(out.read_text()) == content


def test_the_command_measures_a_shape_with_its_head(tmp_path):
    done = run_here(*TINY, "--repeats", "1", "--shape", "models/tiny", f"output.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "GB with its head, random weights on cpu" in done.stderr
    content = json.loads((tmp_path / "costs_tiny.json").read_text())
    assert content["drafter"]["config"]["coupling"] == "recurrent"
    costs = load_costs(tmp_path / "costs_tiny.json")
    assert costs.draft_ms([1, 4], [1, 4, 4], rows=2) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "gpt"], "neither a file nor a shape"),
        (["--nodes", "0"], "--nodes 0: give whole numbers of at least 1"),
        (["--nodes", "4096"], "--nodes 4096: the target's context is"),
        (["--repeats", "0"], "argument --repeats: 0 is not allowed"),
        (["--out", "costs.txt"], "ends in .json"),
        (["--out", "README.md/costs.json"], "cannot be written"),
    ],
)
def test_bad_input_gives_one_message(options, said):
    done = run_here(*TINY, *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
