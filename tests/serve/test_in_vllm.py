"""Inside vLLM: its own outputs, with our steps, acceptance and tensors."""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from commands import ROOT, run_here
from safetensors.torch import load_file, save_file
from vllm_here import PYTHON, needs_vllm

from specdraft.data.prompts import load_prompts
from specdraft.eval.methods.registry import load_trained
from specdraft.eval.serve.causes import first_cause
from specdraft.eval.serve.engine import VLLM, EngineError
from specdraft.eval.serve.parity import Ours, job, side_of
from specdraft.eval.serve.routes import ROUTES
from specdraft.models.target import Target
from specdraft.recipes.load import load_recipe

pytestmark = needs_vllm
SMALL = ["train.steps=60", "train.batch_size=8", "train.threads=1", "data.limit=300"]
SMALL += ["train.eval_every=null", "train.save_every=null", "eval.validation=1", "eval.limit=64"]
SMALL += ["eval.max_new_tokens=32", "eval.methods=[plain]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the recipe of a briefly trained head, by trainer."""
    folder = tmp_path_factory.mktemp("trained")

    def make(trainer: str, name: str):
        out = folder / name
        places = [f"output.dir={out}", f"data.cache_dir={folder / 'cache'}"]
        if not out.exists():
            done = run_here(f"train/{trainer}.py", f"recipes/{name}.yaml", *SMALL, *places)
            assert done.returncode == 0, done.stderr[-2000:]
        return load_recipe(ROOT / "recipes" / f"{name}.yaml", [*SMALL, *places])

    return make


@pytest.fixture(scope="module")
def engine():
    return VLLM.at(PYTHON)


@pytest.fixture(scope="module")
def target():
    return Target.load("tiny")


def test_the_proposer_can_be_imported_in_vllms_environment(engine):
    with TemporaryDirectory() as folder:
        (Path(folder) / "specdraft").symlink_to(ROOT)
        done = subprocess.run(
            [PYTHON, "-c", "import vllm, specdraft.eval.serve.for_vllm"],
            env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin", "HOME": folder},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr


def test_64_concurrent_requests_run_twice_give_the_engines_own_outputs(trained, engine, target):
    """Chunked prompts, cached prefixes, and preempted rows, as there is room for only half."""
    recipe = trained("falcon", "tiny")
    prompts = load_prompts(recipe, target.tokenizer)
    given = ROUTES["falcon_chain"].engine(recipe, Path())
    crowd = {"max_num_seqs": 64, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    crowd |= {"max_num_batched_tokens": 256, "block_size": 32, "num_gpu_blocks_override": 30}
    asked = job(recipe, target, prompts, (0.0, 0.0), crowd)
    shared = [id for ids in asked["prompts"][:4] for id in ids][:40]  # more than one cache block
    several = [asked["prompts"][n % len(prompts)] for n in range(64)]
    asked["prompts"] = [shared * (n % 2) + ids for n, ids in enumerate(several)]
    asked["engine"]["max_model_len"] += len(shared)
    plain, _ = engine.run(asked)
    asked["engine"] |= given
    result, _ = engine.run(asked)
    for run, alone in zip(result["runs"], plain["runs"], strict=True):
        assert run["tokens"] == alone["tokens"]
        assert side_of(run).tokens_per_step > 1.2
        assert run["counts"]["num_preemptions"] > 0
        assert run["counts"]["prefix_cache_hits"] > 0
    assert result["held"] <= 1  # from the last step


def test_a_comparison_of_an_eagle_head_passes(trained, tmp_path):
    recipe = trained("eagle", "tiny_eagle")
    out = [f"output.dir={recipe.output.dir}", f"data.cache_dir={recipe.data.cache_dir}"]
    command = ["eval/parity.py", "recipes/tiny_eagle.yaml", "--engine", "vllm", "--python", PYTHON]
    done = run_here(*command, "--out", str(tmp_path), *SMALL, *out, "--methods", "eagle_chain")
    assert done.returncode == 0, done.stdout
    (report,) = json.loads((tmp_path / "parity.json").read_text())["methods"]
    assert report["passed"]
    assert report["runs"][0]["identical_to_ours"] == report["prompts"]


def test_a_head_of_another_target_is_refused_by_the_engine(trained, engine, target, tmp_path):
    recipe = trained("falcon", "tiny")
    prompts = load_prompts(recipe, target.tokenizer)[:1]
    other = Path(target.name).absolute() if Path(target.name).is_dir() else ROOT / "models" / "tiny"
    copy = tmp_path / "another"
    copy.mkdir()
    for path in other.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    weights = load_file(copy / "model.safetensors")
    weights = {name: tensor * 1.01 for name, tensor in weights.items()}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    asked = job(recipe, target, prompts, (0.0,), ROUTES["falcon_chain"].engine(recipe, Path()))
    asked["engine"]["model"] = str(copy)
    with pytest.raises(EngineError, match=r"trained for tiny .*\n?.*not for .*another"):
        engine.run(asked)


def broken(folder: Path, change) -> None:
    """Change the exported head in a folder."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def without_norm(config: dict, tensors: dict) -> None:
    tensors["layers.0.post_attention_layernorm.weight"].fill_(1.0)


def other_base(config: dict, tensors: dict) -> None:
    config["rope_theta"] *= 2


def transposed(config: dict, tensors: dict) -> None:
    query, key = (f"layers.0.self_attn.{name}_proj.weight" for name in "qk")
    groups = len(tensors[query]) // len(tensors[key])
    swapped = tensors[key].repeat(groups, 1), tensors[query][: len(tensors[key])].clone()
    tensors[query], tensors[key] = swapped


def scaled(config: dict, tensors: dict) -> None:
    tensors["fc.weight"][:, : config["hidden_size"]] *= 2


FILES = {
    "norm left out": (without_norm, "normed"),
    "rotary base changed": (other_base, "rotary"),
    "queries and keys changed": (transposed, "query"),
    "embeddings scaled": (scaled, "fused"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_exports_cause_is_found(trained, engine, target, name, tmp_path):
    recipe = trained("eagle", "tiny_eagle")
    prompts = load_prompts(recipe, target.tokenizer)[:1]
    given = ROUTES["eagle_chain"].engine(recipe, tmp_path)
    change, tensor = FILES[name]
    broken(tmp_path / "eagle", change)
    _, theirs = engine.run(job(recipe, target, prompts, (), given))
    loaded = load_trained(recipe, target, ["eagle_chain"])
    with torch.inference_mode():
        ours = Ours("eagle_chain", recipe, target, loaded).traced(prompts[0])
    assert first_cause(target, prompts[0].input_ids, ours, theirs)["tensor"] == tensor
