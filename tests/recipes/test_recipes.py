"""Recipe files: each is valid, has the settings it promises, and names commands that exist."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from specdraft.eval.methods.registry import problems
from specdraft.recipes.load import dump, from_dict, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.glob("*.yaml"))
SMALLEST = {"name": "x", "data": {"sources": ["tiny"]}, "train": {"steps": 1}}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_file_is_valid_and_survives_a_round_trip(path: Path, tmp_path: Path):
    recipe = load_recipe(path, check=problems)
    assert recipe.name == path.stem
    assert recipe.output.dir == f"runs/{path.stem}"
    dump(recipe, tmp_path / "deep" / "recipe.yaml")
    assert load_recipe(tmp_path / "deep" / "recipe.yaml") == recipe
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["recipe.yaml"]
    assert from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_all_promised_recipes_exist():
    promised = {"tiny", "tinystories", "vicuna7b", "vicuna13b"}
    promised |= {"llama2_7b_chat", "llama2_13b_chat", "qwen2_5_7b"}
    promised |= {"tiny_eagle", "vicuna7b_eagle", "tiny_medusa"}
    promised |= {"tiny_eagle3", "qwen3_8b_eagle3", "llama31_8b_eagle3"}
    promised |= {"tiny_distill", "vicuna7b_distill", "llama2_70b_draft", "llama2_13b_lora"}
    assert promised <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_commands_in_a_recipe_header_name_files_that_exist(path: Path):
    header = path.read_text(encoding="utf-8").split("\nname:")[0]
    named = re.findall(r"recipes/[\w./]+\.(?:yaml|json)", header)
    assert f"recipes/{path.name}" in named
    assert [name for name in named if not (RECIPES.parent / name).is_file()] == []


@pytest.mark.parametrize(
    "name", ["vicuna7b", "vicuna7b_paper", "vicuna13b", "llama2_7b_chat", "llama2_13b_chat"]
)
def test_the_recipes_of_the_falcon_paper_have_its_settings(name: str):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.head.block_size == 2
    assert (recipe.optim.lr, recipe.optim.betas) == (3.0e-5, (0.9, 0.95))
    loss = recipe.loss
    assert (loss.distill_weight, loss.soft_weight, loss.feature_noise) == (0.1, 0.9, 0.1)
    assert (recipe.glance.enabled, recipe.glance.start) == (True, 0.4)


def test_learning_rates_follow_the_table_by_width_in_recipes_own():
    text = (RECIPES / "own.yaml").read_text(encoding="utf-8")
    told = {int(width): float(rate) for rate, width in re.findall(r"(\d\.\de-\d) at (\d+)", text)}
    assert len(told) == 5
    for path in FILES:
        recipe = load_recipe(path)
        found = re.search(r"hidden (\d+)", path.read_text(encoding="utf-8"))
        if recipe.head.coupling == "none" or not found:  # another form, or no width stated
            continue
        width = int(found[1])
        least = told[min((w for w in told if w >= width), default=max(told))]
        most = told[max(w for w in told if w <= width)]
        assert least <= recipe.optim.lr <= most, path.name


@pytest.mark.parametrize("name", ["vicuna7b", "tiny"])
def test_the_papers_head_has_its_own_recipe_with_the_same_target_and_data(name: str):
    ours, paper = (load_recipe(RECIPES / f"{stem}.yaml") for stem in (name, f"{name}_paper"))
    head = paper.head
    parts = (head.block_size, head.fusion, head.layers, head.reads, head.coupling)
    assert parts == (2, "lstm", 1, "own", "none")
    assert paper.glance.enabled
    assert paper.train.alignments == "one"
    assert ours.head != head
    # The same target and data, for comparison; ours may read more of the target's layers.
    assert (ours.target, replace(ours.data, feature_layers=())) == (paper.target, paper.data)


@pytest.mark.parametrize("name", ["tiny", "tinystories", "tiny_t5", "own"])
def test_recipes_with_coupled_slots_have_glancing_off(name: str):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.head.coupling == "recurrent"
    assert not recipe.glance.enabled


RELIED_ON = """target.model target.dtype data.sources data.format data.answers data.max_length
    data.cache_dir data.features head.block_size head.fusion head.layers glance.enabled
    glance.start loss.distill_weight loss.soft_weight loss.feature_noise optim.lr train.steps
    train.epochs train.batch_size train.seed eval.prompts eval.tree eval.max_new_tokens eval.limit
    output.dir hub.repo_id"""


def test_the_keys_that_tools_rely_on_exist():
    recipe = from_dict(SMALLEST).to_dict()
    for name in RELIED_ON.split():
        section, key = name.split(".")
        assert key in recipe[section]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("accelerate/*.yaml")), ids=lambda p: p.stem)
def test_accelerate_accepts_its_configs(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    file = (config.deepspeed_config or {}).get("deepspeed_config_file")
    if file:
        assert (RECIPES.parent / file).is_file()
        # accelerate refuses a value given both there and in the JSON.
        assert config.mixed_precision is None


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deepspeed_config_leaves_batch_precision_and_clipping_to_the_recipe(stage: int):
    config = json.loads((RECIPES / f"deepspeed/zero{stage}.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_clipping"] == config["bf16"]["enabled"] == "auto"
    assert config["train_micro_batch_size_per_gpu"] == "auto"
    assert config["gradient_accumulation_steps"] == "auto"


def test_the_vicuna_template_is_the_format_vicuna_was_trained_on():
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Why?"},
    ]
    opening = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. "
    )
    rendered, spans = render_jinja_template(
        [chat],
        chat_template=(RECIPES / "templates/vicuna.jinja").read_text(encoding="utf-8"),
        return_assistant_tokens_mask=True,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    turns = "USER: Hi ASSISTANT: Hello.</s>USER: Why? ASSISTANT:"
    assert rendered == [f"<s>{opening}{turns}"]
    assert [rendered[0][start:end] for start, end in spans[0]] == [" Hello.</s>"]
