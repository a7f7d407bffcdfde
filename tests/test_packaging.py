"""The wheel has the whole package: every module can be imported, every data file is inside."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import run

ROOT = Path(__file__).parents[1]
FLOORS = ("recipes", "models", "data", "eval", "train")

# Both tests use one wheel: keep them in one worker.

# Imports our modules from the wheel, not from this checkout; dependencies are installed.
IMPORT_ALL = """
import importlib, sys
place, *names = sys.argv[1:]
sys.path.insert(0, place)
for name in [name for name in sys.modules if name.startswith("specdraft")]:
    del sys.modules[name]
for name in names:
    try:
        where = importlib.import_module(name).__file__
    except Exception as error:
        sys.exit(f"{name}: {type(error).__name__}: {error}")
    if not where.startswith(place):
        sys.exit(f"{name} came from {where}")
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel offline from a copy of the working tree; return the folder of its files."""
    place = tmp_path_factory.mktemp("wheel")
    # A copy, since setuptools leaves build/ behind, whose stale files would get into later wheels.
    source = place / "source"
    for floor in FLOORS:
        shutil.copytree(ROOT / floor, source / floor, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    build += ["--no-index", "--quiet", "--wheel-dir", str(place), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "elsewhere")
    return place / "elsewhere"


def test_the_wheel_has_exactly_the_files_of_the_package(unpacked: Path):
    def files(folder: Path) -> set[str]:
        found = {path for path in folder.rglob("*") if path.is_file()}
        return {
            path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts
        }

    ours = {f"{floor}/{name}" for floor in FLOORS for name in files(ROOT / floor)}
    kept = {name for name in ours if name.startswith("eval/results/") or name.endswith(".ipynb")}
    assert len(kept) > 1  # results and the notebook stay in the repository
    assert files(unpacked / "specdraft") == ours - kept
    licences = list(unpacked.glob("specdraft-*.dist-info/licenses/LICENSE"))
    assert len(licences) == 1


def test_every_module_imports_from_the_wheel(unpacked: Path, tmp_path: Path):
    modules = [
        "specdraft." + path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
        for floor in FLOORS
        for path in sorted((ROOT / floor).rglob("*.py"))
    ]
    names = [name.removesuffix(".__init__") for name in modules]
    (tmp_path / "import_all.py").write_text(IMPORT_ALL)
    done = run(tmp_path / "import_all.py", unpacked, *names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "a module prints when it is imported"
