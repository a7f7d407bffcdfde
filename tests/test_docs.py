"""The pages are correct: commands and snippets run, links work, figures match their files."""

import ast
import doctest
import importlib
import io
import json
import re
import shlex
import sys
import tomllib
from argparse import ArgumentParser
from contextlib import chdir
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from accelerate.commands.launch import launch_command_parser
from commands import run_here

from specdraft.eval import custom_generate
from specdraft.eval.methods.registry import METHODS
from specdraft.eval.serve.routes import ROUTES
from specdraft.recipes.load import load_recipe
from specdraft.train.plan import known_sizes, make_plan
from specdraft.train.plan_lines import plan_lines

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"  # real data, if there is any
FOLDERS = ("recipes", "models", "data", "eval", "train")
FRONT = ROOT / "README.md"
PAGES = [FRONT, *(ROOT / name / "README.md" for name in (*FOLDERS, "tests"))]
PAGES += [ROOT / "train" / "symptoms.md", ROOT / "eval" / "serve" / "README.md"]
PAGES += [ROOT / "eval" / "field.md"]
RESULTS = ROOT / "eval" / "results"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def section(page: Path, title: str) -> str:
    return page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its header."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Size, links and files.


def test_the_front_page_has_at_most_1100_words():
    assert len(FRONT.read_text().split()) <= 1100


@every_page
def test_a_page_has_at_most_1000_words_and_its_prose_lines_are_short(page):
    text = page.read_text()
    assert len(text.split()) <= 1000
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines()
    assert [line for line in prose if len(line) > 110 and not line.startswith("|")] == []


def sections(page: Path) -> dict[str, str]:
    """The text below each heading, by its anchor."""
    parts = re.split(r"^#+ (.+)$", page.read_text(), flags=re.M)[1:]
    anchors = (re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in parts[::2])
    return dict(zip(anchors, parts[1::2], strict=True))


@every_page
def test_local_links_and_anchors_exist(page):
    found = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text())
    for link in (link for pair in found for link in pair if link):
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in sections(target), link


@every_page
def test_files_of_the_repository_that_a_page_names_exist(page):
    text = re.sub(r"\[[^]]*\]\([^)]*\)", "", page.read_text())  # another test checks links
    named = re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    scripts = {name for name in quoted(text) if re.fullmatch(r"[\w/]+\.(py|jinja)", name)}
    assert [n for n in scripts if not ((page.parent / n).exists() or (ROOT / n).exists())] == []


# Commands run in a folder like the repository, with its own runs and caches.

TRAIN = "python train/falcon.py recipes/tiny.yaml"
DECODING = ["eval.limit=1", "eval.validation=1", "eval.max_new_tokens=4", "eval.threads=1"]
STEPS = ["train.steps=2", "train.batch_size=4", "train.threads=1"]
STEPS += ["train.eval_every=null", "train.save_every=null"]
TRAINERS = ("train/falcon.py", "train/eagle.py", "train/eagle3.py")
TRAINERS += ("train/medusa.py", "train/distill.py", "train/cli.py")
# What must be made before a command can read it, by recipe.
MADE_BY = {
    "recipes/tiny.yaml": [TRAIN],
    "recipes/tiny_eagle.yaml": ["python train/eagle.py recipes/tiny_eagle.yaml"],
    "recipes/tiny_eagle3.yaml": ["python train/eagle3.py recipes/tiny_eagle3.yaml"],
    "recipes/tiny_medusa.yaml": ["python train/medusa.py recipes/tiny_medusa.yaml"],
    "recipes/tiny_cascade.yaml": [
        "python train/distill.py recipes/tiny_distill.yaml",
        "python train/maxgram.py recipes/tiny_maxgram.yaml",
    ],
    "mine.yaml": ["python train/falcon.py mine.yaml"],
}
MORE = {  # overrides that keep a script's work small
    "eval/bench.py": ["eval.methods=[plain,falcon_tree]"],
    "eval/costs.py": ["--nodes", "1,4", "--rows", "1", "--repeats", "1"],
    "eval/fit.py": ["--finalists", "1"],
    "eval/doctor.py": ["--prompts", "1", "--samples", "1"],
}
# The starts of commands that do not run here, with the reason; ours are still parsed.
ELSEWHERE = {
    "git clone": "the place where this is published",
    "cd specdraft": "it is here",
    "python train/falcon.py recipes/tinystories.yaml": "the Hub: a model and stories",
    "pip install": ".ci/run does it, in an environment of its own",
    "pytest": "this is it",
    ".ci/run": "it runs this",
    "vllm serve": "somebody else's program, and a GPU",
    "V/bin/pip": "vLLM's environment: gigabytes",
    "python eval/parity.py": "it runs vLLM; tests/serve does where there is one",
    "python models/push.py": "the Hub; tests/models/test_hub.py pushes to one of its own",
    "python train/curve.py": "an hour; tests/train/test_data_curve.py fits known curves",
    "specdraft compare": "two runs; tests/measure/test_compare.py has some",
    "python eval/compare.py": "two runs; tests/measure/test_compare.py has some",
    "python eval/table.py": "a report; tests/measure/test_field_table.py has one",
    "python eval/paper.py": "half an hour; tests/papers runs small tables",
    "python data/cache.py recipes/tiny.yaml data.answers=target data.server":
        "a server; tests/data/test_server.py has one",
}  # fmt: skip
# Commands that need eight GPUs or gigabytes of weights only make their plan here.
LARGE = ("recipes/vicuna", "recipes/llama2", "recipes/qwen")


