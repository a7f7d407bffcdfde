"""CS Drafting's Table 2: its rows, how each is tuned, and the figures computed from them."""

import gc
import json
from collections import Counter
from itertools import pairwise
from math import prod

import pytest
import torch
from commands import run_here
from decoding import plain_tokens
from decoding import prompts as random_prompts
from random_models import VOCAB, random_target
from shallow import shallow_target
from test_lm_drafter import near

from specdraft.data.prompts import Prompt, load_prompts, tuning_prompts
from specdraft.eval.measure.methods import make_method
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.rounds import balanced, take_turns
from specdraft.eval.measure.tuning import Scorer, apply_setting, sample_settings
from specdraft.eval.methods.registry import space_of
from specdraft.eval.methods.trained import Trained
from specdraft.eval.papers import contenders as module
from specdraft.eval.papers.contenders import Contender, alone, contenders, measured, tuned
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.student import make_student
from specdraft.models.target import Target
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import StudentSection

RECIPE = "recipes/tiny_cascades.yaml"
NAMES = ["plain", "SD 1", "SD 2", "MaG", "1 + MaG", "2 + MaG", "1 + 2 + MaG"]


def table_of(size: int) -> MaxGramTable:
    ones = torch.ones(size, dtype=torch.long)
    return MaxGramTable.of_counts(MaxGramConfig(size), ones, ones, ones)


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def rows(target):
    """The rows of a random target with two students, one closer to it than the other."""
    recipe = load_recipe(RECIPE, ["eval.max_new_tokens=14"])
    students = (near(target, 0.02), near(target, 0.05))
    return contenders(recipe, Trained(table=table_of(VOCAB), cascade=students))


def chats(tokens: list[list[int]]) -> list[Prompt]:
    return [Prompt(str(n), "odd" if n % 2 else "even", ids, "") for n, ids in enumerate(tokens)]


# -- rows ----------------------------------------------------------------------------------------


def test_every_student_has_rows_alone_with_max_gram_and_with_the_other(rows):
    assert [row.name for row in rows] == NAMES
    methods = ["plain", "ssd", "ssd", "maxgram", "cascade", "cascade", "cascade"]
    assert [row.method for row in rows] == methods
    first, second = rows[-1].trained.cascade
    assert [row.trained.student for row in rows[1:3]] == [first, second]
    assert [row.trained.cascade for row in rows[4:]] == [(first,), (second,), (first, second)]
    assert [row.recipe.cascade.size for row in rows[4:]] == [1, 1, 2]


def test_a_single_student_makes_no_duplicate_row():
    recipe = load_recipe("recipes/tiny_cascade.yaml")
    student = random_target()
    made = contenders(recipe, Trained(table=table_of(VOCAB), cascade=(student,)))
    assert [row.name for row in made] == ["plain", "SD 1", "MaG", "1 + MaG"]
    assert made[-1].recipe.cascade == recipe.cascade


def test_a_student_alone_keeps_its_part_of_k():
    recipe = load_recipe(RECIPE, ["cascade.k=[[4, 3, 2], [0, 0, 1], [0, 0, 5]]"])
    assert alone(recipe, 0).cascade.k == ((4, 2), (0, 5))
    # It contributed nothing to student 1, but alone it has to draft.
    assert alone(recipe, 1).cascade.k == ((1, 2), (0, 5))
    names = [alone(recipe, place).cascade.students for place in (0, 1)]
    assert names == [("runs/tiny_distill/student",), ("runs/tiny_distill_1/student",)]


# -- tuning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("students", [2, 3])
def test_every_point_of_the_tuning_space_is_a_valid_k(students):
    size = students + 1
    zeros = [[int(i == j) for j in range(size)] for i in range(size)]
    names = [f"s{n}" for n in range(students)]
    recipe = load_recipe(RECIPE, [f"cascade.k={zeros}", f"cascade.students={names}"])
    space = space_of(recipe, "cascade")
    entries = [path for path in space if ".k." in path]
    assert len(entries) == size * (size + 1) // 2
    for extreme in (min, max):
        k = apply_setting(recipe, {path: extreme(space[path]) for path in entries}).cascade.k
        assert all(k[i][j] == 0 for i in range(size) for j in range(i))
        assert [k[i][j] for i in range(size) for j in range(i, size)] == [
            extreme(space[path]) for path in entries
        ]
    found = sample_settings(recipe, "cascade", 40)
    assert len({tuple(setting.values()) for setting in found}) == 40
    for setting in found:  # raises if a setting does not fit the recipe
        tree = apply_setting(recipe, setting).to_dict()["cascade"]
        places = [path.split(".")[2:] for path in entries]
        assert [tree["k"][int(i)][int(j)] for i, j in places] == [setting[p] for p in entries]
    for path, values in space.items():  # the sample has every value
        assert {setting[path] for setting in found[1:]} == set(values)


