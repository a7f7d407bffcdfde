"""Answers regenerated with any drafter are the same, in the same cache."""

import json
from collections import Counter

import pytest
import torch
from decoding import decode
from random_models import random_target
from test_placement import accelerator
from test_regenerate import contents

from specdraft.data.answers import Answer, Ask
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import LMDrafter
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.generation.answers import answer, build_token_cache, within_context
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.eval.methods.registry import problems
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, RecipeError, TargetError
from specdraft.recipes.load import from_dict

DRAFTERS = {"prompt_lookup": PromptLookup, "falcon_tree": FalconDrafter, "ssd": LMDrafter}


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The folder of an earlier run: a random head, and a student that is the target itself."""
    folder = tmp_path_factory.mktemp("run")
    head_of(tiny).save_pretrained(folder / "head")
    tiny.model.save_pretrained(folder / "student")
    tiny.tokenizer.save_pretrained(folder / "student")
    return folder


def head_of(target: Target, seed: int = 0) -> FalconHead:
    torch.manual_seed(seed)
    config = FalconConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        block_size=2,
        heads=4,
        kv_heads=2,
        intermediate_size=32,
        target=target.identity(),
    )
    return FalconHead(config)


def test_each_answer_is_sampled_with_its_own_temperature_and_seed():
    """Whatever else is decoded with it."""
    target, prompt = random_target(), [3, 1, 4]
    settings = [(0.0, 1), (1.5, 1), (1.5, 2), (0.7, 2), (1.5, 1)]
    asks = [Ask(prompt, 12, temperature, seed) for temperature, seed in settings]
    found = {index: said.tokens for index, said in answer(target, 2, asks)}
    for index, (temperature, seed) in enumerate(settings):
        request = Request(prompt, 12, temperature, seed=seed)
        assert [found[index]] == decode(Decoder(target, None, 1, 64), [request])
    assert found[1] == found[4]
    assert len({tuple(tokens) for tokens in found.values()}) == 4


def recipe(out, drafter="plain", **data):
    own = {"samples": 3, "temperature": 0.8, "max_new_tokens": 12, "batch_rows": 4, "limit": 5}
    data = {"sources": ["tiny"], "max_length": 96, "answers": "target", **own, **data}
    data |= {"drafter": drafter, "cache_dir": str(out / drafter)}
    tree = {
        "name": "x",
        "data": data,
        "train": {"steps": 1},
        "eval": {"tree": "tiny_k2"},
        "output": {"dir": str(out / "none")},
    }
    return from_dict(tree, problems)


def build(settings, target) -> TokenCache:
    return build_token_cache(settings, target, accelerator())


@pytest.fixture
def drafts(monkeypatch):
    """The number of draft calls of each kind of drafter."""
    asked = Counter()
    for name, kind in DRAFTERS.items():

        def counting(self, rows, draft=kind.draft, name=name):
            asked[name] += len(rows)
            return draft(self, rows)

        monkeypatch.setattr(kind, "draft", counting)
    return asked


def answers(cache: TokenCache) -> list[str]:
    """The lines of the answers file, in an order independent of drafts."""
    return sorted((cache.directory / "answers-0.jsonl").read_text().splitlines())


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_cache_is_the_same_with_any_drafter(tiny, run, tmp_path, drafts, name):
    plain = build(recipe(tmp_path), tiny)
    slots = [json.loads(line)["slot"] for line in answers(plain)]
    assert {sample for _, sample, _ in slots} == {0, 1, 2}  # greedy, and sampled twice
    assert not drafts
    trained = {} if name == "prompt_lookup" else {"drafter_run": str(run)}
    cache = build(recipe(tmp_path, name, **trained), tiny)
    assert drafts[name] > 0
    assert cache.directory.name == plain.directory.name
    assert answers(cache) == answers(plain)
    assert contents(cache) == contents(plain)


def test_an_interrupted_run_can_resume_with_another_drafter(tiny, run, tmp_path, drafts):
    plain = build(recipe(tmp_path), tiny)
    began = tmp_path / "falcon_tree" / f"{plain.directory.name}.partial"
    began.mkdir(parents=True)
    kept = (plain.directory / "answers-0.jsonl").read_text().splitlines(keepends=True)[:-1]
    (began / "answers-0.jsonl").write_text("".join(kept))
    cache = build(recipe(tmp_path, "falcon_tree", drafter_run=str(run)), tiny)
    assert 0 < drafts["falcon_tree"] <= 12  # for the one missing answer
    assert answers(cache) == answers(plain)
    assert contents(cache) == contents(plain)


def test_a_finished_cache_needs_no_drafter(tiny, tmp_path):
    build(recipe(tmp_path), tiny)
    (tmp_path / "plain").rename(tmp_path / "falcon_tree")
    assert len(build(recipe(tmp_path, "falcon_tree"), tiny)) > 0


def test_a_drafter_that_is_missing_or_for_another_target_is_refused(tiny, tmp_path):
    with pytest.raises(HeadError, match=str(tmp_path / "none" / "falcon")):
        build(recipe(tmp_path, "falcon_tree"), tiny)
    other = random_target()
    head_of(other).save_pretrained(tmp_path / "other" / "head")
    with pytest.raises(
        TargetError, match=r"trained for random-0 \(weights .* not for tiny \(weigh"
    ):
        build(recipe(tmp_path, "falcon_tree", drafter_run=str(tmp_path / "other")), tiny)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"drafter": "falcon_three"},
            "must be one of plain, prompt_lookup, falcon_chain, falcon_t",
        ),
        ({"drafter": "falcon_three"}, "nearest is falcon_tree"),
        ({"drafter": "hf_assisted"}, "data.drafter = 'hf_assisted': must be one of plain, prompt"),
        ({"drafter": "ssd", "answers": "dataset", "samples": 1}, "needs data.answers=target"),
        ({"drafter": "ssd", "server": "http://a/v1"}, "a server drafts as it was started"),
        ({"drafter_run": "runs/a"}, "data.drafter_run = 'runs/a': needs data.drafter"),
    ],
    ids=str,
)
def test_an_invalid_drafter_setting_is_refused(tmp_path, data, expected):
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, **data)
    assert expected in str(caught.value)


def test_answers_are_limited_to_the_targets_positions_and_longer_prompts_fail(tiny):
    heard = []

    def generate(asks):
        heard.extend(asks)
        for index in reversed(range(len(asks))):
            yield index, Answer([asks[index].prompt_ids[0]], ended=True)

    asks = [Ask([n] * length, 100, 0.0, n) for n, length in enumerate((9, 1024, 1000, 5000, 20))]
    found = dict(within_context(generate, tiny)(asks))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert {n: a.tokens for n, a in found.items() if not a.failure} == {0: [0], 2: [2], 4: [4]}
    assert [ask.max_new_tokens for ask in heard] == [100, 24, 100]
    assert found[1].failure == (
        "a prompt of 1024 tokens leaves no room for one in the 1024 positions of tiny"
    )
    assert "5000 tokens" in found[3].failure
    assert dict(within_context(generate, tiny)(asks[1:2])).keys() == {0}