def commands(page: Path) -> list[str]:
    lines = "\n".join(code_blocks(page, "bash")).replace("\\\n", " ").splitlines()
    whole = (shlex.join(shlex.split(line, comments=True)) for line in lines)
    return [command for line in whole if line for command in line.split(" '&&' ")]


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
HERE = [c for c in COMMANDS if not c.startswith(tuple(ELSEWHERE))]


def script_and_arguments(command: str) -> tuple[str, list[str]]:
    """The script of a command and its arguments, as python or accelerate's launcher see them."""
    words = shlex.split(command)
    if words[:2] == ["accelerate", "launch"]:
        launch = launch_command_parser().parse_args(words[2:])
        if launch.config_file:
            assert (ROOT / launch.config_file).is_file()
        return launch.training_script, launch.training_script_args
    if words[0] == "specdraft":
        return "train/cli.py", words[1:]
    assert words[0] == "python"
    return words[1], words[2:]


class Workspace:
    """A folder in which the commands of the pages run as they are, each once."""

    def __init__(self, folder: Path):
        self.folder, self.done = folder, {}
        for name in FOLDERS:
            (folder / name).symlink_to(ROOT / name)
        (recipe,), (row,) = code_blocks(FRONT, "yaml"), code_blocks(FRONT, "json")
        (folder / "mine.yaml").write_text(recipe.replace("PATH_OR_HUB_ID", "models/tiny"))
        rows = (row.replace("Hi", f"What is {number}?") for number in range(100))
        (folder / "chats.jsonl").write_text("".join(rows))

    def run(self, command: str):
        if command not in self.done:
            script, arguments = script_and_arguments(command)
            recipe = next((word for word in arguments if word.endswith(".yaml")), "")
            if recipe.startswith(LARGE):
                arguments = [*arguments, "--dry-run"]
            else:
                self.make_ready(script, recipe)
                arguments = [*arguments, *self.small(script, recipe)]
            with patch.object(sys, "stdin", io.StringIO("Hello!\n/quit\n")):
                self.done[command] = run_here(script, *arguments, cwd=self.folder)
        return self.done[command]

    def make_ready(self, script: str, recipe: str) -> None:
        if script.startswith("eval/"):
            for maker in MADE_BY[recipe]:
                assert self.run(maker).returncode == 0

    @staticmethod
    def small(script: str, recipe: str) -> list[str]:
        if script == "data/tiny.py":  # it has no recipe
            return []
        steps = STEPS if script in TRAINERS else []
        rows = [] if recipe == "mine.yaml" else ["data.limit=12"]  # 100 rows, 20 held out
        return [*rows, "data.max_new_tokens=4", *DECODING, *steps, *MORE.get(script, [])]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


