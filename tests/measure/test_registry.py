"""The registry: a new drafter is one row, and everything that handles methods handles it."""

import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from commands import run_here
from random_models import random_target
from test_decoder import plain_tokens, prompts

from specdraft.data.prompts import tuning_prompts
from specdraft.eval.bench import measure
from specdraft.eval.custom_generate import Speculative, method
from specdraft.eval.engine.tree import Tree, chain
from specdraft.eval.measure.tuning import Scorer, sample_settings
from specdraft.eval.methods import registry
from specdraft.eval.methods.registry import (
    METHODS,
    WAYS,
    Method,
    describe,
    find,
    load_trained,
    problems,
    registered,
    space_of,
    way_of,
)
from specdraft.eval.methods.setup import Setup
from specdraft.eval.methods.trained import KINDS, Trained
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, RecipeError
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.recipes.sections import drafting
from specdraft.recipes.sections.drafting import DraftingSection

SMALL = ["eval.limit=4", "eval.max_new_tokens=32", "train.threads=1"]


class Period:
    """Drafts by repeating the last `distance` tokens."""

    from_tokens, rules = True, frozenset()

    def __init__(self, distance: int, rows: int):
        self.distance, self.max_nodes = distance, distance
        self.forwards, self.seconds = 0, 0.0
        self.texts = [[] for _ in range(rows)]

    def start(self, row, request):
        self.texts[row] = list(request.prompt)

    def move(self, row, to):
        self.texts[to] = self.texts[row]

    def observe(self, row, tokens, features):
        self.texts[row] += tokens

    def draft(self, rows):
        ends = [torch.tensor(self.texts[row][-self.distance :]) for row in rows]
        return [Tree(chain(len(end)), end) for end in ends]


PERIOD = Method(
    "period",
    "what stood so many tokens before, again",
    lambda setup: Period(setup.recipe.drafting.gamma, setup.rows),
    tuned={"drafting.gamma": (1, 2, 3)},
)


@pytest.fixture
def row():
    """The row of a drafter that is not in the package."""
    with registered(PERIOD):
        yield PERIOD
    assert "period" not in METHODS


def recipe(*overrides: str):
    return load_recipe("recipes/tiny.yaml", [*SMALL, *overrides], check=problems)


def test_a_new_row_is_benchmarked_like_any_other(row, tmp_path):
    methods = "eval.methods=[plain, period, period:padded, period:dynamic]"
    mine = recipe(methods, "eval.batch_size=2", f"output.dir={tmp_path}")
    runs = {run["method"]: run for run in measure([mine], tmp_path)["runs"]}
    assert list(runs) == ["plain", "period", "period:padded", "period:dynamic"]
    for name, run in runs.items():
        assert run["identical"] + run["near_ties"] == run["outputs"] == 4
        assert run["failures"] == []
        if name != "plain":
            assert run["drafted_per_step"] > 1
            assert run["tokens_per_step"] > 1
    assert (tmp_path / "report.html").is_file()


def test_a_new_row_is_tuned_described_and_offered_to_generate(row):
    assert "period            what stood so many tokens before, again" in describe()
    tiny = Target.load("tiny")
    mine = recipe("eval.max_new_tokens=8")
    assert space_of(mine, "period") == {"drafting.gamma": (1, 2, 3)}
    settings = sample_settings(mine, "period", 10)
    assert [setting["drafting.gamma"] for setting in settings[1:]].count(2) == 1
    unseen = tuning_prompts(mine, tiny.tokenizer, 2)
    assert Scorer(mine, "period", tiny, Trained(), unseen, "swi")(settings[-1], 2) > 0.9
    target, prompt = random_target(), prompts()[1]
    fast = Speculative(method("period", {"drafting": {"gamma": 2}}))
    ids = torch.tensor([prompt])
    ours = target.model.generate(ids, custom_generate=fast, max_new_tokens=9, do_sample=False)
    assert ours[0].tolist() == prompt + plain_tokens(target, prompt, 9)


def test_a_removed_row_is_unknown_everywhere():
    with pytest.raises(RecipeError, match=r"entry 0 \('period'\) must be one of plain, generate"):
        recipe("eval.methods=[period]")
    with pytest.raises(RecipeError, match="unknown method 'period'; known: plain, generate"):
        find("period")
    with pytest.raises(RecipeError, match="nothing to fit of 'period'; known: prompt_lookup"):
        space_of(recipe(), "period")
    with pytest.raises(RecipeError, match="method plain is registered already"):
        registered(METHODS["plain"]).__enter__()


