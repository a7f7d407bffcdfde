"""The house keeps its shape: floors, names, imports, packaging lists."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("recipes", "models", "data", "eval", "train")
MODULES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TEXTS = (".py", ".md", ".yaml", ".json", ".toml", ".txt", ".jinja")
# Real packages that a file of ours would hide (`python train/x.py` puts train/ first on sys.path),
# whether or not this environment has them.
HIDDEN = {"datasets", "evaluate", "logging", "tokenizers", "trl", "code", "queue", "token", "peft"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "core"}

NAMED_IN_THE_DESIGN = """recipes/schema.py
recipes/load.py recipes/errors.py recipes/static_trees.py models/target.py
models/falcon.py data/cache.py data/chat.py data/store/tokens.py data/store/features.py
data/prompts.py data/regenerate.py data/tiny.py eval/engine/tree.py eval/engine/kv.py
eval/engine/packed.py eval/engine/accept.py eval/engine/decoder.py eval/measure/report.py
eval/bench.py eval/generate.py train/fit/loop.py train/objectives/losses.py
train/objectives/glance.py train/fit/checkpoint.py train/falcon.py pyproject.toml constraints.txt
README.md LICENSE .gitignore .ci/run"""


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    return "specdraft." + short(path).removesuffix(".py").replace("/", ".").removesuffix(
        ".__init__"
    )


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def installed() -> set[str]:
    """Return the import names of all that is installed here, and of the package itself."""
    return set(importlib.metadata.packages_distributions()) | {"specdraft"}


def is_entry(path: Path) -> bool:
    """Whether a file is a script that a user runs: it has `if __name__ == "__main__"`."""
    return any(
        isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test)
        for node in syntax(path).body
    )


def imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    known = {dotted(module) for module in MODULES}
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
            # `from specdraft.train import loop` imports the module loop.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in known}


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


every_module = pytest.mark.parametrize("path", MODULES, ids=short)


@every_module
def test_imports_only_point_down(path: Path):
    if is_entry(path):
        return
    above = {name for name in imported(path) if floor(name) > floor(dotted(path))}
    assert not above, f"{short(path)} imports from a floor above its own: {sorted(above)}"


@every_module
def test_nothing_imports_an_entry(path: Path):
    entries = {dotted(module) for module in MODULES if is_entry(module)}
    assert not imported(path) & entries


@every_module
def test_imports_are_absolute_and_start_with_the_package(path: Path):
    # `from models.falcon import ..` works by accident in a checkout and loads each class twice.
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno} is a relative import"
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] not in FLOORS, f"{short(path)}:{node.lineno}: {name}"


@every_module
def test_nothing_happens_on_import(path: Path):
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    allowed += (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in syntax(path).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and ("__name__" in (test := ast.unparse(node.test))):
            assert test == "__name__ == '__main__'"
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        assert isinstance(node, allowed), f"{short(path)}:{node.lineno} runs on import"


@every_module
def test_a_module_says_what_it_is(path: Path):
    if path.name != "__init__.py":
        assert ast.get_docstring(syntax(path)), f"{short(path)} has no docstring"


@every_module
def test_no_file_hides_a_package_or_is_named_vaguely(path: Path):
    stem = path.stem
    if stem == "__init__":
        return
    assert stem not in sys.stdlib_module_names | installed() | HIDDEN
    assert stem not in VAGUE


def test_the_root_is_no_package():
    assert not (ROOT / "__init__.py").exists()


def test_what_the_design_names_exists():
    missing = [name for name in NAMED_IN_THE_DESIGN.split() if not (ROOT / name).exists()]
    assert missing == []


def test_the_entries_are_scripts():
    entries = {short(path) for path in MODULES if is_entry(path)}
    named = {"train/falcon.py", "train/distill.py", "data/cache.py", "eval/bench.py"}
    assert named | {"eval/generate.py"} <= entries


def setuptools_settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_with_modules_is_a_listed_package():
    folders = {path.parent for path in MODULES}
    assert {dotted(folder) for folder in folders} == set(setuptools_settings()["packages"])
    assert [short(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_package_data_covers_every_data_file():
    patterns = setuptools_settings()["package-data"]
    packages = {path.parent for path in MODULES}
    for path in (path for name in FLOORS for path in (ROOT / name).rglob("*")):
        if not path.is_file() or path.suffix in (".py", ".pyc"):
            continue
        package = next(parent for parent in path.parents if parent in packages)
        inside = path.relative_to(package)
        covered = any(
            # As setuptools reads them: a star does not cross a folder.
            len(Path(pattern).parts) == len(inside.parts) and fnmatch(str(inside), pattern)
            for pattern in patterns.get(dotted(package), [])
        )
        assert covered, f"{short(path)} matches no package-data pattern of {dotted(package)}"


def test_constraints_pin_every_dependency_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= pinned
    assert "torch==2.13.0" in pins


def test_no_text_names_a_folder_of_one_machine():
    folders = [ROOT / name for name in (*FLOORS, "tests", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.glob("*") if path.suffix in TEXTS]
    for path in files:
        if path.suffix in TEXTS or path.name == "run":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"(?<![\w.])/(work|home|Users|root)/", text), short(path)