def test_the_front_page_has_the_install_train_and_test_commands():
    text = FRONT.read_text()
    assert f"pip install -c constraints.txt -e . && {TRAIN}\n" in text
    assert "pip install -c constraints.txt -e '.[dev]' && pytest\n" in text


@pytest.mark.parametrize("command", HERE)
def test_every_command_on_the_pages_runs(workspace, command):
    done = workspace.run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_a_training_ends_with_its_files_and_the_next_command(workspace):
    *_, trained, report, following = workspace.run(TRAIN).stdout.splitlines()
    assert trained.split() == ["trained", "runs/tiny/falcon"]
    assert report.split() == ["report", "runs/tiny/report.html"]
    assert following.split() == ["next", "specdraft", "chat", "runs/tiny/falcon"]
    for name in ("falcon/model.safetensors", "report.html"):
        assert (workspace.folder / "runs" / "tiny" / name).is_file()


class Parsed(BaseException):
    """A script has parsed its command line."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in HERE])
def test_a_command_that_is_not_run_here_parses(command, workspace):
    if not command.startswith(("python", "accelerate")):
        return
    script, arguments = script_and_arguments(command)
    parse = ArgumentParser.parse_intermixed_args

    def parse_and_stop(parser, *given):
        raise Parsed(parse(parser, *given))

    with (
        patch.object(ArgumentParser, "parse_intermixed_args", parse_and_stop),
        pytest.raises(Parsed) as parsed,
    ):
        run_here(script, *arguments, cwd=ROOT)
    options = parsed.value.args[0]
    if hasattr(options, "recipe") and options.recipe:
        load_recipe(ROOT / options.recipe, options.overrides)
    if script == "eval/paper.py" and not arguments[0].startswith("--"):
        assert list(RESULTS.glob(f"*{arguments[0]}.json"))


def test_the_dockerfile_names_existing_files_and_extras():
    text = (ROOT / "Dockerfile").read_text()
    launch = text.replace("\\\n#", "").partition("specdraft --config_file")[2].splitlines()[0]
    config, script, recipe = launch.split()
    assert (ROOT / config).is_file()
    assert (ROOT / script).is_file()
    load_recipe(ROOT / recipe)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"-e '\.\[(.*?)\]'", text)
    assert {*extras.split(",")} <= project["optional-dependencies"].keys()


def test_every_reason_not_to_run_a_command_is_used():
    for beginning in ELSEWHERE:
        assert any(command.startswith(beginning) for command in COMMANDS), beginning


SNIPPETS = [(page, code) for page in PAGES for code in code_blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), SNIPPETS, ids=[page.parent.name for page, _ in SNIPPETS])
def test_every_snippet_on_the_pages_runs(workspace, page, code):
    assert workspace.run(TRAIN).returncode == 0
    names: dict = {}
    with chdir(workspace.folder):
        exec(compile(code, str(page), "exec"), names)
    if "answers" in names:
        assert [answer.reason for answer in names["answers"]] != []
        assert not any(answer.error or answer.fallback for answer in names["answers"])


# Tables and figures.


def test_the_table_of_drafters_matches_the_registry():
    rows = table(section(FRONT, "Drafters"))
    methods = [name for row in rows for name in quoted(row[2])]
    ours = [method.name for method in METHODS.values() if method.is_ours]
    assert sorted(["plain", *methods]) == sorted(ours)
    ways = {"exported", "as it is", "no"}
    for _, train, names, transformers, vllm, sglang in rows:
        for trainer in quoted(train):
            assert {METHODS[name].trainer for name in quoted(names)} == {trainer}
        assert all(callable(getattr(custom_generate, name)) for name in quoted(transformers))
        assert sglang in ways
        assert vllm in ways or ("plugged in" in vllm and {*quoted(names)} & {*ROUTES})


@cache
def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_table_of_the_quickstart_matches_its_result_file():
    runs = {run["method"]: run for run in result("tiny")["runs"]}
    keys = ("tokens_per_step", "acceptance_rate", "speedup", "speedup_over_generate")
    for method, *figures, identical in table(section(FRONT, "Two commands")):
        run = runs.pop(quoted(method)[0])
        assert figures == [f"{run[key]:.2f}" for key in keys]
        assert identical == f"{run['identical']}/{run['outputs']}"
    assert runs == {}


def test_every_figure_of_a_result_is_in_the_section_it_links_to():
    told = section(FRONT, "Results").split("\n- ")[1:]
    assert len(told) == 6
    for line in told:
        ((link, anchor),) = re.findall(r"\((eval/results/README\.md)#([\w-]+)\)", line)
        there = sections(ROOT / link)[anchor]
        for figure in re.findall(r"\d+\.\d+", line):
            assert figure in there, f"{figure} of {line}"


ROWS = [(name, row) for row in table(section(FRONT, "Recipes")) for name in quoted(row[0])]


def test_the_table_of_recipes_lists_every_bundled_recipe():
    rows = table(section(ROOT / "recipes" / "README.md", "The recipes"))
    told = sorted(name for row in rows for name in quoted(row[0]))
    assert told == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[name for name, _ in ROWS])
def test_the_table_of_recipes_matches_the_plans(name, row, tmp_path):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"data.cache_dir={tmp_path}"])
    if name == "tinystories" and not SHARED.exists():
        pytest.skip("no TinyStories model beside the checkout")
    names, device, memory, disk, time = row
    ranks = 8 if "8" in device else 1
    with chdir(ROOT):
        plan = make_plan(recipe, ranks, *known_sizes(recipe))
        told = dict(plan_lines(plan, recipe, ranks, 1e12))
    if name == quoted(names)[0]:  # other recipes of the row need no more
        assert f"about {memory} per process" in told["memory"]
    assert f"at most {disk} (" in told["feature cache"]
    for figure in re.findall(r"[\d.]+ minutes on 8 x A100|[\d,]{5,}", time):
        assert figure in told["feature cache"] + told["steps"]


# Messages.


@cache
def texts_of_the_source() -> str:
    """Every string in our code, with `..` for each inserted value."""

    def spelled(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(spelled, node.values))
        return node.value if isinstance(node, ast.Constant) else ".."

    found = []
    for path in (path for name in FOLDERS for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str):
                found.append(spelled(node))
    return "\n".join(found)


SYMPTOMS = table((ROOT / "train" / "symptoms.md").read_text())


def test_the_messages_listed_as_symptoms_exist_in_the_source():
    messages = [message for row in SYMPTOMS for message in quoted(row[1])]
    assert len(messages) > 15
    unknown = [m for m in messages if m.strip(". ") not in texts_of_the_source()]
    assert unknown == []


EXAMPLES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_run(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    failed, tried = doctest.testmod(importlib.import_module(f"specdraft.{name}"))
    assert tried
    assert not failed


# The notebook.

NOTEBOOK = ROOT / "recipes" / "quickstart.ipynb"


def cells(kind: str) -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_notebook_was_run_in_order_without_errors_and_has_its_pictures():
    ran = [cell["execution_count"] for cell in cells("code")]
    assert ran == [*range(1, len(ran) + 1)]
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert NOTEBOOK.stat().st_size < 500_000


def test_the_notebooks_overrides_are_valid_and_its_last_cell_runs(workspace):
    """Without installing or training: the last cell runs with another head."""
    assert workspace.run(TRAIN).returncode == 0
    setup, train, *_, answer = ("".join(cell["source"]) for cell in cells("code"))
    assert '%pip install --quiet {index} ".[plots]"' in setup
    (overrides,) = re.findall(r'^SHORT = "(.*)"\n!specdraft train tiny \{SHORT\}$', train, re.M)
    assert load_recipe("tiny", overrides.split()).output.dir == "runs/short"
    with chdir(workspace.folder):
        exec(compile(answer, str(NOTEBOOK), "exec"), {"run": Path("runs/tiny")})