def test_every_row_is_complete_and_found_by_its_names():
    for name, row in METHODS.items():
        assert row.name == name
        assert (row.make is None) == (row.generate is not None), name
        assert set(row.needs) <= set(KINDS), name
        assert bool(row.needs) == (row.trainer is not None), name
        assert 0 < len(row.description) < 60, name
        for way in ("", *(f":{way}" for way in WAYS if row.is_ours)):
            assert find(f"{name}{way}") is row
    assert find("padded") is find("prompt_lookup:padded")
    assert way_of("padded") == way_of("prompt_lookup:padded") == "padded"
    for wrong in ("generate:padded", "falcon_tree:", "falcon_tree:unpadded", ":padded", ""):
        with pytest.raises(RecipeError, match="unknown method"):
            find(wrong)


def test_every_tuning_space_uses_keys_of_the_recipe():
    base = load_recipe("recipes/tiny_cascade.yaml")
    for row in METHODS.values():
        if row.tuned:
            assert sample_settings(base, row.name, 3)


def test_all_errors_about_methods_are_reported_at_once_with_all_others():
    with pytest.raises(RecipeError) as caught:
        recipe(
            "eval.methods=[falcon_three, ssd:padded, cascade, medusa_tree, generate, hf_asisted]",
            "eval.spread=4",
            "data.drafter=falcon_tre",
            "data.answers=target",
            "train.batch_size=0",
        )
    text = str(caught.value)
    for expected in (
        "train.batch_size = 0: must be >= 1",
        "data.drafter = 'falcon_tre': must be one of plain, prompt_lookup, falcon_chain, falcon_t",
        "nearest is falcon_tree",
        "entry 0 ('falcon_three') must be one of plain, generate, hf_prompt_lookup, prompt_lookup",
        "too); nearest is falcon_tree",
        "entry 5 ('hf_asisted') must be one of",
        "eval.methods: ssd:padded drafts with a student; set one of student.model, student.keep",
        "eval.methods: cascade drafts with a student; set one of",
        "eval.methods: medusa_tree drafts with Medusa heads; set medusa.heads, e.g. 4",
        "eval.spread = 4.0: generate cannot give each row its own length; leave it out of",
    ):
        assert expected in text
    assert "8 errors" in text


def test_ten_thousand_unknown_methods_give_one_short_message():
    tree = {"name": "x", "data": {"sources": ["tiny"]}, "train": {"steps": 1}}
    names = [f"method_{number}" * 50 for number in range(10_000)]
    with pytest.raises(RecipeError, match="nearest is") as caught:
        from_dict(tree | {"eval": {"methods": names}}, problems)
    assert len(str(caught.value)) < 20_000


def test_an_invalid_section_does_not_hide_errors_of_others():
    with pytest.raises(RecipeError) as caught:
        recipe("eval.methods=[ssd, nothing]", "student.layers=0")
    assert "student.layers = 0" in str(caught.value)
    assert "'nothing'" in str(caught.value)
    assert "ssd drafts" not in str(caught.value)  # whether there is a student is unknown


def test_a_run_loads_only_what_its_methods_need(tmp_path):
    tiny = Target.load("tiny")
    nothing = recipe("eval.methods=[plain, generate, prompt_lookup:padded]")
    assert load_trained(nothing, tiny) == Trained()
    with pytest.raises(HeadError, match=f"no trained head at {tmp_path / 'falcon'}"):
        load_trained(recipe("eval.methods=[falcon_tree:padded]", f"output.dir={tmp_path}"), tiny)


def test_the_help_of_commands_describes_every_method():
    for script in ("eval/bench.py", "eval/generate.py"):
        shown = run_here(script, "--help").stdout
        for row in METHODS.values():
            assert row.description in shown


class Reads:
    """A section that records which of its keys are read."""

    def __init__(self, section):
        self.section, self.keys = section, set()

    def __getattr__(self, key):
        self.keys.add(key)
        return getattr(self.section, key)


def test_comments_on_drafting_keys_name_exactly_the_methods_that_read_them(monkeypatch):
    monkeypatch.setattr(registry, "measured_costs", lambda setup, kind: None)
    lines = Path(drafting.__file__).read_text(encoding="utf-8").splitlines()
    told, read = set(), set()
    for line in lines[: lines.index("class MaxgramSection(Section):")]:
        if found := re.fullmatch(r"    (\w+): .*  # ([a-z_, ]+)(:.*)?", line):
            key, names, _ = found.groups()
            told |= {(name, key) for name in names.split(", ") if name in METHODS}
    for name, row in METHODS.items():
        section = Reads(DraftingSection())
        setup = Setup(SimpleNamespace(drafting=section), *[MagicMock()] * 4)
        with suppress(Exception):  # mocks may break it: only the keys read matter
            (row.make or row.generate)(setup)
        read |= {(name, key) for key in section.keys}
    assert told == read
