"""Contexts longer than training rows: a target that reads them, prompts, and the table."""

import itertools
from pathlib import Path

import pytest
import torch
from test_compare import falcon, finished

from specdraft.data.world.contexts import NEW_TOKENS, WINDOW, context_prompts, write_windowed
from specdraft.eval.papers import contexts
from specdraft.eval.papers.table import Plan, with_settings
from specdraft.eval.papers.tables import all_tables
from specdraft.models.target import Target

LENGTHS = [128, 512, 1024]


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


def test_shorter_prompts_are_ends_of_longer_ones_and_all_leave_room_for_an_answer(tiny):
    prompts = context_prompts(tiny.tokenizer, 1, 2, LENGTHS)
    for talks in zip(*(prompts[length] for length in LENGTHS), strict=True):
        assert len({kind for kind, _ in talks}) == 1
        for (_, shorter), (_, longer) in itertools.pairwise(talks):
            assert longer[-len(shorter) :] == shorter
        for length, (_, messages) in zip(LENGTHS, talks, strict=True):
            ids = tiny.tokenizer.apply_chat_template(
                messages[:-1], add_generation_prompt=True, return_dict=False
            )
            assert length - 500 < len(ids) <= length - NEW_TOKENS
            roles = [message["role"] for message in messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_the_windowed_target_equals_the_bundled_one_up_to_its_window_only(tiny, tmp_path):
    write_windowed(600, tmp_path)
    windowed = Target.load(str(tmp_path))
    assert windowed.identity()["weights"] == tiny.identity()["weights"]  # shares its heads
    ids = torch.randint(5, 2000, (1, 2 * WINDOW), generator=torch.Generator().manual_seed(0))
    whole, seen = tiny.features(ids), windowed.features(ids)
    torch.testing.assert_close(seen[:, :WINDOW], whole[:, :WINDOW], atol=1e-4, rtol=1e-3)
    assert not torch.isclose(seen[:, WINDOW:], whole[:, WINDOW:], atol=1e-2).all(-1).any()


def test_heads_are_measured_at_every_length_and_window(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(contexts, "NEW_TOKENS", 12)
    run = finished(tmp_path, "run", falcon(tiny, 0))
    asked = [f"table.runs=[{run}]", "table.lengths=[128,256]", "table.windows=[null,9]"]
    table = with_settings(all_tables()["contexts"], [*asked, "table.per_kind=1"])
    plan = Plan(Path(tmp_path), ("eval.chain_depth=2",))
    made = table.make(plan, (), 1)
    assert [row["row"] for row in made["rows"]] == ["falcon, sees all", "falcon, sees 9"]
    assert made["columns"] == ["128", "256"]
    for row in made["rows"]:
        assert row["identical"] + row["near_ties"] == row["outputs"] > 4
    assert len({(run["row"], run["context"]) for run in made["runs"]}) == 4
    entered = table.contenders(plan, tiny, tmp_path / "contexts", 128)
    assert [one.trained.head.config.window for one in entered] == [None, 9]