def test_sampling_finds_every_point_of_a_tuning_space_once():
    recipe = load_recipe(RECIPE)
    for method in ("ssd", "maxgram", "gsd", "cascade"):
        space = space_of(recipe, method)
        found = sample_settings(recipe, method, 20_000)
        assert len({tuple(setting.values()) for setting in found}) == len(found)
        inside = all(found[0][path] in values for path, values in space.items())
        assert len(found) == prod(map(len, space.values())) + (not inside)
    alone = space_of(load_recipe("recipes/tiny_cascade.yaml"), "cascade")
    assert [*alone] == [f"cascade.{key}" for key in ("k.0.0", "k.0.1", "k.1.1", "copy_match")]


def test_the_best_setting_of_the_last_rung_is_taken(rows, target, monkeypatch):
    class Counted(Scorer):
        """Prefers long drafts, whatever they gain."""

        def __call__(self, setting, budget):
            return setting["maxgram.n"] / budget

    monkeypatch.setattr(module, "Scorer", Counted)
    best = tuned(rows[3], target, chats(random_prompts(4)), 100, "wall")
    assert (best.setting, best.score) == ({"maxgram.n": 10}, 10 / 4)
    assert best.recipe.maxgram.n == 10
    assert tuned(rows[0], target, [], 5, "wall") is rows[0]


# -- figures -------------------------------------------------------------------------------------


def test_every_row_gives_plain_decodings_output_and_categories_add_up(rows, target):
    tuning, asked = chats(random_prompts(2)), chats(random_prompts(6)[1:])
    chosen = [tuned(row, target, tuning, 2, "swi") for row in rows]
    made = measured(chosen, target, asked)
    assert [row["row"] for row in made] == NAMES
    expected = sum(len(plain_tokens(target, prompt.input_ids, 14)) for prompt in asked)
    for row in made:
        assert (row["identical"], row["outputs"], row["tokens"]) == (5, 5, expected)
        parts = [(part["category"], part["identical"]) for part in row["categories"]]
        assert parts == [("even", 3), ("odd", 2)]
        for key in ("tokens", "steps", "outputs", "identical"):
            assert sum(part[key] for part in row["categories"]) == row[key]
    plain, *drafted = made
    assert (plain["score"], plain["setting"], plain["speedup"]) == (None, {}, 1)
    assert {part["swi_measured"] for part in plain["categories"]} == {1}
    assert all(row["score"] > 0 and row["setting"] for row in drafted)
    assert min(row["tokens_per_step"] for row in made[1:2] + made[4:]) > 1
    for part in made[3]["categories"]:  # Max-Gram's drafts cost no forwards
        assert part["swi_measured"] == part["tokens"] / part["steps"]
    both = next(row for row in made if row["row"] == "1 + 2 + MaG")
    assert len(both["setting"]["cascade"]["k"]) == 3


def test_a_category_counts_only_the_forwards_of_its_own_prompts(target):
    """Its SWI equals that of its prompts measured alone."""
    recipe = load_recipe(RECIPE, ["eval.max_new_tokens=14", "drafting.gamma=3"])
    row = Contender("SD", "ssd", recipe, Trained(student=target))
    plain = Contender("plain", "plain", recipe, Trained())
    asked = chats(random_prompts(5))
    (_, made) = measured([plain, row], target, asked)
    for part, places in zip(made["categories"], ([0, 2, 4], [1, 3]), strict=True):
        (_, lone) = measured([plain, row], target, [asked[n] for n in places])
        # Of the two SWIs, the one that does not depend on timing.
        assert part["swi_params"] == pytest.approx(lone["swi_params"])
        assert part["steps"] == lone["steps"]


def test_runners_take_turns_on_every_batch(target):
    recipe = load_recipe(RECIPE, ["eval.max_new_tokens=2", "eval.repeats=2"])
    requests = make_requests(recipe.eval, chats(random_prompts(3)))
    asked, runners = [], {}
    for name in ("a", "b", "c"):
        run = make_method("plain", recipe, target, Trained(), 64)
        runners[name] = lambda some, name=name, run=run: asked.append(name) or run(some)
    outcomes = take_turns(runners, requests, recipe.eval, progress=False)
    # A warm-up; every prompt once, each time starting with another runner; then all again.
    assert "".join(asked) == "abc" + "abcbcacab" + "bcacabcba"
    assert [len(parts) for parts in outcomes.values()] == [3, 3, 3]
    for part in (part for parts in outcomes.values() for part in parts):
        assert len(part.tries) == 2
        assert part.seconds == pytest.approx(sum(part.tries) / 2)  # their median


