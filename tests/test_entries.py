"""The commands of the README as a user runs them: exit codes, messages, a complete small run."""

from specdraft.recipes.entry import entry

import errno
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import ROOT, run, run_afresh, run_here
from shallow import shallow_target

from specdraft.train.cli import COMMANDS
from specdraft.train.kinds import trainers

SMALL = ["train.steps=6", "train.batch_size=4", "train.threads=1", "data.limit=16"]
SMALL += ["eval.limit=3", "eval.validation=2", "eval.max_new_tokens=8", "train.eval_every=3"]
# Methods that need no head, and how a shell passes invalid UTF-8.
UNTRAINED = ["eval.methods=[prompt_lookup]"]
EAGLE3 = str(ROOT / "recipes" / "tiny_eagle3.yaml")
HALF, LONG = b"\xff".decode(errors="surrogateescape"), "eval.max_new_tokens=10000000"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A head trained for six steps through the launcher of the quickstart."""
    folder = tmp_path_factory.mktemp("quickstart")
    shallow_target(folder / "target")
    places = [*run_of(folder), f"data.cache_dir={folder / 'cache'}"]
    launcher = ["-m", "accelerate.commands.launch", "tests/short_visits.py"]
    done = run_afresh(*launcher, "train/falcon.py", "recipes/tiny.yaml", *SMALL, *places)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "falcon_tree: fitted, " in done.stdout
    return folder


def run_of(folder: Path) -> list[str]:
    """Overrides that name its run and its target."""
    target = [f"target.model={folder / 'target'}", "data.feature_layers=[1]"]
    return [f"output.dir={folder / 'run'}", *target]


def test_a_run_leaves_its_head_log_checkpoints_and_report(finished):
    names = {path.name for path in (finished / "run").iterdir()}
    expected = {"recipe.yaml", "log.jsonl", "tensorboard", "checkpoints", "falcon", "report.json"}
    assert expected <= names
    report = json.loads((finished / "run" / "report.json").read_text())
    rows = {row["method"]: row for row in report["runs"]}
    for method in ("plain", "generate", "hf_prompt_lookup", "prompt_lookup", "falcon_tree"):
        assert rows[method]["identical"] + rows[method]["near_ties"] == 3
    assert {p.name for p in (finished / "run" / "falcon").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "README.md",
        "tree.yaml",
    }
    lines = [json.loads(line) for line in (finished / "run" / "log.jsonl").open()]
    assert any("tokens_per_step" in json.dumps(line) for line in lines)


def test_a_finished_head_can_be_used_in_a_chat_and_benchmarked(finished):
    places = [*run_of(finished), "eval.max_new_tokens=12", "eval.limit=2"]
    watched = run_here("eval/generate.py", "recipes/tiny.yaml", *places, "--prompt", "Hello there!")
    assert watched.returncode == 0, watched.stderr
    assert "tokens/s" in watched.stdout
    out = finished / "bench"
    options = ["--methods", "plain,falcon_tree,falcon_dynamic"]
    options += ["--batch-sizes", "1,2", "--temperatures", "0,1"]
    costs = finished / "run" / "costs.json"
    assert {point["rows"] for point in json.loads(costs.read_text())["points"]} == {1}
    bench = run_here("eval/bench.py", "recipes/tiny.yaml", *places, *options, "--out", str(out))
    assert bench.returncode == 0, bench.stderr
    rows = json.loads((out / "report.json").read_text())["runs"]
    assert {(row["batch_size"], row["temperature"]) for row in rows} == {
        (1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0),
    }  # fmt: skip
    assert all(row["identical"] + row["near_ties"] == 2 for row in rows)
    # For the dynamic drafts, the costs of two rows were measured.
    priced = [p["what"] for p in json.loads(costs.read_text())["points"] if p["rows"] == 2]
    assert {"verify", "loop"} <= {*priced}


def test_the_specdraft_command_takes_a_run_or_its_head_instead_of_a_recipe(finished, tmp_path):
    small = ["eval.limit=1", "eval.max_new_tokens=8", f"output.dir={finished / 'run'}"]
    out = ["--methods", "plain,falcon_tree", "--out", str(tmp_path)]
    for folder in (finished / "run", finished / "run" / "falcon"):
        done = run_here("train/cli.py", "bench", str(folder), *small, *out)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads((tmp_path / "report.json").read_text())["runs"][1:]
        assert (row["method"], row["identical"]) == ("falcon_tree", 1)


def test_specdraft_help_and_version_do_not_import_torch():
    lines = "import sys; from specdraft.train import cli; cli.main(); print('torch' in sys.modules)"
    for option in ("--help", "--version"):
        told = subprocess.run([sys.executable, "-c", lines, option], capture_output=True, text=True)
        assert told.stdout.splitlines()[-1] == "False", told.stderr


def test_the_specdraft_command_lists_its_commands_and_suggests_the_nearest():
    helped = run_here("train/cli.py")
    assert helped.returncode == 0
    assert max(map(len, helped.stdout.splitlines())) <= 80
    assert all(f"\n  {name} " in helped.stdout for name in COMMANDS)
    wrong = run_here("train/cli.py", "benhc", "tiny")
    assert wrong.returncode == 2
    assert "no such command; nearest is bench" in wrong.stderr
    assert run_here("train/cli.py", "--version").stdout.strip() == version("specdraft")
    for name, (module, _) in COMMANDS.items():
        assert name == "train" or (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize(
    ("recipe", "scripts"),
    [
        ("tiny", ["train.falcon"]),
        ("tiny_eagle", ["train.eagle"]),
        ("tiny_eagle3", ["train.eagle3"]),
        ("recipes/tiny_medusa.yaml", ["train.medusa"]),
        ("tiny_distill", ["train.distill"]),
        ("tiny_maxgram", ["train.maxgram"]),
        ("tiny_cascade", ["train.distill", "train.maxgram"]),
    ],
)
def test_a_recipe_is_trained_by_the_scripts_its_methods_need(recipe, scripts):
    assert sorted(trainers([recipe, "--dry-run", "eval.limit=3"])) == scripts


def test_a_run_that_ended_before_its_tree_was_fitted_resumes_there(finished):
    tree = finished / "run" / "falcon" / "tree.yaml"
    places = [*run_of(finished), f"data.cache_dir={finished / 'cache'}"]
    few = "eval.methods=[plain,falcon_tree]"
    again = run_here("train/falcon.py", "recipes/tiny.yaml", *SMALL, *places, few)
    assert again.returncode == 0, again.stderr
    assert str(tree) not in again.stdout  # it fits these weights and this machine
    weights = (tree.parent / "model.safetensors").read_bytes()
    tree.unlink()
    again = run_here("train/falcon.py", "recipes/tiny.yaml", *SMALL, *places)
    assert again.returncode == 0, again.stderr
    assert "resumed at step 6 of 6" in again.stderr + again.stdout
    assert "points are measured already" in again.stderr
    assert f"wrote {tree}" in again.stdout
    assert (tree.parent / "model.safetensors").read_bytes() == weights


def test_a_head_for_another_target_is_refused(finished):
    moved = finished / "other"
    (moved / "falcon").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        text = (finished / "run" / "falcon" / name).read_bytes()
        (moved / "falcon" / name).write_bytes(text.replace(b'"weights": "', b'"weights": "0'))
    done = run_here("eval/bench.py", "recipes/tiny.yaml", f"output.dir={moved}")
    assert done.returncode == 2
    assert f"this head was trained for {finished / 'target'}" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("train/falcon.py", ["nowhere.yaml"], "nowhere.yaml"),
        ("train/falcon.py", ["recipes/tiny.yaml", "optim.learning=1"], "optim.lr"),
        ("train/falcon.py", ["recipes/tiny.yaml", "data.sources=[gone.jsonl]"], "gone.jsonl"),
        ("train/falcon.py", ["recipes/tiny.yaml", "target.model=./gone"], "no folder at ./gone"),
        ("eval/bench.py", ["recipes/tiny.yaml", "output.dir=gone"], "no trained head at gone"),
        (
            "eval/bench.py",
            [EAGLE3, "output.dir=gone"],
            "launch train/eagle3.py",
        ),
        ("eval/bench.py", ["recipes/tiny.yaml", "--methods", "medusa"], "medusa"),
        ("eval/bench.py", ["recipes/tiny.yaml", "--batch-sizes", ","], "--batch-sizes ,: give"),
        ("eval/bench.py", ["recipes/tiny.yaml", "eval.threads=100000"], "<= 1000"),
        ("eval/generate.py", ["recipes/tiny.yaml", *UNTRAINED, "--prompt", HALF], "half of a pair"),
        ("eval/bench.py", ["recipes/tiny.yaml", *UNTRAINED, LONG], "tiny has a context of 1024"),
    ],
)
def test_bad_input_gives_one_clear_message_and_exit_code_2(script, arguments, message, tmp_path):
    arguments = [str(ROOT / a) if a == "recipes/tiny.yaml" else a for a in arguments]
    check_refusal(run_here(str(ROOT / script), *arguments, cwd=tmp_path), message)


def check_refusal(done, message: str) -> None:
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refusal_in_its_own_process_has_exit_code_2(tmp_path):
    # One command is enough: all refuse by the same function.
    push = run(str(ROOT / "models/push.py"), "gone", "you/x", cwd=tmp_path)
    check_refusal(push, "no recipe at gone")


def test_a_path_without_access_is_reported_with_what_to_do(capsys):
    def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "cache/x")

    with pytest.raises(SystemExit, match="2"):
        entry(write)()
    assert "'cache/x'; give yourself access, or another place (" in capsys.readouterr().err


def test_specdraft_debug_shows_the_traceback(tmp_path):
    command = [str(ROOT / "eval/bench.py"), "nowhere.yaml"]
    assert "Traceback" in run_here(*command, cwd=tmp_path, SPECDRAFT_DEBUG="1").stderr
