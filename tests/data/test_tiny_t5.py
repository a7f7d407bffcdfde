"""The small encoder-decoder: pairs of the made-up world, batches of them, and its script."""

import json
import random
from itertools import islice

import pytest
import torch
from commands import run_here
from transformers import AutoTokenizer

from specdraft.data.world.pairs import held_out_pairs, pair, pairs, word_salad
from specdraft.data.world.retelling import TASKS
from specdraft.data.world.t5 import IGNORED, batches, build_t5, loss_of
from specdraft.data.world.world import is_held_out
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_target_dir())


def test_no_training_source_is_held_out_and_every_evaluation_source_is():
    drawn = [*islice(pairs(5), 500)]
    assert drawn == [*islice(pairs(5), 500)]
    assert not any(is_held_out(source) for source, _ in drawn)
    measured = [*held_out_pairs(1, 7)]
    assert [task for task, _ in measured] == [task for task in TASKS for _ in range(7)]
    assert all(is_held_out(source) for _, (source, _) in measured)


@pytest.mark.parametrize("task", TASKS)
def test_most_words_of_a_target_occur_in_its_source(task):
    for seed in range(50):
        source, target = pair(random.Random(seed), task)
        words = target.replace('"', " ").replace("\n", " ").split()
        copied = sum(word in source for word in words)
        assert copied > 0.6 * len(words), (source, target)


def test_the_target_of_a_random_text_is_its_copy():
    source, target = word_salad(random.Random(2))
    assert source == f"{target}\n\nRepeat the text."
    assert word_salad(random.Random(3)) != (source, target)


def test_batches_have_complete_pairs_and_keep_their_token_limit(tokenizer):
    read, salads, written = set(), 0, islice(pairs(3), 2000)
    known = {
        tuple(tokenizer(a)["input_ids"]): [*tokenizer(b)["input_ids"], tokenizer.eos_token_id]
        for a, b in written
    }
    for count, (sources, targets) in islice(batches(tokenizer, 3, 1500), 60):
        assert len(sources) * (sources.shape[1] + targets.shape[1]) <= 1500
        rows = []
        for source, target in zip(sources, targets, strict=True):
            ids = tuple(source[source != tokenizer.pad_token_id].tolist())
            said = target[target != IGNORED].tolist()
            if ids not in known:  # a random text and its copy
                salads += 1
                assert said[-1] == tokenizer.eos_token_id
                assert tokenizer.decode(ids).startswith(f"{tokenizer.decode(said[:-1])}\n\n")
            else:
                assert known[ids] == said
            rows.append(len(ids) + len(said))
            read.add(ids)
        assert count == sum(rows)
    assert 300 < len(read) < 4 * salads


def test_the_loss_equals_the_models_own(tokenizer):
    model = build_t5(tokenizer, 0)
    _, (sources, targets) = next(batches(tokenizer, 0, 400))
    mask = sources != tokenizer.pad_token_id
    own = model(input_ids=sources, attention_mask=mask, labels=targets).loss
    torch.testing.assert_close(loss_of(model, sources, targets), own)


def test_the_script_makes_a_target_that_a_recipe_can_use(tmp_path):
    out = tmp_path / "t5"
    made = run_here("data/tiny_t5.py", "--steps", "2", "--threads", "1", "--out", str(out))
    assert made.returncode == 0, made.stderr
    target = Target.load(str(out))
    assert target.model.generation_config.decoder_start_token_id == 0  # `generate` needs it
    assert target.reads_source
    assert (target.start_ids, target.eos_ids) == ([0], {3})
    assert not torch.equal(target.embedding_weight, target.lm_head_weight)  # untied as in FLAN-T5
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert [p["category"] for p in prompts] == [task for task in TASKS for _ in range(60)]
    settings = [f"target.model={out}", f"data.sources=[{out}/pairs.jsonl]"]
    settings += [f"eval.prompts={out}/prompts.jsonl", f"output.dir={tmp_path / 'run'}"]
    plan = run_here("train/falcon.py", "recipes/tiny_t5.yaml", *settings, "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "4,000 rows" in plan.stdout
