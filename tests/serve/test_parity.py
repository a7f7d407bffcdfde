"""The comparison with an engine: bad input gives one message, and figures follow definitions."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT, run_here
from random_models import VOCAB, random_head, random_target

from specdraft.data.prompts import Prompt
from specdraft.eval.serve.engine import VLLM, EngineError
from specdraft.eval.serve.for_vllm import CHAINS, check_options, check_sizes, recipe_of
from specdraft.eval.serve.parity import MARGIN, check, job
from specdraft.eval.serve.routes import ROUTES, fixed_chain, methods_of
from specdraft.eval.serve.sides import Side, first_step, gaps_of
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, RecipeError, TargetError
from specdraft.recipes.load import load_recipe

TINY = ROOT / "recipes" / "tiny.yaml"


def engine_that(folder: Path, version: str, last: str) -> str:
    """A fake python that reports a vLLM version, and ends with these words when run."""
    path = folder / "python"
    cases = f'*importlib*) echo {version};; *) echo "{last}" >&2; exit 3;;'
    path.write_text(f'#!/bin/sh\ncase "$2" in {cases} esac\n')
    path.chmod(0o755)
    return str(path)


def parity(*arguments: str):
    return run_here("eval/parity.py", "recipes/tiny.yaml", "--engine", "vllm", *arguments)


def test_a_missing_engine_is_reported_with_how_to_install_it(tmp_path):
    done = parity("--python", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "No such file" in done.stderr
    assert "pip install vllm" in done.stderr
    done = parity("--python", engine_that(tmp_path, "", ""))
    assert done.returncode == 2
    assert "no vLLM in its environment" in done.stderr


def test_a_method_without_a_route_is_refused(tmp_path):
    done = parity("--python", "python", "--methods", "falcon_tree")
    assert done.returncode == 2
    assert "verifies chains; known: eagle_chain, eagle3_chain, falcon_chain" in done.stderr


def test_an_untested_version_and_the_output_of_a_crashed_engine_are_reported(tmp_path):
    python = engine_that(tmp_path, "9.9.9", "out of memory in layer 3")
    done = parity(
        "--python", python, "--methods", "ngram", "eval.limit=1", f"output.dir={tmp_path}"
    )
    assert done.returncode == 2
    assert "vLLM 9.9.9: tried with 0.32.0; going on" in done.stderr
    assert "vLLM 9.9.9 ended with 3" in done.stderr
    assert "out of memory in layer 3" in done.stderr


def test_an_engines_failure_and_a_recipe_without_engine_methods_are_errors(tmp_path):
    python = engine_that(tmp_path, "0.32.0", "started")
    engine = VLLM.at(python)
    with pytest.raises(EngineError, match="started"):
        engine.run({})
    with pytest.raises(RecipeError, match=r"no method of eval\.methods"):
        methods_of(load_recipe(TINY, ["eval.methods=[plain,prompt_lookup]"]))


def test_a_head_without_a_layout_is_refused_before_the_engine_starts(tmp_path):
    target, engine = Target.load("tiny"), VLLM.at(engine_that(tmp_path, "0.32.0", "started"))
    random_head(target, 1, fusion="linear", window=9).save_pretrained(tmp_path / "head")
    recipe = load_recipe(TINY.with_name("tiny_eagle.yaml"), [f"head.model={tmp_path / 'head'}"])
    with pytest.raises(HeadError, match="no serving format"):
        check(recipe, target, [Prompt("a", "a", [1, 2, 3], "a")], engine, "eagle_chain")


def test_the_engine_gets_the_head_that_the_recipe_names(tmp_path):
    for name in (str(tmp_path), "you/head"):
        recipe = load_recipe(TINY, [f"head.model={name}", "maxgram.branches=3"])
        given = ROUTES["falcon_chain"].engine(recipe, tmp_path)
        assert given["additional_config"]["specdraft"]["head"] == name
    assert fixed_chain(recipe).maxgram.branches == 1  # a chain, not a tree


def test_the_engines_length_is_bounded_by_the_targets_positions():
    prompts = [Prompt("a", "a", [1] * 100, "a")]
    target = SimpleNamespace(context=1024, eos_ids={3})
    changes = ["target.trust_remote_code=true", "eval.max_new_tokens={}"]
    for tokens, most in ((128, 100 + 128 + MARGIN), (900, 1024)):
        recipe = load_recipe(TINY, [change.format(tokens) for change in changes])
        engine = job(recipe, target, prompts, (0.0,), {})["engine"]
        assert engine["max_model_len"] == most
        assert engine["trust_remote_code"]


def test_a_recipes_own_methods_are_compared():
    of = {"tiny": ["falcon_chain"], "tiny_eagle": ["eagle_chain"], "tiny_medusa": ["medusa"]}
    of |= {"tiny_distill": ["ssd"], "tiny_maxgram": ["maxgram"]}
    for name, methods in of.items():
        assert methods_of(load_recipe(TINY.with_name(f"{name}.yaml"), [])) == methods


# Options of a proposer.


@pytest.mark.parametrize("method", CHAINS)
def test_chains_have_the_length_that_the_engine_verifies(method):
    recipe = recipe_of(method, 5, {})
    if CHAINS[method]:
        section, key = CHAINS[method]
        assert recipe.to_dict()[section][key] == 5
    assert method in ROUTES


def test_invalid_options_are_refused_by_name():
    with pytest.raises(RecipeError, match="'falcon_tree' is none that drafts chains"):
        check_options("falcon_tree", {}, {})
    with pytest.raises(RecipeError, match=r"'haed' is no option.*nearest is head"):
        check_options("falcon_chain", {}, {"haed": "x"})
    for settings in (3, {"maxgram": 3}):
        with pytest.raises(RecipeError, match=r"settings = .*give sections of a recipe"):
            check_options("falcon_chain", settings, {})
    for source in (None, ["a"]):
        with pytest.raises(RecipeError, match=r"head = .*give a folder or a Hub id"):
            check_options("falcon_chain", {}, {"head": source})
    check_options("cascade", {}, {"cascade": ["a", "b"], "table": "c"})


def test_a_head_of_other_sizes_is_refused_naming_both_targets():
    class Served:
        name, hidden_size, vocab_size = "you/other", 64, 99

    with pytest.raises(TargetError, match=f"random-0.*{VOCAB} tokens.*you/other.*99 tokens"):
        check_sizes(random_head(random_target()), Served)


# Figures.


def test_acceptance_gaps_are_measured_in_standard_errors():
    ours, theirs = (Side([[1]], [[1]], 100, accepted) for accepted in ([50, 20], [60, 20]))
    first, second = gaps_of(theirs, ours)
    assert first["gap"] == pytest.approx(0.1)
    assert first["errors"] == pytest.approx(0.1 / (0.55 * 0.45 * 2 / 100) ** 0.5)
    assert second == {"gap": 0.0, "errors": 0.0}


def test_prompts_that_differ_in_acceptance_widen_the_standard_error():
    """Half of the prompts always accept, the others never, so four prompts are four samples."""
    alike = Side([], [], 40, [20], [(10, [5])] * 4)
    apart = Side([], [], 40, [20], [(10, [10]), (10, [0])] * 2)
    theirs = Side([], [], 40, [30])
    by_steps = 0.25 / math.sqrt(0.625 * 0.375 * 2 / 40)
    assert gaps_of(theirs, alike)[0]["errors"] == pytest.approx(by_steps)
    assert gaps_of(theirs, apart)[0]["errors"] == pytest.approx(0.25 / math.sqrt(2 * 0.25 / 3))


def test_the_first_step_that_differs_is_found_with_its_position():
    ours, theirs = (Side([], steps, 1, []) for steps in ([[1, 3, 2], [4]], [[1, 3, 1], [4]]))
    found = {"prompt": 0, "step": 2, "position": 4, "ours": 2, "engine": 1}
    assert first_step(ours, theirs) == found
    assert first_step(ours, ours) is None
    assert json.dumps(found)