def test_loaded_objects_are_frozen_out_of_garbage_collection_during_turns(target):
    recipe = load_recipe(RECIPE, ["eval.max_new_tokens=2"])
    run, frozen = make_method("plain", recipe, target, Trained(), 64), []
    before = gc.get_freeze_count()
    runners = {"a": lambda some: frozen.append(gc.get_freeze_count()) or run(some)}
    take_turns(runners, make_requests(recipe.eval, chats(random_prompts(2))), recipe.eval, False)
    assert min(frozen[1:]) > before + 10_000  # the first call is the warm-up
    assert gc.get_freeze_count() <= before


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 9])
def test_in_balanced_orders_each_follows_every_other_equally_often(count):
    times = 1 + count % 2
    orders = [balanced(range(count), turn) for turn in range(count * times)]
    assert all(sorted(order) == [*range(count)] for order in orders)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == count * (count - 1)
    assert set(follows.values()) <= {times}
    assert set(Counter(order[0] for order in orders).values()) == {times}


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> list[str]:
    """Overrides: a target of two layers, untrained students and a table for it."""
    folder = tmp_path_factory.mktemp("drafters")
    target = Target.load(shallow_target(folder / "target"))
    for name, layers in (("two", [0, 1]), ("one", [1])):
        make_student(StudentSection(keep_layers=layers), target).save_pretrained(folder / name)
    table_of(target.vocab_size).save_pretrained(folder / "table")
    students = f"cascade.students=[{folder / 'two'}, {folder / 'one'}]"
    places = [students, f"maxgram.table={folder / 'table'}", f"output.dir={folder / 'run'}"]
    return [*places, f"target.model={target.name}", "eval.max_new_tokens=6", "eval.limit=3"]


def test_the_command_tunes_on_other_prompts_than_it_measures(drafters, tmp_path, monkeypatch):
    seen = []

    class Watched(Scorer):
        def __call__(self, setting, budget):
            seen.append((self.method, [prompt.id for prompt in self.prompts[:budget]]))
            return super().__call__(setting, budget)

    monkeypatch.setattr(module, "Scorer", Watched)
    out = tmp_path / "deep" / "table.json"
    options = ["table.candidates=2", "table.prompts=2", "table.by=swi", "--out", str(out)]
    done = run_here("eval/paper.py", "tuned_cascades", *drafters, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    recipe, tokenizer = load_recipe(RECIPE, drafters), Target.load("tiny").tokenizer
    measured_on = {prompt.id for prompt in load_prompts(recipe, tokenizer)}
    unseen = [prompt.id for prompt in tuning_prompts(recipe, tokenizer, 2)]
    assert report["overrides"][:3] == options[:3]
    assert [method for method, _ in seen] == ["ssd"] * 4 + ["maxgram"] * 2 + ["cascade"] * 6
    assert all(ids == unseen for _, ids in seen)
    assert not set(unseen) & measured_on
    *rows, best, _, gain, over_all = report["rows"]
    assert [row["row"] for row in rows] == [run["row"] for run in report["runs"]] == NAMES
    assert all(row["identical"] + row["near_ties"] == 3 for row in rows)
    assert [path.name for path in out.parent.iterdir()] == ["table.json"]
    for text in (*NAMES, "best cascade / best SD", "3/3", "1 + MaG: 'cascade.k="):
        assert text in done.stdout
    assert best["ours"] in [row["ours"] for row in rows[1:3]]
    parts = [f"{part}: {way}" for part in ("chat", "math", "code") for way in ("SWI", "x")]
    assert set(parts) < set(report["columns"])
    for column in report["columns"]:  # the ratio compares the best rows of both kinds
        best = {"cascade": 0, "ssd": 0}
        for row, run in zip(rows, report["runs"], strict=True):
            best[run["method"]] = max(best.get(run["method"], 0), row["ours"][column]["mean"])
        ratio = best["cascade"] / best["ssd"]
        assert gain["ours"][column]["mean"] == pytest.approx(ratio, rel=1e-4)
        ratio = best["cascade"] / max(best["ssd"], best["maxgram"])
        assert over_all["ours"][column]["mean"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cascade.students=[]"], "cascade.students = []: name at least one student"),
        (
            ["cascade.students=null", "cascade.k=[[4, 2], [0, 2]]", "student.model=null",
             "student.training=full", "train.steps=1"],
            "cascade drafts with a student",
        ),
        (["maxgram.table=gone"], "no Max-Gram table at gone"),
        (["cascade.k=[[4, 2], [0, 2]]"], "must be 3 x 3"),
        (["eval.batch_size=2"], "eval.batch_size = 2: a batch mixes categories; set it to 1"),
        (["eval.limit=null"], "eval.limit = None: no prompt of tiny_chat is left to tune on"),
        (["table.candidates=0"], "table.candidates = 0: must be >= 1"),
        (["table.by=time"], "table.by = 'time': must be one of wall, swi"),
    ],
)  # fmt: skip
def test_bad_input_gives_one_clear_line(drafters, overrides, message, tmp_path):
    out = tmp_path / "new" / "table.json"
    done = run_here("eval/paper.py", "tuned_cascades", *drafters, "--out", str(out), *overrides)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if message in line]
    assert "Traceback" not in done.stderr
    assert not out.exists()
