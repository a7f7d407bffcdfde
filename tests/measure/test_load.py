"""`load` loads a drafter of any kind by name, and three lines of code generate with it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_models import random_eagle3, random_head, random_target
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdraft.eval.custom_generate import Speculative, load, maxgram, method, ssd
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.errors import DataError, HeadError, RecipeError, TargetError
from specdraft.recipes.static_trees import TREES as BUNDLED

KINDS = ("falcon", "eagle", "eagle3", "medusa", "student", "table")
TREES = {"falcon": "tiny_k2", "eagle": "tiny_k1", "eagle3": "tiny_k1", "medusa": "tiny_medusa_k4"}
# What a user writes; Any because mypy accepts no `generate` of transformers' Auto classes.
LINES = """
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from specdraft.eval.custom_generate import load

model: Any = AutoModelForCausalLM.from_pretrained({target!r})
tokenizer: Any = AutoTokenizer.from_pretrained({target!r})
fast = load({drafter!r})
chat = [{{"role": "user", "content": "Tell me a story about a fox."}}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(
    **inputs, custom_generate=fast, streamer=TextStreamer(tokenizer), max_new_tokens=12
)
gain: float = fast.last.tokens_per_step if fast.last else 0.0
"""


@pytest.fixture(scope="module")
def tiny() -> Target:
    return Target.load("tiny")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """A run with a drafter of every kind."""
    run = tmp_path_factory.mktemp("run")
    random_head(tiny, 2).save_pretrained(run / "falcon")
    random_head(tiny, 1, fusion="linear").save_pretrained(run / "eagle")
    random_eagle3(tiny, feature_layers=(2, 6, 9)).save_pretrained(run / "eagle3")
    config = MedusaConfig(tiny.hidden_size, tiny.vocab_size, target=tiny.identity())
    MedusaHeads.of(config, tiny.lm_head_weight).save_pretrained(run / "medusa")
    tiny.model.save_pretrained(run / "student")
    tiny.tokenizer.save_pretrained(run / "student")
    table = MaxGramTable(MaxGramConfig(tiny.vocab_size))
    table.next_id.fill_(7)
    table.seen.fill_(1)
    table.agreed.fill_(1)
    table.save_pretrained(run / "table")
    for kind, tree in TREES.items():
        shutil.copy(BUNDLED / f"{tree}.yaml", run / kind / "tree.yaml")
    return run


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled_target_dir(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_target_dir(), padding_side="left")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_any_kind_is_loaded_from_its_folder(run, kind, model, tokenizer, tmp_path):
    copied = shutil.copytree(run / kind, tmp_path / "mine")
    inputs = tokenizer(["Once upon a time", "Hello"], padding=True, return_tensors="pt")
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=10)
    for place in (str(run / kind), copied):
        fast = load(place)
        options = {"do_sample": False, "max_new_tokens": 10, "custom_generate": fast}
        assert torch.equal(model.generate(**inputs, **options), plain)
        assert fast.last.steps > 0
    if kind == "student":  # the target itself
        assert fast.last.tokens_per_step > 2


def test_a_student_may_be_a_pickled_model(run, model, tokenizer, tmp_path):
    """A student may be any small model of the target's family, not only an export of ours."""
    copied = shutil.copytree(run / "student", tmp_path / "mine")
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    fast = load(copied)
    model.generate(**inputs, do_sample=False, max_new_tokens=10, custom_generate=fast)
    assert fast.last.tokens_per_step > 2  # it equals the target


def test_students_of_a_cascade_are_given_by_their_folders(run, model, tokenizer):
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=10)
    student, table = str(run / "student"), run / "table"
    for students in (student, [student], (run / "student",)):
        fast = Speculative(method("cascade", cascade=students, table=table))
        options = {"do_sample": False, "max_new_tokens": 10, "custom_generate": fast}
        assert torch.equal(model.generate(**inputs, **options), plain)
        assert fast.last.tokens_per_step > 1.5


def test_students_of_a_cascade_may_be_models(run, tiny, model, tokenizer):
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 10}
    plain = model.generate(**inputs, **options)
    one = {"table": run / "table"}
    two = one | {"settings": {"cascade": {"k": [[3, 2, 1], [0, 2, 1], [0, 0, 1]]}}}
    mixed = [tiny, run / "student"]
    for students, parts in ((tiny, one), ([tiny], one), ([tiny, tiny], two), (mixed, two)):
        fast = Speculative(method("cascade", cascade=students, **parts))
        assert torch.equal(model.generate(**inputs, **options, custom_generate=fast), plain)
        assert fast.last.tokens_per_step > 1.5
    with pytest.raises(RecipeError, match="must be 3 x 3"):
        method("cascade", cascade=(tiny, tiny), **one)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_a_drafter_object_of_another_vocabulary_is_refused(tiny, model, tokenizer, vocab):
    inputs, config = tokenizer("Once", return_tensors="pt"), MaxGramConfig(vocab)
    students = random_target(vocab=vocab)
    for make in (ssd(students), method("cascade", cascade=students), maxgram(MaxGramTable(config))):
        with pytest.raises(TargetError, match=str(vocab)):
            model.generate(**inputs, custom_generate=Speculative(make))


def test_an_unknown_drafter_argument_and_a_transformers_method_are_refused(model, tokenizer):
    with pytest.raises(
        DataError, match=r"method\('ssd'\): teacher is nothing that drafts; .*student"
    ):
        method("ssd", teacher="you/model")
    inputs = tokenizer("Once", return_tensors="pt")
    with pytest.raises(RecipeError, match="hf_prompt_lookup is transformers' own way"):
        model.generate(**inputs, custom_generate=Speculative(method("hf_prompt_lookup")))


def test_a_run_with_one_drafter_loads_it_and_one_with_several_asks_which(run, tmp_path):
    with pytest.raises(HeadError, match=rf"several drafters in .*, falcon, .*one: {run}/falcon"):
        load(run)
    with pytest.raises(HeadError, match=r"no drafter in .*train one"):
        load(tmp_path)
    shutil.copytree(run / "medusa", tmp_path / "medusa")
    load(tmp_path)
    (tmp_path / "medusa").rename(tmp_path / "head")
    shutil.rmtree(tmp_path / "head")
    shutil.copytree(run / "falcon", tmp_path / "head")  # the layout of older runs
    load(str(tmp_path))
    shutil.copytree(run / "table", tmp_path / "table")  # counted beside the head
    load(str(tmp_path))


def test_the_readmes_three_lines_stream_a_chat_and_sample_a_batch(run, model, tokenizer, capsys):
    names: dict = {}
    text = LINES.format(target=str(bundled_target_dir()), drafter=str(run / "student"))
    exec(compile(text, "three_lines.py", "exec"), names)
    assert names["gain"] > 2
    answer = tokenizer.decode(names["output"][0, names["inputs"]["input_ids"].shape[1] :])
    assert answer.strip() in capsys.readouterr().out
    inputs = tokenizer(["Once upon a time", "Hello"], padding=True, return_tensors="pt")
    options = {"custom_generate": names["fast"], "max_new_tokens": 8, "do_sample": True}
    sampled = []
    for _ in range(2):
        torch.manual_seed(1)
        sampled.append(model.generate(**inputs, **options, temperature=0.9, top_p=0.9))
    assert torch.equal(*sampled)
    assert sampled[0].shape[0] == 2


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy")
def test_the_three_lines_and_the_readmes_decoder_example_pass_mypy(run, tmp_path):
    lines, queue = tmp_path / "three_lines.py", tmp_path / "of_requests.py"
    lines.write_text(LINES.format(target="models/tiny", drafter="you/head"))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    queue.write_text(readme.split("```python")[2].partition("```")[0])
    mypy = [sys.executable, "-m", "mypy", lines, queue]
    done = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
